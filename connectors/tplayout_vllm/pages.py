"""Moves tokens between the engine's pages and the canonical order, for one rank.

Layer: below worker.py, above probe.py. Pure tensor code: no vLLM objects, no store, no process. Elements are moved
as integers of their width, so every bit pattern (NaN payloads of fp8 included) survives.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from tplayout_vllm.probe import BITS, PageLayout, PartLayout


@dataclass(frozen=True)
class LayerPages:
    """The pages of one layer: where it sits in the canonical group, whose block table it uses, and its memory.

    cache:      the layer's bound cache tensor, first dimension kernel blocks.
    ratio:      kernel blocks in one block of the scheduler's block table.
    """

    name: str
    table: int
    group: int
    position: int
    cache: torch.Tensor
    layout: PageLayout
    ratio: int


class Run:
    """Consecutive layers of one canonical group that share a block table, a layout and one allocation.

    They are copied together: one tensor operation a part and block instead of one a layer.
    """

    def __init__(self, layers: Sequence[LayerPages]) -> None:
        first = layers[0]
        self.table, self.group, self.ratio, self.layout = first.table, first.group, first.ratio, first.layout
        self.positions = range(first.position, first.position + len(layers))
        self.tokens = first.layout.tokens
        self._parts = [self._part_view(layers, part) for part in first.layout.parts]
        # The views alias these; without a reference the allocation could go while a view is in use.
        self._owners = [layer.cache for layer in layers]

    def _part_view(self, layers: Sequence[LayerPages], part: PartLayout) -> torch.Tensor | _Table:
        caches = [layer.cache.view(BITS[layer.cache.element_size()]) for layer in layers]
        cache, stride, step = caches[0], self.layout.block_stride, _layer_step(layers) or 0
        blocks = int(cache.shape[0])
        if part.strides is None:
            assert part.table is not None
            return _Table(caches, stride, part.table.to(cache.device))
        tokens, heads, dim = part.shape
        token_step, head_step, dim_step = part.strides
        return cache.as_strided(
            (len(layers), blocks, heads, tokens, dim),
            (step, stride, head_step, token_step, dim_step),
            cache.storage_offset() + part.base,
        )

    def read(self, part: int, block: int) -> torch.Tensor:
        """Tokens of one kernel block: [heads, layers, tokens, dim] (a view where the layout is affine)."""
        view = self._parts[part]
        if isinstance(view, _Table):
            return view.read(block)
        return view[:, block].transpose(0, 1)

    def write(self, part: int, block: int, start: int, values: torch.Tensor) -> None:
        """Store [heads, layers, n, dim] as tokens [start, start + n) of one kernel block."""
        view = self._parts[part]
        if isinstance(view, _Table):
            view.write(block, start, values)
        else:
            view[:, block, :, start : start + values.shape[2]].copy_(values.transpose(0, 1))

    def kernel_blocks(self, block_ids: Sequence[int], first: int, last: int) -> list[tuple[int, int, int, int]]:
        """Where tokens [first, last) of a request lie, as (kernel block, token in block, token, count) in order.

        `block_ids` is the request's block table from its token 0, in the scheduler's blocks.
        """
        out = []
        token = first
        while token < last:
            index, inside = divmod(token, self.tokens)
            count = min(self.tokens - inside, last - token)
            block = block_ids[index // self.ratio] * self.ratio + index % self.ratio
            out.append((block, inside, token, count))
            token += count
        return out


class _Table:
    """Pages whose layout is no set of strides: elements are moved one by one through an index table."""

    def __init__(self, caches: Sequence[torch.Tensor], stride: int, table: torch.Tensor) -> None:
        blocks = caches[0].shape[0]
        extent = int(table.max()) + 1
        self._rows = [c.as_strided((blocks, extent), (stride, 1), c.storage_offset()) for c in caches]
        self._table = table  # [tokens, heads, dim]

    def read(self, block: int) -> torch.Tensor:
        return torch.stack([rows[block][self._table].transpose(0, 1) for rows in self._rows], dim=1)

    def write(self, block: int, start: int, values: torch.Tensor) -> None:
        index = self._table[start : start + values.shape[2]]
        for layer, rows in enumerate(self._rows):
            rows[block][index] = values[:, layer].transpose(0, 1)


def _layer_step(layers: Sequence[LayerPages]) -> int | None:
    """The distance in elements between consecutive layers, None when it is not one non-negative number.

    Layers count only as spaced when they live in one allocation: otherwise a stride from one to the next could
    reach memory that is not theirs.
    """
    if len(layers) == 1:
        return 0
    storages = {layer.cache.untyped_storage().data_ptr() for layer in layers}
    offsets = [layer.cache.storage_offset() for layer in layers]
    steps = {b - a for a, b in itertools.pairwise(offsets)}
    if len(storages) != 1 or len(steps) != 1 or min(steps) < 0:
        return None
    return steps.pop()


def group_runs(layers: Sequence[LayerPages]) -> list[Run]:
    """Join layers into as few runs as their positions, layouts and memory allow."""
    runs: list[list[LayerPages]] = []
    for layer in sorted(layers, key=lambda x: (x.group, x.position)):
        if runs and _joins(runs[-1], layer):
            runs[-1].append(layer)
        else:
            runs.append([layer])
    return [Run(run) for run in runs]


def _joins(run: Sequence[LayerPages], layer: LayerPages) -> bool:
    last = run[-1]
    return (
        (last.group, last.table, last.ratio, last.position + 1)
        == (layer.group, layer.table, layer.ratio, layer.position)
        and (last.cache.dtype, last.cache.shape) == (layer.cache.dtype, layer.cache.shape)
        and _same_layout(last.layout, layer.layout)
        and _layer_step([*run, layer]) is not None
    )


def _same_layout(a: PageLayout, b: PageLayout) -> bool:
    if (a.tokens, a.block_stride, len(a.parts)) != (b.tokens, b.block_stride, len(b.parts)):
        return False
    return all(
        (p.shape, p.base, p.strides) == (q.shape, q.base, q.strides)
        and (p.table is None or (q.table is not None and torch.equal(p.table, q.table)))
        for p, q in zip(a.parts, b.parts, strict=True)
    )


@dataclass(frozen=True)
class Canonical:
    """Cells in canonical order: `block` is [heads, layers, parts, tokens, dim], or, where the parts' dims differ,
    [heads, layers, tokens, sum of dims]. It may be a view of a slot: writing it writes the object.
    """

    block: torch.Tensor
    dims: tuple[int, ...]

    @property
    def parts(self) -> tuple[torch.Tensor, ...]:
        """One view a part, each [heads, layers, tokens, dim]."""
        if self.block.dim() == 5:
            return self.block.unbind(2)
        return self.block.split(self.dims, dim=-1)

    @property
    def nbytes(self) -> int:
        return self.block.numel() * self.block.element_size()

    def narrow(self, layers: range, first: int, last: int) -> Canonical:
        """The cells of `layers` (positions), tokens [first, last)."""
        return Canonical(self.block[:, layers.start : layers.stop, ..., first:last, :], self.dims)

    @property
    def depth(self) -> int:
        """How many leading dimensions must be walked until what remains is contiguous."""
        block, depth = self.block, 0
        while not block.is_contiguous():
            block, depth = block[0], depth + 1
        return depth

    def pieces(self, depth: int | None = None) -> list[torch.Tensor]:
        """The block as views, in order, cut along its first `depth` dimensions (default: into contiguous ones)."""
        pieces = [self.block]
        for _ in range(self.depth if depth is None else depth):
            pieces = [row for piece in pieces for row in piece.unbind(0)]
        return pieces


def canonical_view(
    slot: torch.Tensor,
    kv_offset: int,
    section: int,
    width: int,
    shape: tuple[int, int, int],
    dims: Sequence[int],
) -> Canonical:
    """View a rank's heads of the object in `slot`.

    slot:      uint8, the object's bytes; aligned to `width`.
    kv_offset: byte offset of the first wanted head's tensor; `section` bytes from one head to the next. Both are
               multiples of `width` (FORMAT.md aligns them).
    width:     bytes an element.
    shape:     (heads wanted, layers of the group, tokens of a chunk).
    dims:      elements a token of each part.
    """
    heads, layers, tokens = shape
    flat = slot[: len(slot) // width * width].view(BITS[width])
    row = sum(dims)
    inner = (len(dims), tokens, dims[0]) if len(set(dims)) == 1 else (tokens, row)
    steps = [math.prod(inner[axis + 1 :]) for axis in range(len(inner))]
    block = flat.as_strided(
        (heads, layers, *inner),
        (section // width, tokens * row, *steps),
        flat.storage_offset() + kv_offset // width,
    )
    return Canonical(block, tuple(dims))


def gather(run: Run, block_ids: Sequence[int], first: int, last: int, out: Canonical) -> None:
    """Pages -> canonical. `out` holds the run's layers and exactly tokens [first, last) of the request."""
    parts = out.parts
    for block, inside, token, count in run.kernel_blocks(block_ids, first, last):
        for part, cells in enumerate(parts):
            rows = run.read(part, block)[:, :, inside : inside + count]
            cells[:, :, token - first : token - first + count].copy_(rows)


def scatter(run: Run, block_ids: Sequence[int], first: int, last: int, src: Canonical) -> None:
    """Canonical -> pages. Tokens of the same blocks outside [first, last) keep what they hold."""
    parts = src.parts
    for block, inside, token, count in run.kernel_blocks(block_ids, first, last):
        for part, cells in enumerate(parts):
            run.write(part, block, inside, cells[:, :, token - first : token - first + count])
