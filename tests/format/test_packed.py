"""tplayout/format/packed.py: the bytes that shuffle-zstd stores, and every kind of damage to them."""

import hashlib
import json
import resource
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load as load_safetensors

from tplayout.cache.codec import Zstd
from tplayout.errors import FormatError, Reason
from tplayout.format.chunk import seal, verify, verify_shard
from tplayout.format.digest import DIGEST_BYTES, KEYED, make_hasher
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.keys import chain
from tplayout.format.layout import chunk_layout
from tplayout.format.packed import (
    PackedLayout,
    check_info,
    pack,
    packed_layout,
    plain_beginning,
    plain_range,
    salvage,
    unpack,
)
from tplayout.format.sharding import Shard

Make = Callable[..., Any]
SECRET = b"a secret of some length"

GOLDEN_HEADER = (
    b'{"__metadata__":{"chunk_tokens":"4","codec":"shuffle-zstd","digest":"xxh3-128","group":"{\\"dtype\\":\\"F16\\",'
    b'\\"heads\\":2,\\"kind\\":\\"full\\",\\"layers\\":[0,2],\\"name\\":\\"full\\",\\"parts\\":[{\\"dim\\":2,'
    b'\\"name\\":\\"k\\"},{\\"dim\\":2,\\"name\\":\\"v\\"}],\\"scales\\":null,\\"window\\":null}","group_index":"0",'
    b'"tplayout":"1"},"digest":{"dtype":"U8","shape":[16],"data_offsets":[0,16]},'
    b'"tokens":{"dtype":"I32","shape":[4],"data_offsets":[16,32]},'
    b'"parent":{"dtype":"U8","shape":[32],"data_offsets":[32,64]},'
    b'"extras":{"dtype":"U8","shape":[32],"data_offsets":[64,96]},'
    b'"h0.digests":{"dtype":"U8","shape":[2,16],"data_offsets":[96,128]},'
    b'"h0.lengths":{"dtype":"U32","shape":[2,2],"data_offsets":[128,144]},'
    b'"h1.digests":{"dtype":"U8","shape":[2,16],"data_offsets":[144,176]},'
    b'"h1.lengths":{"dtype":"U32","shape":[2,2],"data_offsets":[176,192]},'
    b'"h0.stored":{"dtype":"U8","shape":[22],"data_offsets":[192,214]},'
    b'"h1.stored":{"dtype":"U8","shape":[64],"data_offsets":[214,278]}}'
)
GOLDEN_SHA256 = {
    "xxh3-128": "865428ac923f1e8bf5285c0cd2dda084c08c2fe2676e869eb8abbadd9bf753a0",
    "blake3": "5eda781a1173c87a51b0ab088dbca63705f9a7b994a1d86cf97738f110a0c567",
    KEYED: "57be80d798a406788481371d1368d737dba22b008682d7d83d87701d8f9c9302",
}


class Runs:
    """Stands for zstd where bytes are compared: a plane of one value becomes two bytes."""

    def compress(self, data: bytes) -> bytes:
        return b"=" + data[:1] if len(set(data)) == 1 else b"!" + data

    def expand(self, frame: memoryview, nbytes: int) -> bytes:
        if len(frame) != 2 or frame[:1] != b"=":
            raise FormatError(Reason.BAD_PLANE, "no run")
        return bytes(frame[1:]) * nbytes


def sealed_with_runs(make_sealed: Make, **fields: Any) -> Any:
    """An object in which head 0's planes but one are runs."""
    sealed = make_sealed(**fields)
    for layer, cell in ((0, bytes(range(16)) + bytes(16)), (1, b"\x01\x02" * 16)):
        span = sealed.layout.cell_range(0, layer)
        planes = [cell[:16], b"\x07" * 16] if layer == 0 else [b"\x01" * 16, b"\x02" * 16]
        sealed.buf[span.start : span.stop] = bytes(value for pair in zip(*planes, strict=True) for value in pair)
    seal(sealed.buf, sealed.layout, sealed.namespace, sealed.chunk, sealed.hasher)
    return sealed


class Packed:
    """A sealed object and its packed bytes."""

    def __init__(self, sealed: Any, compressor: Any = None) -> None:
        self.sealed = sealed
        self.layout: PackedLayout = packed_layout(sealed.layout)
        self.compressor = compressor or Zstd()
        self.data = bytes(pack(sealed.buf, self.layout, sealed.hasher, self.compressor))

    def unpack(self, data: Any, **changes: Any) -> memoryview:
        fields = {"layout": self.layout, "hasher": self.sealed.hasher, "compressor": self.compressor, **changes}
        return unpack(data, **fields)

    def verify(self, data: Any) -> None:
        """What a reader does with a whole object."""
        sealed = self.sealed
        verify(self.unpack(data), sealed.layout, sealed.namespace, sealed.chunk.key, sealed.hasher)

    def reason(self, data: Any, **changes: Any) -> Reason:
        with pytest.raises(FormatError) as caught:
            self.unpack(data, **changes)
        return caught.value.reason

    def lengths(self) -> tuple[int, ...]:
        return check_info(self.data, len(self.data), self.layout)

    def rebuilt(self, lengths: Sequence[int], stored: bytes) -> bytearray:
        """An object with other planes, right in everything else: what somebody who may write could store."""
        data = bytearray(self.data[: self.layout.info_bytes]) + stored
        data[: self.layout.data_start] = self.layout.header(lengths)
        rows = len(lengths) // self.layout.plain.group.heads
        for head in range(self.layout.plain.group.heads):
            span = self.layout.lengths_range(head)
            data[span.start : span.stop] = struct.pack(f"<{rows}I", *lengths[head * rows : (head + 1) * rows])
        behind = memoryview(bytes(data[self.layout.ids_start :]))
        own = self.sealed.hasher.cell(bytes(32), self.layout.plain.group.name, 2**32 - 1, 2**32 - 1, behind)
        data[self.layout.data_start : self.layout.ids_start] = own
        return data


@pytest.fixture
def packed(make_sealed: Make) -> Packed:
    return Packed(make_sealed())


@pytest.fixture
def runs(make_sealed: Make) -> Packed:
    return Packed(sealed_with_runs(make_sealed), Runs())


def test_golden_header(runs: Packed) -> None:
    """[M36] [M41] Byte for byte; the length field makes the data begin at 4096."""
    assert runs.data[:8] == struct.pack("<Q", 4088)
    assert runs.data[8:4096].rstrip(b" ") == GOLDEN_HEADER


@pytest.mark.parametrize("digest", sorted(DIGEST_BYTES))
def test_golden_objects(make_sealed: Make, digest: str) -> None:
    """[M36] [M37] [M40] All but what zstd writes is fixed: another hash here is another format."""
    secret = SECRET if digest == KEYED else None
    packed = Packed(sealed_with_runs(make_sealed, digest=digest, secret=secret), Runs())
    assert hashlib.sha256(packed.data).hexdigest() == GOLDEN_SHA256[digest]


def test_every_byte_is_where_the_table_says(runs: Packed) -> None:
    """[M36] [M37] [M40] The whole object, rebuilt from FORMAT.md's table without our code's offsets."""
    sealed, heads = runs.sealed, []
    planes: list[list[bytes]] = []
    for head in range(2):
        own = [sealed.buf[span.start : span.stop] for span in (sealed.layout.cell_range(head, row) for row in (0, 1))]
        heads.append(
            b"".join(
                sealed.hasher.cell(sealed.chunk.key, "full", head, layer, memoryview(cell))
                for layer, cell in zip((0, 2), own, strict=True)
            )
        )
        planes.append([bytes(cell[number::2]) for cell in own for number in (0, 1)])
    stored = [[b"=" + plane[:1] if len(set(plane)) == 1 else plane for plane in head] for head in planes]
    behind = struct.pack("<4i", 1, 2, 3, 4) + bytes(32) + sealed.chunk.extras
    for digests, head in zip(heads, stored, strict=True):
        behind += digests + struct.pack("<4I", *map(len, head))
    behind += b"".join(plane for head in stored for plane in head)
    digest = sealed.hasher.cell(bytes(32), "full", 2**32 - 1, 2**32 - 1, memoryview(behind))
    assert runs.data[4096:] == digest + behind


def test_any_safetensors_reader_reads_it(packed: Packed) -> None:
    tensors = load_safetensors(packed.data)
    assert tensors["tokens"].tolist() == [1, 2, 3, 4]
    assert tensors["h1.lengths"].sum() == len(tensors["h1.stored"])
    assert next(iter(json.loads(packed.data[8:4096]))) == "__metadata__"


def test_what_is_unpacked_is_what_was_packed(make_sealed: Make) -> None:
    for digest in DIGEST_BYTES:
        packed = Packed(make_sealed(digest=digest, secret=SECRET if digest == KEYED else None))
        assert packed.unpack(packed.data) == packed.sealed.buf
        assert packed.unpack(packed.data, hasher=None) == packed.sealed.buf
        out = memoryview(bytearray(b"\xaa" * (packed.sealed.layout.nbytes + 10)))
        assert packed.unpack(packed.data, out=out) == packed.sealed.buf
        assert out[-10:] == b"\xaa" * 10
        assert len(packed.data) in packed.layout.sizes


def test_noise_is_stored_as_it_is_and_runs_are_not(runs: Packed) -> None:
    """[M37] The rule is a plane's: one of a cell may shrink and another not."""
    assert runs.lengths() == (16, 2, 2, 2, 16, 16, 16, 16)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    dims = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    kind = draw(st.sampled_from(["full", "latent", "state"]))
    group = Group(
        "g",
        kind,
        tuple(range(draw(st.integers(1, 3)))),
        draw(st.integers(1, 3)),
        tuple(Part(f"p{i}", dim) for i, dim in enumerate(dims)),
        draw(st.sampled_from(["F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "U8"])),
    )
    return Geometry(draw(st.integers(1, 9)), (group,))


@settings(deadline=None, max_examples=150)
@given(geometries(), st.sampled_from(sorted(DIGEST_BYTES)), st.randoms(use_true_random=False), st.integers(0, 3))
def test_round_trips(geometry: Geometry, digest: str, random: Any, noise: int) -> None:
    """[M40] Any geometry and dtype, cells from all zeros to noise; and any byte range of the plain object."""
    hasher = make_hasher(digest, SECRET if digest == KEYED else None)
    layout = chunk_layout(geometry, 0, hasher.name, hasher.key_id)
    buf = bytearray(layout.nbytes)
    for head in range(layout.group.heads):
        for row in range(len(layout.group.layers)):
            span = layout.cell_range(head, row)
            buf[span.start : span.stop] = bytes(random.randrange(4**noise * 4) % 256 * noise % 256 for _ in span)
    chunk = chain(bytes(32), range(geometry.chunk_tokens), geometry.chunk_tokens)[0]
    seal(buf, layout, bytes(32), chunk, hasher)
    packed, compressor = packed_layout(layout), Zstd()
    data = bytes(pack(buf, packed, hasher, compressor))
    assert unpack(data, packed, hasher, compressor) == buf
    assert salvage(data, packed, compressor) == buf
    head = data[: packed.info_bytes]
    assert plain_beginning(head, packed) == buf[: layout.sections]
    for _ in range(10):
        start = random.randrange(layout.nbytes)
        span = range(start, random.randrange(start, layout.nbytes) + 1)
        found = plain_range(head, span, packed, compressor, lambda at, count: data[at : at + count])
        assert found == buf[span.start : span.stop]


def test_a_range_reads_only_the_planes_it_needs(packed: Packed) -> None:
    asked: list[range] = []

    def read(at: int, count: int) -> bytes:
        asked.append(range(at, at + count))
        return packed.data[at : at + count]

    layout, shard = packed.sealed.layout, Shard(range(1, 2), range(2))
    spans = layout.shard_sections(shard)
    head = packed.data[: packed.layout.info_bytes]
    parts = {span: plain_range(head, span, packed.layout, packed.compressor, read) for span in spans}
    verify_shard(parts, layout, packed.sealed.chunk.key, packed.sealed.hasher, shard)
    lengths = packed.lengths()
    assert asked == [range(packed.layout.info_bytes + sum(lengths[:4]), len(packed.data))]


def test_whatever_bit_is_flipped_is_noticed(make_sealed: Make) -> None:
    """[M28] zstd ignores some bits of a frame: the object's own digest does not."""
    parts = (Part("k", 64), Part("v", 64))
    packed = Packed(make_sealed(Geometry(4, (Group("full", "full", (0, 2), 2, parts, "F16"),))))
    assert max(packed.lengths()) < packed.layout.plane_bytes, "all planes must be frames"
    data = bytearray(packed.data)
    start = packed.layout.data_start
    in_header = (8 * byte + byte % 8 for byte in range(start))  # compared byte for byte: one bit of each will do
    for bit in (*in_header, *range(8 * start, 8 * len(data))):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            packed.verify(data)
        data[bit // 8] ^= 1 << bit % 8
    packed.verify(data)


def test_truncation_at_every_byte_is_noticed(packed: Packed) -> None:
    """[M27] And what follows the content."""
    for length in range(len(packed.data)):
        assert packed.reason(packed.data[:length]) is Reason.TRUNCATED
    assert packed.reason(packed.data + b"\0") is Reason.TRAILING


def test_lengths_are_checked_before_anything_else(packed: Packed) -> None:
    """[M37] [M38] Zero, more than a plane has, and a length that the header does not have."""
    span = packed.layout.lengths_range(0)
    for value, reason in ((0, Reason.BAD_LENGTHS), (17, Reason.BAD_LENGTHS), (2**32 - 1, Reason.BAD_LENGTHS)):
        data = bytearray(packed.data)
        data[span.start : span.start + 4] = struct.pack("<I", value)
        assert packed.reason(data) is reason
    data[span.start : span.start + 4] = struct.pack("<I", 9)
    assert packed.reason(data) is Reason.BAD_SHAPE


class Never:
    """Fails where a plane is expanded."""

    def compress(self, data: bytes) -> bytes:
        raise AssertionError

    def expand(self, frame: memoryview, nbytes: int) -> bytes:
        raise AssertionError("expanded before the digest was checked")


def test_the_digest_is_checked_before_a_plane_is_expanded(make_sealed: Make) -> None:
    """[M39] With a secret the library sees only what somebody wrote who knows it."""
    packed = Packed(sealed_with_runs(make_sealed, digest=KEYED, secret=SECRET))
    forged = bytearray(packed.data)
    forged[-1] ^= 1
    assert packed.reason(forged, compressor=Never()) is Reason.DIGEST_MISMATCH
    other = make_hasher(KEYED, b"another secret of some length")
    assert packed.reason(packed.data, hasher=other, compressor=Never()) is Reason.DIGEST_MISMATCH


def hostile_planes() -> dict[str, bytes]:
    import zstandard

    plain = zstandard.ZstdCompressor(level=1)
    unsized = zstandard.ZstdCompressor(level=1, write_content_size=False)
    dictionary = zstandard.train_dictionary(1024, [bytes([i % 251, i % 7, i % 5] * 20) for i in range(500)])
    taught = zstandard.ZstdCompressor(level=1, dict_data=dictionary)
    zeros = plain.compress(bytes(4096))
    return {
        "another size": plain.compress(bytes(4095)),
        "no size": unsized.compress(bytes(4096)),
        "two frames": plain.compress(bytes(2048)) * 2,
        "bytes behind it": zeros + b"\0",
        "a frame behind it": zeros + plain.compress(b""),
        "cut": zeros[:-1],
        "a dictionary": taught.compress(bytes([1, 2, 3, 4] * 1024)),
        "no frame": b"\0\1\2\3\4\5\6\7\x08",
        "a skippable frame": b"\x50\x2a\x4d\x18" + struct.pack("<I", 4096) + bytes(60),
        # frame header: a content size of 8 bytes, no single segment, window of 2 GiB; content 2^60 bytes
        "a huge claim": b"\x28\xb5\x2f\xfd\xc0\xa8" + struct.pack("<Q", 2**60) + zeros[6:],
        "a huge window, cut": b"\x28\xb5\x2f\xfd\x40\xa8" + struct.pack("<H", 4096 - 256) + zeros[7:-1],
    }


@pytest.mark.parametrize("name", sorted(hostile_planes()))
def test_hostile_planes(make_sealed: Make, name: str) -> None:
    """[M37] [M38] Sealed by somebody who may: a typed error, and no memory but the object's."""
    group = Group("full", "full", (0,), 1, (Part("k", 64), Part("v", 64)), "U8")
    packed = Packed(make_sealed(Geometry(32, (group,))))
    plane = hostile_planes()[name]
    data = packed.rebuilt([len(plane)], plane)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert packed.reason(data) is Reason.BAD_PLANE
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10


def test_a_raw_plane_of_other_content_is_caught_by_the_cell_digests(packed: Packed) -> None:
    """[M40] Who writes right packed bytes around wrong cells gains nothing."""
    data = packed.rebuilt(packed.lengths(), bytes(sum(packed.lengths())))
    with pytest.raises(FormatError) as caught:
        packed.verify(data)
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    assert "head 0" in caught.value.detail


def test_objects_of_another_codec_are_refused_by_name(make_sealed: Make, packed: Packed) -> None:
    """[M41] In both directions."""
    sealed = packed.sealed
    assert packed.reason(sealed.buf) is Reason.WRONG_CODEC
    with pytest.raises(FormatError) as caught:
        verify(packed.data, sealed.layout, sealed.namespace, sealed.chunk.key, sealed.hasher)
    assert caught.value.reason is Reason.WRONG_CODEC
    unknown = bytearray(packed.data.replace(b"shuffle-zstd", b"shuffle-zstx", 1))
    assert packed.reason(unknown) is Reason.UNSUPPORTED_CODEC


def test_headers_for_something_else(make_sealed: Make, packed: Packed) -> None:
    """[M36]"""
    other = Packed(make_sealed(group_index=1))
    assert packed.reason(other.data) is Reason.WRONG_GROUP
    assert packed.reason(Packed(make_sealed(digest="blake3")).data) is Reason.WRONG_DIGEST
    ours, theirs = (Packed(make_sealed(digest=KEYED, secret=secret)) for secret in (SECRET, SECRET[::-1]))
    assert ours.reason(theirs.data) is Reason.WRONG_SECRET
    spaced = bytearray(packed.data)
    end = spaced.index(b"}}  ") + 2
    spaced[end - 1 : end + 1] = b" }"
    assert packed.reason(spaced) is Reason.BAD_HEADER
    assert packed.reason(b"x" * len(packed.data)) is Reason.TOO_LARGE
    assert packed.reason(b"") is Reason.TRUNCATED


def test_only_plain_objects_of_the_group_are_packed(make_sealed: Make, packed: Packed) -> None:
    sealed = packed.sealed
    for wrong in (sealed.buf[:-1], make_sealed(group_index=1).buf, bytes(len(sealed.buf))):
        with pytest.raises(FormatError) as caught:
            pack(wrong, packed.layout, sealed.hasher, packed.compressor)
        assert caught.value.reason is Reason.BAD_HEADER


def test_the_beginning_says_what_can_be_told_without_planes(packed: Packed) -> None:
    head = packed.data[: packed.layout.info_bytes]
    assert check_info(head, len(packed.data), packed.layout) == packed.lengths()
    for size, reason in ((len(packed.data) - 1, Reason.TRUNCATED), (len(packed.data) + 1, Reason.TRAILING)):
        with pytest.raises(FormatError) as caught:
            check_info(head, size, packed.layout)
        assert caught.value.reason is reason


def test_what_is_left_of_a_damaged_object_is_shown(runs: Packed) -> None:
    span = runs.sealed.layout.cell_range(0, 1)
    data = bytearray(runs.data)
    data[runs.layout.info_bytes + 18] ^= 1  # the first plane of head 0, second layer, is a run no more
    left = salvage(data, runs.layout, runs.compressor)
    assert left[: span.start] == runs.sealed.buf[: span.start]
    assert bytes(left[span.start : span.stop]) == bytes(32)
    assert left[span.stop :] == runs.sealed.buf[span.stop :]
    cut = salvage(data[:-1], runs.layout, runs.compressor)
    last = runs.sealed.layout.cell_range(1, 1)
    assert bytes(cut[last.start : last.stop]) == bytes(32)
    for short in (runs.data[: runs.layout.info_bytes - 1], b""):
        with pytest.raises(FormatError):
            salvage(short, runs.layout, runs.compressor)
    data[runs.layout.lengths_range(1).start] = 0
    with pytest.raises(FormatError) as caught:
        salvage(data, runs.layout, runs.compressor)
    assert caught.value.reason is Reason.BAD_LENGTHS


def test_the_header_has_room_for_any_lengths() -> None:
    """[M36] D follows from the geometry, whatever the planes' lengths are."""
    group = Group("full", "full", tuple(range(40)), 96, (Part("k", 128), Part("v", 128)), "BF16")
    layout = packed_layout(chunk_layout(Geometry(256, (group,)), 0, "xxh3-128"))
    count = 96 * 40 * 2
    for lengths in ([1] * count, [layout.plane_bytes] * count, [1 + i % layout.plane_bytes for i in range(count)]):
        assert len(layout.header(lengths)) == layout.data_start
    assert layout.data_start % 4096 == 0
    widest = Group("full", "full", (0,), 1024, (Part("k", 2**14),), "F32")
    assert packed_layout(chunk_layout(Geometry(4096, (widest,)), 0, "blake3")).data_start < 2**20
