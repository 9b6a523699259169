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

    def _part_view(self, layers: Sequence[LayerPages], part: PartLayout) -> _Strided | _Table:
        caches = [layer.cache.view(BITS[layer.cache.element_size()]) for layer in layers]
        stride = self.layout.block_stride
        table = None if part.table is None else _Table(caches, stride, part.table.to(caches[0].device))
        if part.strides is None:
            assert table is not None
            return table
        return _Strided(caches, stride, _layer_step(layers) or 0, part, table)

    def read(self, part: int, block: int, start: int, cells: torch.Tensor) -> None:
        """Copy tokens [start, start + n) of one kernel block to `cells`, [heads, layers, n, dim]."""
        self._parts[part].read(block, start, cells)

    def write(self, part: int, block: int, start: int, cells: torch.Tensor) -> None:
        """Store `cells`, [heads, layers, n, dim], as tokens [start, start + n) of one kernel block."""
        self._parts[part].write(block, start, cells)

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


class _Strided:
    """Pages whose elements lie at sums of strides: one an axis, or one for each of its index's digits (tiles)."""

    def __init__(
        self, caches: Sequence[torch.Tensor], stride: int, step: int, part: PartLayout, table: _Table | None
    ) -> None:
        """step: from one layer to the next. table: of the same elements, for tokens that are not whole tiles."""
        assert part.strides is not None
        sizes = zip(part.shape, part.strides, strict=True)
        tokens, heads, dim = (((n, by),) if isinstance(by, int) else by for n, by in sizes)
        outer = [(int(caches[0].shape[0]), stride), *heads, (len(caches), step), *tokens]
        self._forms = _forms(caches[0], part.base, outer, dim)
        self._heads, self._rest = [size for size, _ in heads], [size for size, _ in tokens[1:]]
        self._tile = math.prod(self._rest)  # tokens
        self._table = table

    def read(self, block: int, start: int, cells: torch.Tensor) -> None:
        if self._whole_tiles(start, cells):
            rows, split = self._both(block, start, cells)
            split.copy_(rows)
        else:
            assert self._table is not None
            self._table.read(block, start, cells)

    def write(self, block: int, start: int, cells: torch.Tensor) -> None:
        if self._whole_tiles(start, cells):
            rows, split = self._both(block, start, cells)
            rows.copy_(split)
        else:
            assert self._table is not None
            self._table.write(block, start, cells)

    def _whole_tiles(self, start: int, cells: torch.Tensor) -> bool:
        return start % self._tile == 0 and cells.shape[2] % self._tile == 0

    def _both(self, block: int, start: int, cells: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """[heads, layers, tokens, dim] of the pages and of the cells, heads, tokens and dim in their digits."""
        form = next(form for form in self._forms if form.suits(cells))
        rows = form.view[block].narrow(len(self._heads) + 1, start // self._tile, cells.shape[2] // self._tile)
        split = cells if form.merged == 1 else cells.view(form.view.dtype)
        if self._rest:
            split = split.unflatten(2, (-1, *self._rest))
        return rows, split.unflatten(-1, form.dim).unflatten(0, self._heads)


@dataclass(frozen=True)
class _Form:
    """A view of pages, [blocks, heads, layers, tokens, dim] in digits.

    dim: sizes of its digits. merged: elements that are taken as one, wider.
    """

    view: torch.Tensor
    dim: list[int]
    merged: int

    def suits(self, cells: torch.Tensor) -> bool:
        """Whether the cells can be taken so too: their dim is in one piece."""
        places = (cells.storage_offset(), *cells.stride()[:-1])
        return self.merged == 1 or (cells.stride(-1) == 1 and all(place % self.merged == 0 for place in places))


def _forms(
    cache: torch.Tensor, base: int, outer: Sequence[tuple[int, int]], dim: Sequence[tuple[int, int]]
) -> list[_Form]:
    """Forms to copy in, the quickest first: elements that lie together in pages and in cells move together."""
    offset = cache.storage_offset() + base
    forms = [_form(cache, offset, [*outer, *dim], len(dim), 1)]
    merged, step = dim[-1]
    width = merged * cache.element_size()
    places = (offset, *(by for _, by in (*outer, *dim[:-1])))
    if len(dim) > 1 and step == 1 and width in BITS and all(place % merged == 0 for place in places):
        axes = [(size, by // merged) for size, by in (*outer, *dim[:-1])]
        forms.insert(0, _form(cache, offset // merged, axes, len(dim) - 1, merged))
    return forms


def _form(cache: torch.Tensor, offset: int, axes: Sequence[tuple[int, int]], dims: int, merged: int) -> _Form:
    empty = cache.new_empty(0, dtype=BITS[merged * cache.element_size()])
    sizes, strides = [size for size, _ in axes], [by for _, by in axes]
    return _Form(empty.set_(cache.untyped_storage(), offset, sizes, strides), sizes[len(sizes) - dims :], merged)


class _Table:
    """Pages whose layout is no set of strides: elements are moved one by one through an index table."""

    def __init__(self, caches: Sequence[torch.Tensor], stride: int, table: torch.Tensor) -> None:
        blocks = caches[0].shape[0]
        extent = int(table.max()) + 1
        self._rows = [c.as_strided((blocks, extent), (stride, 1), c.storage_offset()) for c in caches]
        self._table = table  # [tokens, heads, dim]

    def read(self, block: int, start: int, cells: torch.Tensor) -> None:
        index = self._table[start : start + cells.shape[2]]
        for layer, rows in enumerate(self._rows):
            cells[:, layer].copy_(rows[block][index].transpose(0, 1))

    def write(self, block: int, start: int, cells: torch.Tensor) -> None:
        index = self._table[start : start + cells.shape[2]]
        for layer, rows in enumerate(self._rows):
            rows[block][index] = cells[:, layer].transpose(0, 1)


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
            run.read(part, block, inside, cells[:, :, token - first : token - first + count])


def scatter(run: Run, block_ids: Sequence[int], first: int, last: int, src: Canonical) -> None:
    """Canonical -> pages. Tokens of the same blocks outside [first, last) keep what they hold."""
    parts = src.parts
    for block, inside, token, count in run.kernel_blocks(block_ids, first, last):
        for part, cells in enumerate(parts):
            run.write(part, block, inside, cells[:, :, token - first : token - first + count])
