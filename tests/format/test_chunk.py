"""tplayout/format/chunk.py: sealing, verifying, and every kind of damage. Golden bytes are in test_golden.py."""

import dataclasses
import struct
import tracemalloc
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import safetensors.numpy
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tplayout.errors import FormatError, GeometryError, Reason
from tplayout.format.chunk import piece, read_chunk_id, seal, verify, verify_shard, write_digests, write_info
from tplayout.format.digest import DIGEST_BYTES, KEYED, make_hasher
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.header import parse_header
from tplayout.format.keys import ROOT, ChunkId, chain
from tplayout.format.layout import chunk_layout, layout_of
from tplayout.format.sharding import Shard, whole

Make = Callable[..., Any]
SECRET = b"a secret of some length"


def check(sealed: Any, data: Any, **changes: Any) -> ChunkId:
    fields = {"layout": sealed.layout, "namespace": sealed.namespace, "expected_key": sealed.chunk.key}
    return verify(data, **{**fields, "hasher": sealed.hasher, **changes})


def reason_of(sealed: Any, data: Any, **changes: Any) -> Reason:
    with pytest.raises(FormatError) as caught:
        check(sealed, data, **changes)
    return caught.value.reason


def test_an_intact_object_is_accepted(make_sealed: Make) -> None:
    for digest in DIGEST_BYTES:
        sealed = make_sealed(digest=digest, secret=SECRET if digest == KEYED else None)
        for view in (sealed.buf, bytes(sealed.buf), memoryview(sealed.buf).toreadonly()):
            assert check(sealed, view) == sealed.chunk
    second = make_sealed(group_index=1)
    assert check(second, second.buf).tokens == (1, 2, 3, 4)


def test_a_later_chunk_keeps_its_parent(make_sealed: Make) -> None:
    sealed = make_sealed()
    later = chain(sealed.namespace, range(100, 108), 4)[1]
    seal(sealed.buf, sealed.layout, sealed.namespace, later, sealed.hasher)
    found = check(sealed, sealed.buf, expected_key=later.key)
    assert found == dataclasses.replace(later, index=-1)
    assert found.parent != ROOT


def test_the_same_kv_gives_the_same_bytes(make_sealed: Make) -> None:
    """[M20] Whatever was in the buffer before."""
    sealed = make_sealed()
    again = bytearray(b"\xaa" * (sealed.layout.nbytes + 100))
    for head in range(2):
        span = sealed.layout.kv_range(head, range(2))
        again[span.start : span.stop] = sealed.buf[span.start : span.stop]
    seal(again, sealed.layout, sealed.namespace, sealed.chunk, sealed.hasher)
    assert again[: sealed.layout.nbytes] == sealed.buf
    assert again[sealed.layout.nbytes :] == b"\xaa" * 100


def test_every_truncation_is_refused(make_sealed: Make) -> None:
    """[M27] [M31] At each byte of the object, as a whole read and as a header with a file size."""
    sealed = make_sealed()
    view = memoryview(sealed.buf)
    header = view[: sealed.layout.data_start]
    for size in range(len(view)):
        assert reason_of(sealed, view[:size]) is Reason.TRUNCATED
        with pytest.raises(FormatError) as caught:
            parse_header(header[:size], size)
        assert caught.value.reason is Reason.TRUNCATED


def test_trailing_bytes_are_refused(make_sealed: Make) -> None:
    """[M27]"""
    sealed = make_sealed()
    for more in (1, 4096):
        assert reason_of(sealed, bytes(sealed.buf) + bytes(more)) is Reason.TRAILING


HEADER_REASONS = set(Reason) - {Reason.DIGEST_MISMATCH, Reason.BAD_PADDING, Reason.WRONG_KEY, Reason.BAD_NAME}


def fault(sealed: Any, data: bytearray) -> Reason | None:
    try:
        check(sealed, data)
    except FormatError as error:
        return error.reason
    return None


@pytest.mark.parametrize("digest", ["xxh3-128", KEYED])
def test_every_flipped_bit_is_refused(make_sealed: Make, digest: str) -> None:
    """[M25] [M28] [M31] Each bit of the object in turn; the reason is that of its place."""
    sealed = make_sealed(digest=digest, secret=SECRET if digest == KEYED else None)
    layout, data = sealed.layout, bytearray(sealed.buf)
    allowed: list[set[Reason]] = [HEADER_REASONS] * layout.data_start
    allowed += [{Reason.WRONG_KEY}] * (layout.extras_range.stop - layout.data_start)
    allowed += [{Reason.DIGEST_MISMATCH}] * (layout.nbytes - layout.extras_range.stop)
    for pad in layout.pads():
        allowed[pad.start : pad.stop] = [{Reason.BAD_PADDING}] * len(pad)
    for position, reasons in enumerate(allowed):
        for mask in (1 << bit for bit in range(8)):
            data[position] ^= mask
            assert fault(sealed, data) in reasons, f"byte {position}, mask {mask}"
            data[position] ^= mask
    assert data == sealed.buf


def test_a_shard_is_verified_alone(make_sealed: Make) -> None:
    """[M25] With a shard, damage in other cells does not matter, in its own it does."""
    sealed = make_sealed()
    data = bytearray(sealed.buf)
    data[sealed.layout.cell_range(1, 0).start] ^= 1

    def check_shard(heads: range, layers: range) -> None:
        verify_shard({range(len(data)): data}, sealed.layout, sealed.chunk.key, sealed.hasher, Shard(heads, layers))

    check_shard(range(1), range(2))
    check_shard(range(2), range(1, 2))
    check_shard(range(0), range(0))
    with pytest.raises(FormatError) as caught:
        check_shard(range(1, 2), range(1))
    assert caught.value.reason is reason_of(sealed, data) is Reason.DIGEST_MISMATCH
    with pytest.raises(GeometryError):
        check_shard(range(3), range(2))


def test_swapped_cells_and_heads_are_refused(make_sealed: Make) -> None:
    """[M22] Even when the digest moves with its cell."""
    sealed = make_sealed()
    layout = sealed.layout
    cells = [(head, layer) for head in range(2) for layer in range(2)]
    for one in cells:
        for other in cells:
            if one == other:
                continue
            data = bytearray(sealed.buf)
            for span in (layout.cell_range, layout.digest_range):
                data[span(*one).start : span(*one).stop] = sealed.buf[span(*other).start : span(*other).stop]
                data[span(*other).start : span(*other).stop] = sealed.buf[span(*one).start : span(*one).stop]
            assert reason_of(sealed, data) is Reason.DIGEST_MISMATCH
    first, second = (slice(layout.head_section(h).start, layout.head_section(h).stop) for h in range(2))
    data = bytearray(sealed.buf)
    data[first], data[second] = sealed.buf[second], sealed.buf[first]
    assert reason_of(sealed, data) is Reason.DIGEST_MISMATCH


def test_a_wrong_name_or_namespace_is_refused(make_sealed: Make) -> None:
    """[M26]"""
    sealed = make_sealed()
    other = chain(sealed.namespace, range(4), 4)[0]
    assert reason_of(sealed, sealed.buf, expected_key=other.key) is Reason.WRONG_KEY
    assert reason_of(sealed, sealed.buf, namespace=bytes(32)) is Reason.WRONG_KEY


def test_a_whole_other_chunk_under_this_name_is_refused(make_sealed: Make) -> None:
    """[M26] Also when tokens are put right but the cells are those of another chunk."""
    sealed = make_sealed()
    other = chain(sealed.namespace, range(4), 4)[0]
    data = bytearray(sealed.buf)
    seal(data, sealed.layout, sealed.namespace, other, sealed.hasher)
    assert reason_of(sealed, data) is Reason.WRONG_KEY
    write_info(data, sealed.layout, sealed.chunk)
    assert reason_of(sealed, data) is Reason.DIGEST_MISMATCH


def test_negative_tokens_are_refused(make_sealed: Make) -> None:
    """[M15] A key can be computed over them; the object is refused all the same."""
    sealed = make_sealed()
    data = bytearray(sealed.buf)
    data[sealed.layout.tokens_range.start + 3] = 0x80
    key = read_chunk_id(data, sealed.layout, sealed.namespace).key
    assert reason_of(sealed, data, expected_key=key) is Reason.BAD_TOKENS


def variants(tiny: Geometry) -> list[tuple[Geometry, int, Reason]]:
    full, window = tiny.groups
    return [
        (tiny, 1, Reason.WRONG_GROUP),
        (Geometry(4, (window, full)), 0, Reason.WRONG_GROUP),
        (Geometry(4, (dataclasses.replace(full, name="draft.full"),)), 0, Reason.WRONG_GROUP),
        (Geometry(8, (full,)), 0, Reason.WRONG_GEOMETRY),
        (Geometry(4, (dataclasses.replace(full, dtype="BF16"),)), 0, Reason.WRONG_GEOMETRY),
        (Geometry(4, (dataclasses.replace(full, heads=4),)), 0, Reason.WRONG_GEOMETRY),
        (Geometry(4, (dataclasses.replace(full, layers=(0, 1)),)), 0, Reason.WRONG_GEOMETRY),
        (Geometry(4, (dataclasses.replace(full, parts=(Part("v", 2), Part("k", 2))),)), 0, Reason.WRONG_GEOMETRY),
        (Geometry(4, (dataclasses.replace(full, scales=((1.0, 2.0),) * 2),)), 0, Reason.WRONG_GEOMETRY),
    ]


@pytest.mark.parametrize("case", range(9))
def test_an_object_of_another_geometry_or_group_is_refused(make_sealed: Make, tiny: Geometry, case: int) -> None:
    """[M26] [M31]"""
    geometry, index, reason = variants(tiny)[case]
    sealed, other = make_sealed(), make_sealed(geometry, index)
    assert reason_of(sealed, other.buf) is reason


@pytest.mark.parametrize(
    ("old", "new", "reason"),
    [
        (b'"tplayout":"1"', b'"tplayout":"2"', Reason.WRONG_VERSION),
        (b'"tplayout":"1"', b'"tplayouT":"1"', Reason.NOT_A_CHUNK),
        (b'"codec":"none"', b'"codec":"zstd"', Reason.UNSUPPORTED_CODEC),
        (b'"digest":"xxh3-128"', b'"digest":"xxh3-129"', Reason.UNSUPPORTED_DIGEST),
        (b'"digest":"xxh3-128"', b'"digest":"blake3"  ', Reason.WRONG_DIGEST),
        (b'"group_index":"0"', b'"group_index":"1"', Reason.WRONG_GROUP),
        (b'"chunk_tokens":"4"', b'"chunk_tokens":"5"', Reason.WRONG_GEOMETRY),
        (b'"h0.kv":{"dtype":"F16"', b'"h0.kv":{"dtype":"I16"', Reason.BAD_DTYPE),
        (b'"h1.kv":', b'"h2.kv":', Reason.BAD_TENSOR),
        (b'"shape":[2,2,4,2]', b'"shape":[2,4,2,2]', Reason.BAD_SHAPE),
        (b'"h0.pad":{', b'"h1.pad":{', Reason.DUPLICATE_NAME),
        (b'"codec":"none"', b'"codec" :"none"', Reason.BAD_HEADER),
    ],
)
def test_a_changed_header_is_named(make_sealed: Make, old: bytes, new: bytes, reason: Reason) -> None:
    """[M13] [M26] [M31] [M35]"""
    sealed = make_sealed()
    header = sealed.layout.header.replace(old, new, 1)
    data = header[:4095].ljust(4096) + bytes(sealed.buf[4096:])
    assert data != sealed.buf
    assert reason_of(sealed, data) is reason


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 1400), st.binary(max_size=6), st.integers(0, 6)), min_size=1, max_size=4))
def test_garbled_headers_raise_nothing_but_format_errors(
    make_sealed: Make, edits: list[tuple[int, bytes, int]]
) -> None:
    """[M28] [M30] Bytes overwritten, inserted and removed anywhere in length and header."""
    sealed = make_sealed()
    header = bytearray(sealed.layout.header)
    for position, new, removed in edits:
        header[position : position + removed] = new
    data = bytes(header) + bytes(sealed.buf[4096:])
    assume(data != sealed.buf)
    reason_of(sealed, data)
    with suppress(FormatError):
        layout_of(parse_header(data, len(data)))


def test_moved_offsets_are_named(make_sealed: Make) -> None:
    """[M18] [M31] Consistent within itself, but the heads are not where the geometry puts them."""
    sealed = make_sealed()
    header = sealed.layout.header.replace(b'"h0.', b'"hX.').replace(b'"h1.', b'"h0.').replace(b'"hX.', b'"h1.')
    assert reason_of(sealed, header + bytes(sealed.buf[4096:])) is Reason.BAD_OFFSETS
    longer = struct.pack("<Q", 8184) + sealed.layout.header[8:].ljust(8184) + bytes(sealed.buf[4096:])
    assert reason_of(sealed, longer) is Reason.BAD_OFFSETS


def test_another_writer_of_safetensors_is_refused(make_sealed: Make) -> None:
    """[M17] Another library's header for the same tensors is not ours."""
    sealed = make_sealed()
    tensors = safetensors.numpy.load(bytes(sealed.buf))
    metadata = dict(parse_header(sealed.layout.header, len(sealed.buf)).metadata)
    assert reason_of(sealed, safetensors.numpy.save(tensors, metadata)) is Reason.BAD_OFFSETS
    assert reason_of(sealed, safetensors.numpy.save(tensors)) is Reason.NOT_A_CHUNK


def test_a_keyed_object_needs_its_secret(make_sealed: Make) -> None:
    """[M24] Both ways: no downgrade to an unkeyed object either."""
    plain, keyed, other = make_sealed(), make_sealed(secret=SECRET), make_sealed(secret=b"another secret, too")
    assert reason_of(keyed, plain.buf) is Reason.WRONG_DIGEST
    assert reason_of(plain, keyed.buf) is Reason.WRONG_DIGEST
    assert reason_of(keyed, other.buf) is Reason.WRONG_SECRET
    assert reason_of(keyed, keyed.buf, hasher=other.hasher) is Reason.WRONG_SECRET
    assert reason_of(keyed, keyed.buf, hasher=plain.hasher) is Reason.WRONG_DIGEST
    forged = bytearray(other.buf)
    write_info(forged, keyed.layout, keyed.chunk)
    assert reason_of(keyed, forged) is Reason.DIGEST_MISMATCH


def test_no_secret_is_in_an_object(make_sealed: Make) -> None:
    """[M23]"""
    assert SECRET not in make_sealed(secret=SECRET).buf


def test_ranged_reads_are_verified(make_sealed: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """[M25] [M27] Only the ranges that a shard needs, and each is length-checked."""
    sealed = make_sealed()
    layout, data, key = sealed.layout, sealed.buf, sealed.chunk.key
    for gap in (0, 65536):
        monkeypatch.setattr("tplayout.format.layout.MERGE_GAP", gap)
        for shard in (whole(layout.group), Shard(range(1, 2), range(2)), Shard(range(2), range(1, 2))):
            spans = layout.shard_sections(shard)
            parts = {span: bytes(data[span.start : span.stop]) for span in spans}
            verify_shard(parts, layout, key, sealed.hasher, shard)
            cell = piece(parts, layout.cell_range(shard.heads[0], shard.layers[0]))
            span = layout.cell_range(shard.heads[0], shard.layers[0])
            assert cell == data[span.start : span.stop]
            for reason, broken in damaged(parts):
                with pytest.raises(FormatError) as caught:
                    verify_shard(broken, layout, key, sealed.hasher, shard)
                assert caught.value.reason is reason
            with pytest.raises(FormatError) as caught:
                verify_shard(parts, layout, bytes(32), sealed.hasher, shard)
            assert caught.value.reason is Reason.DIGEST_MISMATCH


def damaged(parts: dict[range, bytes]) -> list[tuple[Reason, dict[range, bytes]]]:
    span, data = next(iter(parts.items()))
    rest = {other: parts[other] for other in parts if other != span}
    return [
        (Reason.TRUNCATED, rest),
        (Reason.TRUNCATED, {**parts, span: data[:-1]}),
        (Reason.TRUNCATED, {**parts, span: b""}),
        (Reason.TRAILING, {**parts, span: data + b"\0"}),
        (Reason.DIGEST_MISMATCH, {**parts, span: bytes([data[0] ^ 1]) + data[1:]}),
    ]


def test_writers_are_told_of_their_mistakes(make_sealed: Make) -> None:
    """[M14] [M15]"""
    sealed = make_sealed()
    arguments = (sealed.layout, sealed.namespace, sealed.chunk, sealed.hasher)
    with pytest.raises(GeometryError, match="buffer"):
        seal(bytearray(100), *arguments)
    wrong_key = dataclasses.replace(sealed.chunk, key=bytes(32))
    with pytest.raises(FormatError) as caught:
        seal(sealed.buf, sealed.layout, sealed.namespace, wrong_key, sealed.hasher)
    assert caught.value.reason is Reason.WRONG_KEY
    with pytest.raises(GeometryError, match="tokens"):
        write_info(sealed.buf, sealed.layout, dataclasses.replace(sealed.chunk, tokens=(1, 2, 3)))
    with pytest.raises(FormatError) as caught:
        write_digests(sealed.buf, sealed.layout, sealed.chunk.key, make_hasher("blake3"))
    assert caught.value.reason is Reason.WRONG_DIGEST
    with pytest.raises(FormatError) as caught:
        read_chunk_id(sealed.buf[:4100], sealed.layout, sealed.namespace)
    assert caught.value.reason is Reason.TRUNCATED


def test_sealing_and_verifying_copy_no_cells() -> None:
    """[M29] 32 MiB of cells; what is allocated is in the order of the header."""
    group = Group("full", "full", tuple(range(32)), 8, (Part("k", 128), Part("v", 128)), "BF16")
    layout = chunk_layout(Geometry(256, (group,)), 0, "xxh3-128")
    chunk, hasher, buf = chain(bytes(32), range(256), 256)[0], make_hasher(), bytearray(layout.nbytes)
    tracemalloc.start()
    seal(buf, layout, bytes(32), chunk, hasher)
    verify(buf, layout, bytes(32), chunk.key, hasher)
    assert tracemalloc.get_traced_memory()[1] < 200_000
    tracemalloc.stop()
