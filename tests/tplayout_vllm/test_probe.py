"""Page layouts are found by writing through an op, whatever the op does with them."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tplayout_vllm.probe import LayoutUnknown, PageLayout, _digits, discover, layout_from_positions

PAGES = "Page layouts"
TOKENS, HEADS, DIM = 32, 3, 64
SHAPE = (TOKENS, HEADS, DIM)
SIZE = TOKENS * HEADS * DIM


def offsets(order: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Element offsets [tokens, heads, dim] of K and V in one page, for layouts known from vLLM's backends."""
    t, h, d = torch.arange(TOKENS)[:, None, None], torch.arange(HEADS)[:, None], torch.arange(DIM)
    if order == "NHD":
        k = t * HEADS * DIM + h * DIM + d
        return k, k + SIZE
    if order == "HND":
        k = h * TOKENS * DIM + t * DIM + d
        return k, k + SIZE
    if order == "packed":  # K|V a token, heads outermost
        k = h * TOKENS * 2 * DIM + t * 2 * DIM + d
        return k, k + DIM
    if order == "K column-major":
        k = h * 2 * TOKENS * DIM + d * TOKENS + t
        return k, h * 2 * TOKENS * DIM + TOKENS * DIM + t * DIM + d
    assert order == "scrambled"
    shuffled = torch.randperm(2 * SIZE, generator=torch.Generator().manual_seed(7))
    return shuffled[:SIZE].view(SHAPE), shuffled[SIZE:].view(SHAPE)


def run(order: str, dtype: torch.dtype) -> tuple[PageLayout, tuple[torch.Tensor, torch.Tensor]]:
    k, v = offsets(order)
    stride = 2 * SIZE + 128  # a gap between blocks, as padded pages have

    def write(values: Sequence[torch.Tensor], scratch: torch.Tensor) -> None:
        for where, value in zip((k, v), values, strict=True):
            scratch[stride + where.flatten()] = value.flatten().to(dtype)

    scratch = torch.zeros(2 * stride, dtype=dtype)
    return discover(write, scratch, stride, [SHAPE, SHAPE]), (k, v)


@pytest.mark.row(PAGES, "made-up pages: NHD, HND, K and V packed, K column-major")
@pytest.mark.parametrize("order", ["NHD", "HND", "packed", "K column-major"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_strided_layouts_are_found_as_strides(order: str, dtype: torch.dtype) -> None:
    layout, (k, v) = run(order, dtype)
    assert layout.tokens == TOKENS
    for part, where in zip(layout.parts, (k, v), strict=True):
        assert part.strides is not None
        t, h, d = part.strides
        tokens, heads, dims = (torch.arange(n) for n in SHAPE)
        found = part.base + tokens[:, None, None] * t + heads[:, None] * h + dims * d
        assert torch.equal(found, where)


@given(st.lists(st.tuples(st.sampled_from([2, 3, 4, 16]), st.integers(1, 5000)), min_size=1, max_size=4))
def test_strides_of_an_indexs_digits_are_found(digits: list[tuple[int, int]]) -> None:
    offsets = [0]
    for size, step in digits:
        offsets = [before + i * step for before in offsets for i in range(size)]
    found = _digits(offsets)
    assert found is not None
    rebuilt = [0]
    for size, step in found:
        rebuilt = [before + i * step for before in rebuilt for i in range(size)]
    assert rebuilt == offsets
    assert len(found) <= len(digits)


@pytest.mark.parametrize("offsets", [[0, 1, 3], [0, 1, 5, 7], [0, -1], [0, 1, 2, 0], [0, 1, 8, 9, 4]])
def test_other_orders_have_no_digits(offsets: list[int]) -> None:
    assert _digits(offsets) is None


@pytest.mark.row(PAGES, "any other order: by an index table")
def test_scrambled_pages_are_found_as_a_table() -> None:
    layout, (k, v) = run("scrambled", torch.bfloat16)
    for part, where in zip(layout.parts, (k, v), strict=True):
        assert part.strides is None
        assert part.table is not None
        assert torch.equal(part.table, where)


def test_fp8_bits_are_told_apart() -> None:
    k, v = offsets("HND")

    def write(values: Sequence[torch.Tensor], scratch: torch.Tensor) -> None:
        for where, value in zip((k, v), values, strict=True):
            scratch[2 * SIZE + where.flatten()] = value.flatten().to(torch.float8_e4m3fn).view(torch.uint8)

    layout = discover(write, torch.zeros(4 * SIZE, dtype=torch.uint8), 2 * SIZE, [SHAPE, SHAPE])
    assert layout.parts[0].strides == (DIM, TOKENS * DIM, 1)


def test_an_op_that_drops_elements_is_refused() -> None:
    def write(values: Sequence[torch.Tensor], scratch: torch.Tensor) -> None:
        scratch[SIZE : SIZE + SIZE // 2] = values[0].flatten()[: SIZE // 2]

    with pytest.raises(LayoutUnknown, match="places of the page changed"):
        discover(write, torch.zeros(2 * SIZE), SIZE, [SHAPE])


def test_an_op_that_mixes_neighbours_is_refused() -> None:
    """Quantising by token makes an element's bits depend on the largest of its row."""

    def write(values: Sequence[torch.Tensor], scratch: torch.Tensor) -> None:
        row = values[0] / values[0].amax(dim=-1, keepdim=True)
        scratch[SIZE:] = row.flatten()

    with pytest.raises(LayoutUnknown):
        discover(write, torch.zeros(2 * SIZE), SIZE, [SHAPE])


def test_an_op_that_writes_outside_its_block_is_refused() -> None:
    def write(values: Sequence[torch.Tensor], scratch: torch.Tensor) -> None:
        scratch[SIZE - 7 : 2 * SIZE - 7] = values[0].flatten()

    with pytest.raises(LayoutUnknown, match="outside the block"):
        discover(write, torch.zeros(2 * SIZE), SIZE, [SHAPE])


def test_single_token_head_or_dim_has_no_stride_of_its_own() -> None:
    part = layout_from_positions(torch.tensor([[[5]]]))
    assert (part.base, part.strides) == (5, (0, 0, 0))
