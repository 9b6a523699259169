"""A model that is a pure function: what KV each token of a text must have, and ranks whose pages hold it.

Every element depends on the whole text before it, its layer, its head and its place in the row. So KV of another
prefix, layer, head or token is told from the right one, bit for bit.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from tplayout_vllm.pages import Canonical, Run, gather, scatter
from tplayout_vllm.probe import PageLayout, PartLayout
from tplayout_vllm.worker import FoundLayer, WorkerSide

torch.set_num_threads(1)  # tiny copies only: threads that wait for each other cost more than they do

POISON = 0x7FADBEEF - 2**31  # an int32 that no KV has but by a chance of one in 4 billion
VOCABULARY = 500
_MASK = 2**64 - 1


class Text:
    """An endless text: the prompt, then what the model would write. Each history value stands for all tokens so far."""

    def __init__(self, prompt: Sequence[int], salt: str | None = None) -> None:
        self.tokens: list[int] = []
        self.salt = salt
        self._history: list[int] = []
        self._start = int.from_bytes((salt or "").encode()[:7].ljust(7, b"\0"), "little")
        for token in prompt:
            self._push(token)

    def upto(self, count: int) -> list[int]:
        """The first `count` tokens."""
        while len(self.tokens) < count:
            self._push(self._history[-1] % 8191 % VOCABULARY)
        return self.tokens[:count]

    def history(self, first: int, last: int) -> np.ndarray:
        """uint64 [last - first]: what KV of tokens [first, last) is a function of."""
        self.upto(last)
        return np.array(self._history[first:last], dtype=np.uint64)

    def history_with(self, first: int, tokens: Sequence[int]) -> np.ndarray:
        """The same for other tokens in place of those from `first` on: drafts."""
        state, out = self._history[first - 1], []
        for token in tokens:
            state = _mix(state, token)
            out.append(state)
        return np.array(out, dtype=np.uint64)

    def _push(self, token: int) -> None:
        self._history.append(_mix(self._history[-1] if self._history else self._start, token))
        self.tokens.append(token)


def _mix(state: int, token: int) -> int:
    state = ((state ^ (token + 1)) * 0x9E3779B97F4A7C15 + 0x7F4A7C15) & _MASK
    return state ^ (state >> 29)


@dataclass(frozen=True)
class SimModel:
    """windows: a layer's sliding window, None for full attention. heads: KV heads of the whole model.

    hybrid: window layers give blocks back; without, as with --disable-hybrid-kv-cache-manager, all share one table.
    """

    windows: tuple[int | None, ...] = (None, None)
    heads: int = 4
    dim: int = 4
    hybrid: bool = True

    @cached_property
    def tables(self) -> list[list[int]]:
        """Layers by KV-cache group, full attention last, as vLLM has them."""
        if not self.hybrid:
            return [list(range(len(self.windows)))]
        kinds = sorted(set(self.windows), key=lambda window: (window is None, window))
        return [[i for i, window in enumerate(self.windows) if window == kind] for kind in kinds]

    @cached_property
    def _table_of(self) -> dict[int, int]:
        return {layer: table for table, layers in enumerate(self.tables) for layer in layers}

    def table_of(self, layer: int) -> int:
        return self._table_of[layer]

    def kv(self, layer: int, heads: range, history: np.ndarray) -> torch.Tensor:
        """int32 [tokens, heads, 2, dim]: the bits of K and V."""
        where = np.arange(self.heads * 2 * self.dim, dtype=np.uint64).reshape(self.heads, 2, self.dim)
        where = where[heads.start : heads.stop] + np.uint64(1000 * layer + 17)
        mixed = (history[:, None, None, None] ^ (where * np.uint64(0xD6E8FEB86659FD93))) * np.uint64(0xA0761D6478BD642F)
        return torch.from_numpy((mixed >> np.uint64(32)).astype(np.uint32).view(np.int32))


def layer_name(layer: int) -> str:
    return f"model.layers.{layer}.self_attn.attn"


class Rank:
    """One rank's pages. Groups overlay the same memory, as vLLM's do: a block belongs to one group at a time.

    kernel: tokens of a kernel block, of which `block` (the scheduler's) is a multiple.
    """

    def __init__(self, model: SimModel, tp: tuple[int, int], block: int, kernel: int, blocks: int, order: str) -> None:
        size, rank = tp
        self.model, self.kernel, self._ratio = model, kernel, block // kernel
        self.heads = (
            range(rank * model.heads // size, (rank + 1) * model.heads // size)
            if size <= model.heads
            else range(rank * model.heads // size, rank * model.heads // size + 1)
        )
        self._order = order
        n, d, h = kernel, model.dim, len(self.heads)
        self._memory = [
            torch.full((blocks * self._ratio, h * 2 * n * d), POISON, dtype=torch.int32)
            for _ in range(max(map(len, model.tables)))
        ]
        self._remembered = [memory.clone() for memory in self._memory]
        if order == "column":  # as vLLM's CPU pages: K column-major
            parts = ((0, (1, 2 * n * d, n)), (n * d, (d, 2 * n * d, 1)))
        else:
            parts = ((0, (h * d, d, 1)), (n * h * d, (h * d, d, 1)))
        self.layout = PageLayout(n, h * 2 * n * d, tuple(PartLayout((n, h, d), base, steps) for base, steps in parts))
        self._pages = [self._views(layer) for layer in range(len(model.windows))]
        self.side = WorkerSide(tp, 0)
        self.side.register(
            [
                FoundLayer(layer_name(layer), table, self._memory[place].view(torch.float32), self.layout, self._ratio)
                for table, layers in enumerate(model.tables)
                for place, layer in enumerate(layers)
            ]
        )

    def _views(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer as views [kernel blocks, tokens, heads, dim]."""
        memory = self._memory[self.model.tables[self.model.table_of(layer)].index(layer)]
        n, d, h, blocks = self.kernel, self.model.dim, len(self.heads), len(memory)
        if self._order == "column":
            halves = memory.view(blocks, h, 2, n * d)
            k = halves[:, :, 0].view(blocks, h, d, n).permute(0, 3, 1, 2)
            v = halves[:, :, 1].view(blocks, h, n, d).permute(0, 2, 1, 3)
            return k, v
        halves = memory.view(blocks, 2, n, h, d)
        return halves[:, 0], halves[:, 1]

    def write(self, layer: int, blocks: Sequence[int], first: int, history: np.ndarray) -> None:
        """Store the KV of tokens from `first` on."""
        kv = self.model.kv(layer, self.heads, history)
        page, inside = self._where(blocks, first, first + len(history))
        for part, pages in enumerate(self._pages[layer]):
            pages[page, inside] = kv[:, :, part]

    def read(self, layer: int, blocks: Sequence[int], first: int, last: int) -> torch.Tensor:
        """int32 [tokens, heads, 2, dim]."""
        page, inside = self._where(blocks, first, last)
        return torch.stack([pages[page, inside] for pages in self._pages[layer]], dim=2)

    def poison(self, blocks: Iterable[int]) -> None:
        for memory in self._memory:
            memory[self._kernel_blocks(blocks)] = POISON

    def remember(self, blocks: Iterable[int]) -> None:
        """Take what these blocks hold for what they must hold until they are remembered again."""
        rows = self._kernel_blocks(blocks)
        for memory, copy in zip(self._memory, self._remembered, strict=True):
            copy[rows] = memory[rows]

    def changed(self, blocks: Iterable[int]) -> list[int]:
        """Those of these blocks that hold something else."""
        rows = self._kernel_blocks(blocks)
        differ = [
            (memory[rows] != copy[rows]).any(dim=1) for memory, copy in zip(self._memory, self._remembered, strict=True)
        ]
        return sorted({rows[i] // self._ratio for i in torch.stack(differ).any(dim=0).nonzero().flatten().tolist()})

    def _kernel_blocks(self, blocks: Iterable[int]) -> list[int]:
        return [block * self._ratio + part for block in blocks for part in range(self._ratio)]

    def _where(self, blocks: Sequence[int], first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.arange(first, last)
        index = tokens // self.kernel
        table = torch.tensor(blocks, dtype=torch.int64)
        return table[index // self._ratio] * self._ratio + index % self._ratio, tokens % self.kernel


class DelayedCopies:
    """As on an accelerator: a save is gathered in order with the engine's work, all else happens at `flush`."""

    def __init__(self) -> None:
        self._queue: list[Callable[[], None]] = []

    def save(self, run: Run, table: Sequence[int], first: int, last: int, out: Canonical) -> None:
        buffer = Canonical(torch.empty(out.block.shape, dtype=out.block.dtype), out.dims)
        gather(run, table, first, last, buffer)
        self._queue.append(lambda: out.block.copy_(buffer.block))

    def load(self, run: Run, table: Sequence[int], first: int, last: int, src: Canonical) -> None:
        self._queue.append(lambda: scatter(run, table, first, last, src))

    def after(self, action: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        self._queue.append(action)

    def pin(self, region: torch.Tensor) -> None:
        pass

    def close(self) -> None:
        self.flush()

    def flush(self) -> None:
        queue, self._queue = self._queue, []
        for action in queue:
            action()
