"""vLLM's own CPU op and every packing that it knows: KV that it wrote in one is what it would have written in another.

The op runs for any ISA that this build has, also for one that the engine would not choose on this processor (AMX).
"""

from itertools import permutations
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from vllm.v1.attention.backend import AttentionType
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackendImpl

from tplayout.admin.pages import split_page
from tplayout.format.geometry import Group, Part
from tplayout_vllm.pages import Canonical, LayerPages, gather, group_runs, scatter
from tplayout_vllm.probe import discover_layer

HEADS, DIM, TOKENS, LAYERS = 2, 64, 192, 2
PACKINGS = [("vec", 32), ("vec", 64), ("vec16", 16), ("amx", 32), ("amx", 96)]
PAIRS = [pair for pair in permutations(PACKINGS, 2) if pair[0][0] != pair[1][0] or pair[0][0] != "vec16"]


class Engine:
    """A rank's layers as vLLM's CPU backend has them: memory, op, and what we find out about it."""

    def __init__(self, isa: str, block: int, kv_dtype: str = "auto", scales: tuple[float, float] = (1.0, 1.0)) -> None:
        impl = object.__new__(CPUAttentionBackendImpl)
        impl.attn_type, impl.kv_cache_dtype = AttentionType.DECODER, kv_dtype
        dtype = torch.bfloat16 if kv_dtype == "auto" else torch.uint8
        blocks = TOKENS // block + 3
        self.table = [blocks - 1 - n for n in range(TOKENS // block)]  # in another order than in memory
        self.block = block
        self.layers = [
            SimpleNamespace(
                kv_cache=torch.zeros((blocks, HEADS, block, 2 * DIM), dtype=dtype),
                impl=impl,
                isa=isa,
                num_kv_heads=HEADS,
                head_size=DIM,
                _k_scale_float=scales[0],
                _v_scale_float=scales[1],
            )
            for _ in range(LAYERS)
        ]
        layout = discover_layer(self.layers[0], torch.bfloat16)
        found = [LayerPages(f"l{n}", 0, 0, n, layer.kv_cache, layout, 1) for n, layer in enumerate(self.layers)]
        self.runs = group_runs(found)

    def compute(self, kv: torch.Tensor) -> None:
        """Let vLLM's op write kv [layers, K and V, tokens, heads, dim]."""
        slots = torch.tensor([self.table[t // self.block] * self.block + t % self.block for t in range(TOKENS)])
        for layer, (k, v) in zip(self.layers, kv, strict=True):
            layer.impl.do_kv_cache_update(layer, k, v, layer.kv_cache, slots)

    def move(self, verb: object, block: torch.Tensor) -> None:
        """gather into, or scatter from, canonical bits [heads, layers, K and V, tokens, dim]."""
        for run in self.runs:
            cells = Canonical(block, (DIM, DIM)).narrow(run.positions, 0, TOKENS)
            verb(run, self.table, 0, TOKENS, cells)  # type: ignore[operator]


def text_kv() -> torch.Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn((LAYERS, 2, TOKENS, HEADS, DIM), generator=generator).bfloat16()


@pytest.mark.row("Page layouts", "vLLM's CPU packings vec, vec16 and amx, each into each other")
@pytest.mark.parametrize(("source", "target"), PAIRS, ids=lambda packing: f"{packing[0]}-{packing[1]}")
def test_any_packing_to_any_other(source: tuple[str, int], target: tuple[str, int]) -> None:
    kv, bits = text_kv(), torch.zeros((HEADS, LAYERS, 2, TOKENS, DIM), dtype=torch.int16)
    wrote, reads, wanted = Engine(*source), Engine(*target), Engine(*target)
    wrote.compute(kv)
    wrote.move(gather, bits)
    assert torch.equal(bits.view(torch.bfloat16), kv.permute(3, 0, 1, 2, 4))
    reads.move(scatter, bits)
    wanted.compute(kv)
    for got, own in zip(reads.layers, wanted.layers, strict=True):
        assert torch.equal(got.kv_cache.view(torch.int16), own.kv_cache.view(torch.int16))


@pytest.mark.parametrize(("first", "last"), [(0, 16), (16, 48), (2, 34), (3, 50), (31, 33), (90, 190)])
@pytest.mark.parametrize("packing", PACKINGS, ids=lambda packing: f"{packing[0]}-{packing[1]}")
def test_some_tokens_of_a_block(packing: tuple[str, int], first: int, last: int) -> None:
    """Also where tiles are cut: in a packing of tiles some go by strides and some by the table."""
    kv = text_kv()
    wrote, reads = Engine(*packing), Engine(*packing)
    wrote.compute(kv)
    cells = torch.zeros((HEADS, LAYERS, 2, last - first, DIM), dtype=torch.int16)
    for run in wrote.runs:
        gather(run, wrote.table, first, last, Canonical(cells, (DIM, DIM)).narrow(run.positions, 0, last - first))
    assert torch.equal(cells.view(torch.bfloat16), kv.permute(3, 0, 1, 2, 4)[:, :, :, first:last])
    reads.compute(torch.ones_like(kv))
    for run in reads.runs:
        scatter(run, reads.table, first, last, Canonical(cells, (DIM, DIM)).narrow(run.positions, 0, last - first))
    got = torch.zeros((HEADS, LAYERS, 2, TOKENS, DIM), dtype=torch.int16)
    reads.move(gather, got)
    wanted = torch.ones_like(kv)
    wanted[:, :, first:last] = kv[:, :, first:last]
    assert torch.equal(got.view(torch.bfloat16), wanted.permute(3, 0, 1, 2, 4))


@pytest.mark.parametrize("isa", ["vec", "amx"])
def test_every_packing_is_a_set_of_strides(isa: str) -> None:
    """A table moves elements one by one. Tiles have strides of digits; what lies in pairs moves in pairs."""
    run = Engine(isa, 96).runs[0]
    assert all(part.strides is not None for part in run.layout.parts)
    assert [part._forms[0].merged for part in run._parts] == [2 if isa == "amx" else 1, 1]


def test_cells_at_odd_places_are_copied_too() -> None:
    """Pairs are taken as one where both sides have them at even places."""
    engine, kv = Engine("amx", 96), text_kv()
    engine.compute(kv)
    odd = torch.zeros(HEADS * LAYERS * 2 * TOKENS * DIM + 1, dtype=torch.int16)[1:].view(HEADS, LAYERS, 2, TOKENS, DIM)
    engine.move(gather, odd)
    assert torch.equal(odd.view(torch.bfloat16), kv.permute(3, 0, 1, 2, 4))


def test_the_packings_differ() -> None:
    """Else the test above would compare copies."""
    first = []
    for isa in ("vec", "amx"):
        engine = Engine(isa, 32)
        engine.compute(text_kv())
        first.append(engine.layers[0].kv_cache.view(torch.int16))
    assert not torch.equal(*first)


@pytest.mark.parametrize(
    ("kv_dtype", "dtype", "error"),
    [("fp8_e4m3", torch.float8_e4m3fn, 1 / 8), ("fp8_e5m2", torch.float8_e5m2, 1 / 4)],  # this op cuts, a bit is lost
)
def test_fp8_pages_with_scales(kv_dtype: str, dtype: torch.dtype, error: float) -> None:
    """What is stored is what the op has made of K and V, divided by their scales, bit for bit."""
    scales = (0.5, 0.125)
    kv, bits = text_kv(), torch.zeros((HEADS, LAYERS, 2, TOKENS, DIM), dtype=torch.uint8)
    wrote, reads = Engine("vec", 32, kv_dtype, scales), Engine("vec", 96, kv_dtype, scales)
    wrote.compute(kv)
    wrote.move(gather, bits)
    stored = bits.view(dtype).float() * torch.tensor(scales).view(2, 1, 1)
    assert torch.allclose(stored, kv.permute(3, 0, 1, 2, 4).float(), rtol=error, atol=0.01)
    reads.move(scatter, bits)
    again = torch.zeros_like(bits)
    reads.move(gather, again)
    assert torch.equal(again, bits)


def test_the_tools_read_pages_as_vllm_wrote_them() -> None:
    """`tplayout convert` knows the page order "cpu" without vLLM: it is that of the op."""
    kv, block = text_kv(), 32
    wrote = Engine("vec", block)
    wrote.compute(kv)
    group = Group("full", "full", tuple(range(LAYERS)), HEADS, (Part("k", DIM), Part("v", DIM)), "BF16")
    bits = kv.view(torch.int16).permute(0, 1, 3, 2, 4).numpy().view(np.uint16)  # [layers, K and V, heads, tokens, dim]
    for layer, own in enumerate(wrote.layers):
        for number, place in enumerate(wrote.table):
            page = own.kv_cache[place].view(torch.uint8).numpy().tobytes()
            inside = slice(number * block, (number + 1) * block)
            for found, part in zip(split_page(page, group, "cpu", HEADS, block), bits[layer], strict=True):
                assert np.array_equal(found, part[:, inside])
