"""Benchmark of the copies between an engine's pages and a slot: what un-permuting costs beyond a plain copy.

Pages are those of vLLM's CPU backend (its `vec` packing): layers outermost in one allocation; in a block, head by
head, K column-major [dim, token] and behind it V [token, dim].

What a profile of these copies said (2 cores of an AMD EPYC, torch 2.13): V moves at 0.6 to 0.9 of memcpy's speed, K at
a quarter to a third of it. That is what torch's and NumPy's copies reach alike where one side is transposed and comes
from memory (in the CPU's cache both are three times as fast). None of these was faster: NumPy instead of torch, one
copy a head or a layer, and a detour through a contiguous buffer of 64 KiB to 1 MiB that stays in the cache.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from bench_measure import CPU, Row, Setting, compare

from tplayout.format.chunk import chunk_layout
from tplayout.format.geometry import Geometry, Group, Part
from tplayout_vllm.pages import Canonical, LayerPages, Run, canonical_view, gather, group_runs, scatter
from tplayout_vllm.probe import PageLayout, PartLayout

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16}
BLOCKS = (32, 128)
MEMCPY = "memcpy of the same bytes"


def page_rows(setting: Setting) -> Iterator[Row]:
    """Saves, then loads, of each dtype and block size, on one thread."""
    torch.set_num_threads(1)
    cases = [(dtype, block) for dtype in DTYPES for block in BLOCKS]
    for verb in ("save: pages to slot", "load: slot to pages"):
        for dtype, block in cases:
            yield _row(verb, dtype, block, setting)


def _row(verb: str, dtype: str, block: int, setting: Setting) -> Row:
    copy = gather if verb.startswith("save") else scatter
    run = vec_pages(dtype, block, setting)
    cells = slot_cells(dtype, setting)
    tokens = setting.chunk_tokens
    table = torch.randperm(setting.chunks * tokens // block, generator=torch.Generator().manual_seed(1)).tolist()
    nbytes = sum(chunk.nbytes for chunk in cells)
    source, target = torch.ones(nbytes, dtype=torch.uint8), torch.zeros(nbytes, dtype=torch.uint8)

    def ours() -> None:
        for index, chunk in enumerate(cells):
            copy(run, table, index * tokens, (index + 1) * tokens, chunk)

    what = f"{verb}, {dtype}, blocks of {block}"
    return compare(what, MEMCPY, ours, lambda: target.copy_(source), setting, CPU)


def vec_pages(dtype: str, block: int, setting: Setting) -> Run:
    """All layers of a rank, with just enough blocks for the setting's chunks, filled with ones."""
    heads, dim, layers = setting.heads, setting.dim, setting.layers
    blocks, stride = setting.chunks * setting.chunk_tokens // block, heads * 2 * block * dim
    shape, head = (block, heads, dim), 2 * block * dim
    keys = PartLayout(shape, 0, (1, head, block))
    values = PartLayout(shape, block * dim, (dim, head, 1))
    layout = PageLayout(block, stride, (keys, values))
    memory = torch.ones((layers, blocks, heads, block, 2 * dim), dtype=DTYPES[dtype])
    (run,) = group_runs([LayerPages(f"layer {i}", 0, 0, i, memory[i], layout, 1) for i in range(layers)])
    return run


def slot_cells(dtype: str, setting: Setting) -> list[Canonical]:
    """The cells of each chunk, as views of slots."""
    dims = (setting.dim, setting.dim)
    parts = (Part("k", setting.dim), Part("v", setting.dim))
    group = Group("full", "full", tuple(range(setting.layers)), setting.heads, parts, dtype)
    layout = chunk_layout(Geometry(setting.chunk_tokens, (group,)), 0, "xxh3-128")
    shape = (setting.heads, setting.layers, setting.chunk_tokens)
    slots = [torch.ones(layout.nbytes, dtype=torch.uint8) for _ in range(setting.chunks)]
    offset, section, width = layout.kv_offset(0), layout.section_bytes, group.element_bytes
    return [canonical_view(slot, offset, section, width, shape, dims) for slot in slots]
