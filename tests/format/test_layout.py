"""tplayout/format/layout.py: where everything is, and what a header may declare."""

import dataclasses
import json
from collections.abc import Callable
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tplayout.errors import FormatError, GeometryError, Reason
from tplayout.format.digest import DIGEST_BYTES, KEYED
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.header import Header, parse_header
from tplayout.format.layout import ALIGN, chunk_layout, layout_of, layouts_of
from tplayout.format.sharding import Shard, whole

DTYPES = ("F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "U8")


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    """One group of any shape, small."""
    dims = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    layers = draw(st.sets(st.integers(0, 90), min_size=1, max_size=6))
    kind = draw(st.sampled_from(["full", "latent", "state"]))
    parts = tuple(Part(f"p{i}", dim) for i, dim in enumerate(dims))
    group = Group("g.x", kind, tuple(sorted(layers)), draw(st.integers(1, 5)), parts, draw(st.sampled_from(DTYPES)))
    return Geometry(draw(st.integers(1, 40)), (group,))


@given(geometries(), st.sampled_from(sorted(DIGEST_BYTES)))
def test_ranges_tile_the_file_and_are_aligned(geometry: Geometry, digest: str) -> None:
    """[M17] [M18] Checked against the header, read by the strict parser."""
    layout = chunk_layout(geometry, 0, digest, "0" * 16 if digest == KEYED else None)
    group, layers = layout.group, range(len(layout.group.layers))
    spans = [range(layout.data_start), layout.tokens_range, layout.parent_range, layout.extras_range]
    pads = list(layout.pads())
    spans.append(pads.pop(0))
    for head in range(group.heads):
        assert layout.head_section(head).start % ALIGN == 0
        assert layout.kv_offset(head) == layout.cell_range(head, 0).start
        assert layout.kv_offset(head) % 16 == 0
        spans += [layout.digest_range(head, layer) for layer in layers]
        spans += [layout.cell_range(head, layer) for layer in layers]
        spans.append(pads.pop(0))
    end = 0
    for span in spans:
        assert span.start == end
        end = span.stop
    assert end == layout.nbytes
    assert layout.data_start % ALIGN == 0
    assert len(layout.header) == layout.data_start
    header = parse_header(layout.header, layout.nbytes)
    tensors = header.tensors
    for head in range(group.heads):
        kv = tensors[f"h{head}.kv"]
        assert (kv.start, kv.end) == (layout.kv_offset(head), layout.kv_range(head, layers).stop)
        assert kv.shape == (len(layers), *group.cell_shape(geometry.chunk_tokens))
        assert tensors[f"h{head}.digests"].start == layout.head_section(head).start
    assert (tensors["tokens"].start, tensors["tokens"].end) == (layout.tokens_range.start, layout.tokens_range.stop)
    assert layout_of(header) == layout


@given(geometries(), st.data())
def test_shard_sections_bring_cells_and_digests(geometry: Geometry, data: st.DataObject) -> None:
    layout = chunk_layout(geometry, 0, "blake3")
    heads, layers = layout.group.heads, len(layout.group.layers)
    head = data.draw(st.integers(0, heads - 1))
    layer = data.draw(st.integers(0, layers - 1))
    shard = Shard(range(head, data.draw(st.integers(head, heads))), range(layer, data.draw(st.integers(layer, layers))))
    gap = data.draw(st.sampled_from([0, 100, 65536]))
    with patch("tplayout.format.layout.MERGE_GAP", gap):
        sections = layout.shard_sections(shard)
    assert all(a.stop + gap < b.start for a, b in pairwise(sections))
    for h in shard.heads:
        for p in shard.layers:
            for span in (layout.digest_range(h, p), layout.cell_range(h, p)):
                assert any(s.start <= span.start and span.stop <= s.stop for s in sections)
    assert (sections == []) == (shard.cells == 0)


def test_heads_with_all_layers_are_one_range() -> None:
    group = Group("full", "full", tuple(range(32)), 8, (Part("k", 128), Part("v", 128)), "BF16")
    layout = chunk_layout(Geometry(256, (group,)), 0, "xxh3-128")
    assert len(layout.shard_sections(Shard(range(2, 6), range(32)))) == 1
    assert len(layout.shard_sections(Shard(range(2, 6), range(8, 16)))) == 8
    assert layout.shard_sections(whole(group))[0].start == layout.sections


def test_what_is_outside_the_group_is_refused(tiny: Geometry) -> None:
    layout = chunk_layout(tiny, 0, "blake3")
    for shard in (Shard(range(3), range(1)), Shard(range(1), range(3))):
        with pytest.raises(GeometryError):
            layout.shard_sections(shard)
    for head in (-1, 2):
        with pytest.raises(GeometryError):
            layout.cell_range(head, 0)
    for index in (-1, 2):
        with pytest.raises(GeometryError):
            chunk_layout(tiny, index, "blake3")


def test_digest_and_key_id_belong_together(tiny: Geometry) -> None:
    for digest, key_id in (("blake3", "0" * 16), (KEYED, None), (KEYED, "xyz"), (KEYED, "A" * 16)):
        with pytest.raises(GeometryError):
            chunk_layout(tiny, 0, digest, key_id)
    with pytest.raises(FormatError) as caught:
        chunk_layout(tiny, 0, "md5")
    assert caught.value.reason is Reason.UNSUPPORTED_DIGEST


def test_a_header_over_the_cap_is_an_impossible_geometry() -> None:
    """[M7]"""
    scales = tuple((1.0 / 3,) * 2048 for _ in range(64))
    group = Group("full", "full", tuple(range(64)), 1024, (Part("k", 1), Part("v", 1)), "F8_E4M3", scales=scales)
    with pytest.raises(GeometryError, match="header"):
        chunk_layout(Geometry(1, (group,)), 0, "blake3")


def test_the_largest_head_count_fits() -> None:
    group = Group("full", "full", tuple(range(1024)), 1024, (Part("k", 128), Part("v", 128)), "F32")
    layout = chunk_layout(Geometry(256, (group,)), 0, "blake3")
    assert parse_header(layout.header, layout.nbytes).tensors.keys() >= {"h1023.kv"}


def test_the_header_depends_on_nothing_else(tiny: Geometry) -> None:
    """[M17] Other groups of the geometry do not matter; group, index, chunk size, digest and key id do."""
    base = chunk_layout(tiny, 0, KEYED, "0" * 16).header
    alone = Geometry(4, (tiny.groups[0],))
    assert chunk_layout(alone, 0, KEYED, "0" * 16).header == base
    renamed = dataclasses.replace(tiny.groups[0], name="other")
    others = [
        chunk_layout(Geometry(8, tiny.groups), 0, KEYED, "0" * 16),
        chunk_layout(Geometry(4, tiny.groups[::-1]), 1, KEYED, "0" * 16),
        chunk_layout(Geometry(4, (renamed,)), 0, KEYED, "0" * 16),
        chunk_layout(tiny, 0, KEYED, "1" * 16),
        chunk_layout(tiny, 0, "blake3"),
    ]
    assert len({base, *(layout.header for layout in others)}) == 6


METADATA = [
    ({"tplayout": None}, Reason.NOT_A_CHUNK),
    ({"tplayout": "2"}, Reason.WRONG_VERSION),
    ({"tplayout": "01"}, Reason.WRONG_VERSION),
    ({"codec": "zstd"}, Reason.UNSUPPORTED_CODEC),
    ({"codec": "zstd", "levels": "3"}, Reason.UNSUPPORTED_CODEC),
    ({"codec": None}, Reason.BAD_METADATA),
    ({"digest": "md5"}, Reason.UNSUPPORTED_DIGEST),
    ({"digest": None}, Reason.BAD_METADATA),
    ({"digest": KEYED}, Reason.BAD_METADATA),
    ({"key_id": "0" * 16}, Reason.BAD_METADATA),
    ({"digest": KEYED, "key_id": "no"}, Reason.BAD_METADATA),
    ({"extra": "1"}, Reason.BAD_METADATA),
    ({"chunk_tokens": "4.0"}, Reason.BAD_METADATA),
    ({"chunk_tokens": "04"}, Reason.BAD_METADATA),
    ({"chunk_tokens": "0"}, Reason.BAD_METADATA),
    ({"chunk_tokens": "-4"}, Reason.BAD_METADATA),
    ({"chunk_tokens": "9" * 100_000}, Reason.BAD_METADATA),
    ({"chunk_tokens": "65537"}, Reason.BAD_METADATA),
    ({"chunk_tokens": "\u0664"}, Reason.BAD_METADATA),
    ({"group_index": "64"}, Reason.BAD_METADATA),
    ({"group_index": ""}, Reason.BAD_METADATA),
    ({"group": "{}"}, Reason.BAD_METADATA),
    ({"group": "[" * 100}, Reason.BAD_METADATA),
    ({"group": "\ud800"}, Reason.BAD_METADATA),
    ({"group": '{"name":"a","name":"a"}'}, Reason.BAD_METADATA),
]


@pytest.mark.parametrize(("change", "reason"), METADATA, ids=range(len(METADATA)))
def test_hostile_metadata_has_one_reason_each(tiny: Geometry, change: dict[str, Any], reason: Reason) -> None:
    """[M13] [M31] [M35]"""
    layout = chunk_layout(tiny, 0, "blake3")
    good = parse_header(layout.header, layout.nbytes)
    metadata = {name: text for name, text in {**good.metadata, **change}.items() if text is not None}
    with pytest.raises(FormatError) as caught:
        layout_of(Header(metadata, good.tensors, good.data_start, good.file_size))
    assert caught.value.reason is reason
    assert len(str(caught.value)) < 600


def test_metadata_says_what_the_format_says(make_sealed: Callable[..., Any]) -> None:
    """[M17] [M20]"""
    sealed = make_sealed(secret=b"x" * 16)
    text = json.loads(sealed.layout.header[8:])
    assert list(text)[:5] == ["__metadata__", "tokens", "parent", "extras", "pad"]
    assert list(text["__metadata__"]) == [
        "chunk_tokens",
        "codec",
        "digest",
        "group",
        "group_index",
        "key_id",
        "tplayout",
    ]
    assert json.loads(text["__metadata__"]["group"]) == sealed.layout.group.to_json()


def test_layouts_of_all_groups(tiny: Geometry) -> None:
    layouts = layouts_of(tiny, KEYED, "0" * 16)
    assert layouts == tuple(chunk_layout(tiny, index, KEYED, "0" * 16) for index in range(len(tiny.groups)))
