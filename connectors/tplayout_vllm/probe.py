"""Discovers where a backend's own cache-update op puts each element of a KV page.

Layer: below pages.py. Knows an attention layer of vLLM only by its tensor `kv_cache` and its op
`impl.do_kv_cache_update`; never looks at a backend's name. Never touches the live cache: it writes into a
scratch page with the strides of the live one.

Method: number the elements of one page, write the numbers digit by digit (base 8, digits stored as 1..8, which
every KV dtype down to fp8 represents exactly), and read back at which offset each digit landed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Digits = tuple[tuple[int, int], ...]  # (size, stride) of an index's digits, the slowest first

_BASE = 8
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}


class LayoutUnknown(Exception):
    """The page layout of a layer cannot be discovered; the text says what was seen."""


@dataclass(frozen=True)
class PartLayout:
    """Where one part (K, V, a latent …) of a kernel block lies.

    `shape` is (tokens, heads, dim). An element (t, h, d) of block b lies at element offset
    `b * block_stride + base + t*strides[0] + h*strides[1] + d*strides[2]`, or, where that is not affine, at
    `b * block_stride + table[t, h, d]`. Where it is affine in an index's digits, as in the tiles of AMX, a stride is
    the digits' sizes and strides, and the table is there too.
    """

    shape: tuple[int, int, int]
    base: int
    strides: tuple[int | Digits, int | Digits, int | Digits] | None
    table: torch.Tensor | None = None

    def describe(self) -> str:
        """The layout in one short line, for logs and for comparing ranks."""
        if self.strides is None:
            return f"{self.shape} by index table"
        return f"{self.shape} at {self.base} strides {self.strides}"


@dataclass(frozen=True)
class PageLayout:
    """The parts of one kernel block of `tokens` tokens, and the distance in elements between two blocks."""

    tokens: int
    block_stride: int
    parts: tuple[PartLayout, ...]


def layout_from_positions(positions: torch.Tensor) -> PartLayout:
    """Express element offsets `[tokens, heads, dim]` (int64) as strides where affine, as a table otherwise.

    Also where strides of digits say it: a copy of a part of a tile needs the table.
    """
    tokens, heads, dim = positions.shape
    base = int(positions[0, 0, 0])
    shape = (tokens, heads, dim)
    along = (positions[:, 0, 0] - base, positions[0, :, 0] - base, positions[0, 0, :] - base)
    separable = torch.equal(base + along[0][:, None, None] + along[1][:, None] + along[2], positions)
    digits = [_digits(offsets.tolist()) for offsets in along] if separable else []
    if not digits or None in digits:
        return PartLayout(shape, base, None, positions.clone())
    strides = tuple(found[0][1] if found and len(found) == 1 else found for found in digits)
    plain = all(isinstance(stride, int) for stride in strides)
    return PartLayout(shape, base, strides, None if plain else positions.clone())  # type: ignore[arg-type]


def _digits(offsets: list[int]) -> Digits | None:
    """Digits of an index by which its offsets are sums; None if there are none with strides that torch takes."""
    size = len(offsets)
    if size == 1:
        return ((1, 0),)
    step = offsets[1]
    run = next((i for i in range(size) if offsets[i] != i * step), size)
    if step < 0 or size % run or any(offsets[i] != offsets[i // run * run] + i % run * step for i in range(size)):
        return None
    if run == size:
        return ((size, step),)
    outer = _digits(offsets[::run])
    return None if outer is None else (*outer, (run, step))


def discover(
    write: Callable[[Sequence[torch.Tensor], torch.Tensor], None],
    scratch: torch.Tensor,
    block_stride: int,
    shapes: Sequence[tuple[int, int, int]],
) -> PageLayout:
    """Find the layout of the second block of `scratch`.

    `write(values, scratch)` must store `values` (one float32 tensor of `shapes[i]` a part) as the tokens of block 1
    through the backend's op. `scratch` is the flat storage of at least two blocks, `block_stride` elements apart.

    Raises LayoutUnknown when an element is lost, stored twice, or not stored by its value alone.
    """
    sizes = [t * h * d for t, h, d in shapes]
    total = sum(sizes)
    bits = scratch.view(BITS[scratch.element_size()])

    def put(values: torch.Tensor) -> torch.Tensor:
        scratch.view(torch.uint8).zero_()
        write([v.view(shape) for v, shape in zip(values.split(sizes), shapes, strict=True)], scratch)
        return bits.cpu().long()

    where, codes = _calibrate(put, sizes)
    if scratch.is_floating_point() and not bool((scratch.cpu()[where].float() == _BASE).all()):
        raise LayoutUnknown(f"a value is stored as another one in {scratch.dtype}")
    element = torch.zeros(total, dtype=torch.int64)
    unit = 1
    while unit < total:
        digits = torch.arange(total) // unit % _BASE + 1
        stored = put(digits.float())[where]
        element += unit * _decode(stored, where, codes)
        unit *= _BASE
    positions = torch.full((total,), -1, dtype=torch.int64)
    positions[element.clamp(max=total - 1)] = where - block_stride
    if int(element.max()) >= total or int(positions.min()) < 0 or len(element.unique()) != total:
        raise LayoutUnknown("the op stores an element twice, or outside the block it was told to write")
    parts = [layout_from_positions(p.view(s)) for p, s in zip(positions.split(sizes), shapes, strict=True)]
    return PageLayout(shapes[0][0], block_stride, tuple(parts))


def _calibrate(put: Callable[[torch.Tensor], torch.Tensor], sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Where values land, and the bit pattern of each digit at each of these places.

    Patterns are kept a place, not globally, because K and V may be stored with different scales.
    """
    total = sum(sizes)
    rows = [put(torch.full((total,), float(digit))) for digit in range(1, _BASE + 1)]
    where = rows[0].nonzero().flatten()
    for row in rows:
        if len(where) != total or not torch.equal(row.nonzero().flatten(), where):
            raise LayoutUnknown(
                f"{total} elements were written but {len(row.nonzero())} places of the page changed: "
                "the page is packed, quantised by token, or padded in a way that is not supported"
            )
    codes = torch.stack([row[where] for row in rows])
    for place in (0, -1):
        if len(codes[:, place].unique()) != _BASE:
            raise LayoutUnknown("different values are stored as the same bits: the page is quantised too coarsely")
    return where, codes


def _decode(stored: torch.Tensor, where: torch.Tensor, codes: torch.Tensor) -> torch.Tensor:
    digits = torch.full_like(where, -1)
    for digit, code in enumerate(codes):
        digits[stored == code] = digit
    if int(digits.min()) < 0:
        raise LayoutUnknown("an element's stored bits depend on its neighbours")
    return digits


def discover_layer(layer: Any, compute_dtype: torch.dtype) -> PageLayout:
    """The page layout of a vLLM attention layer, found by its own op, which takes keys in `compute_dtype`.

    Raises LayoutUnknown; the caller adds the layer's name and backend.
    """
    cache = layer.kv_cache
    if not isinstance(cache, torch.Tensor):
        raise LayoutUnknown(f"its cache is a {type(cache).__name__}, not one tensor")
    if getattr(layer.impl, "do_kv_cache_update", None) is None:
        raise LayoutUnknown("its backend has no separate cache-update op")
    tokens, stride = int(cache.shape[-2]), int(cache.stride(0))
    page = cache[:1]
    extent = sum((n - 1) * s for n, s in zip(page.shape, page.stride(), strict=True)) + 1
    size = stride + max(stride, extent)
    # Room for an op that stores elements wider than the page's (float32 keys in bfloat16 pages); it is refused then.
    room = max(1, compute_dtype.itemsize // cache.element_size())
    scratch = torch.zeros(size * room, dtype=cache.dtype, device=cache.device)[:size]
    view = scratch.as_strided((2, *cache.shape[1:]), cache.stride())
    slots = torch.arange(tokens, 2 * tokens, dtype=torch.int64, device=cache.device)
    find = _latent_op if hasattr(layer.impl, "kv_lora_rank") else _kv_op
    shapes, op = find(layer, compute_dtype)

    def write(values: Sequence[torch.Tensor], _: torch.Tensor) -> None:
        op([v.to(cache.device) for v in values], view, slots)

    with torch.no_grad():
        return discover(write, scratch, stride, [(tokens, h, d) for h, d in shapes])


_Op = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor], None]


def _scale(layer: Any, name: str) -> float:
    """What the op divides by before it stores: only a quantised page (one byte an element) is scaled."""
    return float(getattr(layer, name, 1.0)) if layer.kv_cache.element_size() == 1 else 1.0


def _kv_op(layer: Any, dtype: torch.dtype) -> tuple[list[tuple[int, int]], _Op]:
    """Heads and dims of K and V, and the op that writes them. Values are pre-scaled so that what is stored is exact."""
    heads, dim_k = int(layer.num_kv_heads), int(layer.head_size)
    dim_v = int(getattr(layer, "head_size_v", None) or dim_k)
    scales = (_scale(layer, "_k_scale_float"), _scale(layer, "_v_scale_float"))

    def op(values: Sequence[torch.Tensor], view: torch.Tensor, slots: torch.Tensor) -> None:
        key, value = ((v * s).to(dtype).contiguous() for v, s in zip(values, scales, strict=True))
        layer.impl.do_kv_cache_update(layer, key, value, view, slots)

    return [(heads, dim_k), (heads, dim_v)], op


def _latent_op(layer: Any, dtype: torch.dtype) -> tuple[list[tuple[int, int]], _Op]:
    """Latent and rope part of an MLA layer, both of one head, and the op that writes them."""
    impl, scale = layer.impl, _scale(layer, "_k_scale_float")

    def op(values: Sequence[torch.Tensor], view: torch.Tensor, slots: torch.Tensor) -> None:
        latent, rope = ((v * scale).to(dtype).contiguous() for v in values)
        impl.do_kv_cache_update(latent[:, 0].contiguous(), rope, view, slots, impl.kv_cache_dtype, layer._k_scale)

    return [(1, int(impl.kv_lora_rank)), (1, int(impl.qk_rope_head_dim))], op
