"""Any sharding writes, any sharding reads: the bytes of every cell are the same."""

from dataclasses import dataclass
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from tplayout.format.chunk import piece, seal, verify, verify_shard
from tplayout.format.digest import make_hasher
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.keys import chain
from tplayout.format.layout import chunk_layout
from tplayout.format.sharding import Shard, check_cover, pp_layer_ranges, shard_of, writes

DTYPES = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2")
NAMESPACE = bytes(range(32))
Cells = np.ndarray[Any, np.dtype[np.uint8]]  # [heads, layers, bytes of a cell]


@dataclass(frozen=True)
class Sharding:
    """One engine: TP size, and the layer numbers of each pipeline stage."""

    tp: int
    stages: tuple[range, ...]

    def ranks(self, group: Group) -> list[tuple[Shard, bool]]:
        """Each rank's shard, and whether it writes."""
        return [
            (shard_of(group, self.tp, rank, stage), writes(group.heads, self.tp, rank))
            for rank in range(self.tp)
            for stage in self.stages
        ]


@st.composite
def shardings(draw: st.DrawFn, heads: int, layers: int) -> Sharding:
    """A TP that the heads allow (3, 6, 12 included) and even or uneven stages, maybe empty ones."""
    tp = draw(st.sampled_from([tp for tp in range(1, 13) if heads % tp == 0 or tp % heads == 0]))
    if draw(st.booleans()):
        return Sharding(tp, tuple(pp_layer_ranges(layers, draw(st.integers(1, layers)))))
    cuts = sorted(draw(st.lists(st.integers(0, layers), max_size=3)))
    sizes = [b - a for a, b in pairwise([0, *cuts, layers])]
    return Sharding(tp, tuple(pp_layer_ranges(layers, len(sizes), sizes)))


@st.composite
def groups(draw: st.DrawFn, model_layers: int) -> Group:
    """A group that holds some of the model's layers."""
    layers = draw(st.sets(st.integers(0, model_layers - 1), min_size=1))
    dims = draw(
        st.one_of(st.integers(1, 9).map(lambda dim: [dim, dim]), st.lists(st.integers(1, 9), min_size=1, max_size=3))
    )
    parts = tuple(Part(f"p{i}", dim) for i, dim in enumerate(dims))
    heads = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12]))
    return Group("full", "full", tuple(sorted(layers)), heads, parts, draw(st.sampled_from(DTYPES)))


def write(group: Group, chunk_tokens: int, cells: Cells, sharding: Sharding) -> bytes:
    """The object that the ranks of one engine make together; replicas that do not write hold other bytes."""
    layout = chunk_layout(Geometry(chunk_tokens, (group,)), 0, "xxh3-128")
    buf = bytearray(b"\xee" * layout.nbytes)
    ranks = sharding.ranks(group)
    check_cover(group, [shard for shard, writer in ranks if writer])
    for shard, writer in ranks:
        own = cells[shard.heads.start : shard.heads.stop, shard.layers.start : shard.layers.stop]
        for local, head in enumerate(shard.heads if writer else ()):
            span = layout.kv_range(head, shard.layers)
            buf[span.start : span.stop] = own[local].tobytes()
    chunk = chain(NAMESPACE, range(chunk_tokens), chunk_tokens)[0]
    seal(buf, layout, NAMESPACE, chunk, make_hasher())
    return bytes(buf)


def read(group: Group, chunk_tokens: int, data: bytes, shard: Shard, gap: int) -> Cells:
    """One rank's cells from ranged reads, verified."""
    layout = chunk_layout(Geometry(chunk_tokens, (group,)), 0, "xxh3-128")
    key = chain(NAMESPACE, range(chunk_tokens), chunk_tokens)[0].key
    with patch("tplayout.format.layout.MERGE_GAP", gap):
        parts = {span: data[span.start : span.stop] for span in layout.shard_sections(shard)}
    verify_shard(parts, layout, key, make_hasher(), shard)
    rows = [piece(parts, layout.kv_range(head, shard.layers)) for head in shard.heads if shard.layers]
    flat = np.frombuffer(b"".join(rows), np.uint8)
    return flat.reshape(len(shard.heads), len(shard.layers), layout.cell_bytes)


@settings(max_examples=250, deadline=None)
@given(st.data())
def test_any_sharding_to_any_sharding_is_byte_exact(data: st.DataObject) -> None:
    """[M3] [M5] [M6] [M20] The object does not depend on who wrote it, and every rank reads its own cells."""
    model_layers = data.draw(st.integers(1, 9))
    group = data.draw(groups(model_layers))
    chunk_tokens = data.draw(st.integers(1, 33))
    writer = data.draw(shardings(group.heads, model_layers))
    reader = data.draw(shardings(group.heads, model_layers))
    shape = (group.heads, len(group.layers), group.cell_bytes(chunk_tokens))
    cells = np.random.default_rng(0).integers(0, 256, shape, np.uint8)

    stored = write(group, chunk_tokens, cells, writer)
    assert stored == write(group, chunk_tokens, cells, reader)
    layout = chunk_layout(Geometry(chunk_tokens, (group,)), 0, "xxh3-128")
    key = chain(NAMESPACE, range(chunk_tokens), chunk_tokens)[0].key
    verify(stored, layout, NAMESPACE, key, make_hasher())
    gap = data.draw(st.sampled_from([0, 65536]))
    for shard, _ in reader.ranks(group):
        got = read(group, chunk_tokens, stored, shard, gap)
        wanted = cells[shard.heads.start : shard.heads.stop, shard.layers.start : shard.layers.stop]
        np.testing.assert_array_equal(got, wanted)


def test_the_main_case_four_to_two() -> None:
    """[M20] TP=1, 2 and 4 write the same bytes; TP=2 reads what TP=4 wrote in one range."""
    group = Group("full", "full", tuple(range(30)), 4, (Part("k", 64), Part("v", 64)), "BF16")
    cells = np.random.default_rng(1).integers(0, 256, (4, 30, group.cell_bytes(256)), np.uint8)
    whole = (range(30),)
    objects = {write(group, 256, cells, Sharding(tp, whole)) for tp in (1, 2, 4)}
    assert len(objects) == 1
    for shard, _ in Sharding(2, whole).ranks(group):
        layout = chunk_layout(Geometry(256, (group,)), 0, "xxh3-128")
        assert len(layout.shard_sections(shard)) == 1
        got = read(group, 256, next(iter(objects)), shard, 65536)
        np.testing.assert_array_equal(got, cells[shard.heads.start : shard.heads.stop])
