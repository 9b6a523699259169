"""Pages of any layout and block size hold, after a trip through canonical order, what the op had written."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tplayout_vllm.pages import Canonical, LayerPages, canonical_view, gather, group_runs, scatter
from tplayout_vllm.probe import PageLayout, PartLayout, layout_from_positions

DIM = 8


def page_layout(order: str, tokens: int, heads: int) -> PageLayout:
    t, h, d = torch.arange(tokens)[:, None, None], torch.arange(heads)[:, None], torch.arange(DIM)
    size = tokens * heads * DIM
    if order == "NHD":
        k = t * heads * DIM + h * DIM + d
        where = (k, k + size)
    elif order == "column":
        where = (h * tokens * DIM + d * tokens + t, size + h * tokens * DIM + t * DIM + d)
    else:
        shuffled = torch.randperm(2 * size, generator=torch.Generator().manual_seed(3))
        where = (shuffled[:size].view(tokens, heads, DIM), shuffled[size:].view(tokens, heads, DIM))
    parts = tuple(layout_from_positions(w.contiguous()) for w in where)
    return PageLayout(tokens, 2 * size, parts)


class Cache:
    """`layers` layers of `blocks` blocks in one allocation, as an engine has them."""

    def __init__(self, layout: PageLayout, layers: int, blocks: int, one_allocation: bool = True) -> None:
        size = blocks * layout.block_stride
        store = torch.zeros(layers * size, dtype=torch.bfloat16)
        parts = [store[i * size : (i + 1) * size] for i in range(layers)]
        if not one_allocation:
            parts = [part.clone() for part in parts]
        self.caches = [part.view(blocks, 1, layout.tokens, -1) for part in parts]
        self.pages = [LayerPages(f"l{i}", 0, 0, i, c, layout, 1) for i, c in enumerate(self.caches)]
        self.layout = layout

    def write(self, blocks: list[int], kv: torch.Tensor) -> None:
        """Store kv [parts, heads, layers, tokens, dim] the way the engine's op would."""
        for layer, cache in enumerate(self.caches):
            flat = cache.view(-1)
            for part, spec in enumerate(self.layout.parts):
                for token in range(kv.shape[3]):
                    block = blocks[token // self.layout.tokens]
                    where = positions(spec)[token % self.layout.tokens] + block * self.layout.block_stride
                    flat[where] = kv[part, :, layer, token]


def positions(part: PartLayout) -> torch.Tensor:
    if part.table is not None:
        return part.table
    t, h, d = (torch.arange(n) for n in part.shape)
    assert part.strides is not None
    return part.base + t[:, None, None] * part.strides[0] + h[:, None] * part.strides[1] + d * part.strides[2]


def canonical(heads: int, layers: int, tokens: int) -> Canonical:
    return Canonical(torch.zeros((heads, layers, 2, tokens, DIM), dtype=torch.int16), (DIM, DIM))


@settings(max_examples=60, deadline=None)
@given(
    order=st.sampled_from(["NHD", "column", "scrambled"]),
    to_order=st.sampled_from(["NHD", "column", "scrambled"]),
    block=st.sampled_from([4, 6, 16]),
    to_block=st.sampled_from([3, 8, 16]),
    first=st.integers(0, 20),
    count=st.integers(1, 24),
    one_allocation=st.booleans(),
)
def test_any_pages_to_any_pages(
    order: str, to_order: str, block: int, to_block: int, first: int, count: int, one_allocation: bool
) -> None:
    heads, layers, total = 2, 3, 48
    kv = torch.randn((2, heads, layers, total, DIM), generator=torch.Generator().manual_seed(1)).bfloat16()
    source = Cache(page_layout(order, block, heads), layers, 20, one_allocation)
    target = Cache(page_layout(to_order, to_block, heads), layers, 20)
    from_table = list(range(19, 19 - -(-total // block), -1))
    to_table = list(range(1, 1 + -(-total // to_block)))
    source.write(from_table, kv)
    out = canonical(heads, layers, count)
    for run in group_runs(source.pages):
        gather(run, from_table, first, first + count, out.narrow(run.positions, 0, count))
    wanted = kv[:, :, :, first : first + count]
    for part in range(2):
        assert torch.equal(out.parts[part].view(torch.bfloat16), wanted[part])
    for run in group_runs(target.pages):
        scatter(run, to_table, first, first + count, out.narrow(run.positions, 0, count))
    expected = Cache(target.layout, layers, 20)
    masked = torch.zeros_like(kv)
    masked[:, :, :, first : first + count] = wanted
    expected.write(to_table, masked)
    for got, want in zip(target.caches, expected.caches, strict=True):
        assert torch.equal(got, want)  # and nothing outside the range was touched


def test_layers_of_one_allocation_are_one_run_and_others_are_not() -> None:
    layout = page_layout("NHD", 4, 2)
    assert len(group_runs(Cache(layout, 5, 3).pages)) == 1
    # Separate allocations have no stride between them, whatever their addresses happen to be.
    assert len(group_runs(Cache(layout, 5, 3, one_allocation=False).pages)) == 5


def test_kernel_blocks_of_a_split_block() -> None:
    """A scheduler block of two kernel blocks: token 5 of 8 lies in the second one."""
    layout = page_layout("NHD", 4, 1)
    cache = Cache(layout, 1, 8)
    (run,) = group_runs([LayerPages("l", 0, 0, 0, cache.caches[0], layout, 2)])
    assert run.kernel_blocks([3, 1], 5, 10) == [(7, 1, 5, 3), (2, 0, 8, 2)]


@pytest.mark.parametrize("dims", [(8, 8), (12, 4)])
def test_canonical_view_is_the_format_s_order(dims: tuple[int, int]) -> None:
    """[head][layer][part][token][dim], or [head][layer][token][sum of dims] for parts of unequal size."""
    heads, layers, tokens, width, section = 2, 3, 5, 2, 4096
    slot = torch.zeros(2 * section, dtype=torch.uint8)
    view = canonical_view(slot, 64, section, width, (heads, layers, tokens), dims)
    for part, cells in enumerate(view.parts):
        cells.copy_(torch.arange(cells.numel(), dtype=torch.int16).view(cells.shape) + 1000 * (part + 1))
    words = slot.view(torch.int16)
    for head in range(heads):
        start = (64 + head * section) // width
        flat = words[start : start + layers * tokens * sum(dims)]
        shape = (layers, 2, tokens, 8) if dims == (8, 8) else (layers, tokens, 16)
        cells = flat.view(shape)
        for part in range(2):
            got = cells[:, part] if dims == (8, 8) else cells.split(dims, dim=-1)[part]
            assert torch.equal(got, view.parts[part][head])
    assert int((words != 0).sum()) == heads * layers * tokens * sum(dims)


def test_pieces_are_few_and_contiguous() -> None:
    slot = torch.zeros(3 * 8192, dtype=torch.uint8)
    view = canonical_view(slot, 128, 8192, 2, (3, 2, 5), (8, 8))
    assert [piece.shape[0] for piece in view.pieces()] == [2, 2, 2]
    part = view.narrow(range(1), 1, 4)
    assert all(piece.is_contiguous() for piece in part.pieces())
    assert sum(piece.numel() for piece in part.pieces()) == part.block.numel()
