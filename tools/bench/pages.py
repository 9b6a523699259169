"""Copies between an engine's pages and a slot: what un-permuting costs beyond a plain copy.

Three kinds of pages, layers outermost in one allocation: `vec`, those of vLLM's CPU backend (in a block, head by head,
K column-major [dim, token] and behind it V [token, dim]), and the NHD and HND pages of GPU backends ([token, head, dim]
and [head, token, dim], K and V apart), here in the CPU's memory.

What a profile of these copies said (2 cores of an AMD EPYC, torch 2.13): V moves at 0.6 to 0.9 of memcpy's speed, K at
a quarter to a third of it. That is what torch's and NumPy's copies reach alike where one side is transposed and comes
from memory (in the CPU's cache both are three times as fast).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from bench.measure import CPU, WALL, Row, Setting, Shape, Work, compare
from bench.objects import geometry
from tplayout.format.layout import chunk_layout
from tplayout_vllm.pages import Canonical, LayerPages, Run, canonical_view, gather, group_runs, scatter
from tplayout_vllm.probe import PageLayout, PartLayout

VEC_BLOCKS = (32, 128, 256)
GPU_BLOCKS = (16, *VEC_BLOCKS)
THREADS = (1, 2)


@dataclass(frozen=True)
class Case:
    """What is copied. kind: vec, NHD or HND; parts: which of 0 (K) and 1 (V)."""

    kind: str
    block: int
    parts: tuple[int, ...]

    @property
    def label(self) -> str:
        """As in a row's name."""
        part = "" if len(self.parts) > 1 else " " + "KV"[self.parts[0]]
        return f"{self.kind}{part}, blocks of {self.block}"

    @property
    def transposed(self) -> bool:
        """Whether no run of a page lies in one piece in a slot."""
        return self.kind == "vec" and 0 in self.parts


CASES = [Case("vec", block, parts) for parts in ((1,), (0,)) for block in VEC_BLOCKS]
CASES += [Case(kind, block, (0, 1)) for kind in ("NHD", "HND") for block in GPU_BLOCKS]


def page_rows(setting: Setting) -> Iterator[Row]:
    """Saves and loads of each kind of page, on one thread and on two."""
    before = torch.get_num_threads()
    try:
        for threads in THREADS:
            torch.set_num_threads(threads)
            for verb in ("save", "load"):
                yield from (_row(verb, case, threads, setting) for case in CASES)
    finally:
        torch.set_num_threads(before)


def _row(verb: str, case: Case, threads: int, setting: Setting) -> Row:
    run = paged(case, setting.chunk, setting.copied)
    cells = [_parts(chunk, case.parts) for chunk in slot_cells(setting.chunk, setting.copied)]
    ours = copying(verb, run, cells, setting.chunk.tokens)
    nbytes = sum(chunk.nbytes for chunk in cells)
    others = _transposing(verb, case.block, setting) if case.transposed else {"memcpy": _memcpy(nbytes)}
    return compare(
        f"{verb} pages: {case.label}, {threads} thread{'s' * (threads > 1)}",
        ours,
        others,
        setting,
        target=0.9 if case.transposed else 0.6,
        clock=CPU if threads == 1 else WALL,
        limits=setting.copies,
    )


def copying(verb: str, run: Run, cells: list[Canonical], tokens: int) -> Work:
    """Copies chunk after chunk from blocks in random order ("save"), or back ("load"), as a rank does."""
    copy = gather if verb == "save" else scatter
    blocks = len(cells) * tokens // run.tokens
    table = torch.randperm(blocks, generator=torch.Generator().manual_seed(1)).tolist()

    def work() -> None:
        for index, chunk in enumerate(cells):
            copy(run, table, index * tokens, (index + 1) * tokens, chunk)

    return work


def _memcpy(nbytes: int) -> Work:
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)
    return lambda: target.copy_(source)


def _transposing(verb: str, block: int, setting: Setting) -> dict[str, Work]:
    """Plain copies of as many bytes between [tile, dim, token] and [tile, token, dim], both in one piece."""
    shape = setting.chunk
    tiles = setting.copied * shape.layers * shape.heads * shape.tokens // block
    source = torch.ones((tiles, shape.dim, block), dtype=torch.int16)
    target = torch.zeros((tiles, block, shape.dim), dtype=torch.int16)
    if verb == "load":
        source, target = target, source
    turned, plain = source.transpose(1, 2), target
    turned_array, plain_array = turned.numpy(), plain.numpy()

    def by_tile() -> None:
        for tile, into in zip(turned.unbind(0), plain.unbind(0), strict=True):
            into.copy_(tile)

    def numpy_copy() -> None:
        plain_array[...] = turned_array

    return {
        "torch copy_ of transposed tiles": lambda: plain.copy_(turned),
        "torch copy_ tile by tile": by_tile,
        "numpy copy of transposed tiles": numpy_copy,
    }


def paged(case: Case, shape: Shape, chunks: int) -> Run:
    """All layers of a rank, with just enough blocks for the chunks, filled with ones."""
    heads, dim, layers, block = shape.heads, shape.dim, shape.layers, case.block
    half = heads * block * dim
    if case.kind == "vec":
        head = 2 * block * dim
        places = ((0, (1, head, block)), (block * dim, (dim, head, 1)))
    elif case.kind == "NHD":
        places = ((0, (heads * dim, dim, 1)), (half, (heads * dim, dim, 1)))
    else:
        places = ((0, (dim, block * dim, 1)), (half, (dim, block * dim, 1)))
    parts = tuple(PartLayout((block, heads, dim), *places[part]) for part in case.parts)
    layout = PageLayout(block, 2 * half, parts)
    memory = torch.ones((layers, chunks * shape.tokens // block, heads, block, 2 * dim), dtype=torch.bfloat16)
    (run,) = group_runs([LayerPages(f"layer {i}", 0, 0, i, memory[i], layout, 1) for i in range(layers)])
    return run


def slot_cells(shape: Shape, chunks: int) -> list[Canonical]:
    """The cells of each chunk, as views of slots."""
    layout = chunk_layout(geometry(shape), 0, "xxh3-128")
    return [cells_of(torch.ones(layout.nbytes, dtype=torch.uint8), shape) for _ in range(chunks)]


def cells_of(slot: torch.Tensor, shape: Shape) -> Canonical:
    """The cells of the object in a slot, uint8."""
    layout = chunk_layout(geometry(shape), 0, "xxh3-128")
    sizes = (shape.heads, shape.layers, shape.tokens)
    return canonical_view(slot, layout.kv_offset(0), layout.section_bytes, 2, sizes, (shape.dim, shape.dim))


def _parts(cells: Canonical, parts: tuple[int, ...]) -> Canonical:
    return Canonical(cells.block[:, :, parts[0] : parts[-1] + 1], cells.dims[: len(parts)])
