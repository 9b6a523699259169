"""tplayout/format/encrypted.py: the bytes that aes-256-gcm stores, and everything that may not pass for them."""

import copy
import hashlib
import pickle
import struct
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
from blake3 import blake3
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load as load_safetensors

from tplayout.cache.codec import Gcm
from tplayout.errors import ConfigError, FormatError, GeometryError, Reason
from tplayout.format.chunk import seal, verify, verify_shard
from tplayout.format.digest import DIGEST_BYTES, KEYED, make_hasher
from tplayout.format.encrypted import check_info, check_stored, decrypt, encrypt, plain_beginning, plain_range, salvage
from tplayout.format.encrypted_layout import EncryptedLayout, encrypted_layout
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.keys import chain
from tplayout.format.layout import chunk_layout
from tplayout.format.packed import pack, packed_layout
from tplayout.format.sharding import Shard

Make = Callable[..., Any]
SECRET = b"a secret of some length"
KEY = EncryptionKey(bytes(range(32, 64)))
SALT = bytes(range(200, 232))

GOLDEN_HEADER = (
    b'{"__metadata__":{"chunk_tokens":"4","codec":"aes-256-gcm","digest":"xxh3-128",'
    b'"encryption_key_id":"KEY_ID","group":"{\\"dtype\\":\\"F16\\",'
    b'\\"heads\\":2,\\"kind\\":\\"full\\",\\"layers\\":[0,2],\\"name\\":\\"full\\",\\"parts\\":[{\\"dim\\":2,'
    b'\\"name\\":\\"k\\"},{\\"dim\\":2,\\"name\\":\\"v\\"}],\\"scales\\":null,\\"window\\":null}","group_index":"0",'
    b'"tplayout":"1"},"digest":{"dtype":"U8","shape":[16],"data_offsets":[0,16]},'
    b'"salt":{"dtype":"U8","shape":[32],"data_offsets":[16,48]},'
    b'"ids":{"dtype":"U8","shape":[160],"data_offsets":[48,208]},'
    b'"h0.digests":{"dtype":"U8","shape":[2,16],"data_offsets":[208,240]},'
    b'"h0.sealed":{"dtype":"U8","shape":[2,48],"data_offsets":[240,336]},'
    b'"h1.digests":{"dtype":"U8","shape":[2,16],"data_offsets":[336,368]},'
    b'"h1.sealed":{"dtype":"U8","shape":[2,48],"data_offsets":[368,464]}}'
)
GOLDEN_KEY_ID = "12e1c906cf5ec051"
GOLDEN_SHA256 = {
    "xxh3-128": "8406038853eab0500c46e2574460ab615d29ae82e8667fc0ae587068e5a31ed6",
    "blake3": "c6cf061c56f881bfb7e8f64219f239f64b5c11751301f8f9ccfaa5aae94f006c",
    KEYED: "6915346a23390da12d34064cb6c831cc93255bd6a0aa1e1d1455097c3eb114b9",
}


class Encrypted:
    """A sealed object and its encrypted bytes."""

    def __init__(self, sealed: Any, key: EncryptionKey = KEY, salt: bytes = SALT) -> None:
        self.sealed = sealed
        self.key = key
        self.layout: EncryptedLayout = encrypted_layout(sealed.layout, key.id)
        self.data = bytes(encrypt(sealed.buf, self.layout, sealed.chunk.key, key, salt, sealed.hasher, Gcm))

    def decrypt(self, data: Any, **changes: Any) -> memoryview:
        fields = {
            "layout": self.layout,
            "chunk_key": self.sealed.chunk.key,
            "key": self.key,
            "hasher": self.sealed.hasher,
            "cipher": Gcm,
            **changes,
        }
        return decrypt(data, **fields)

    def verify(self, data: Any) -> None:
        """What a reader does with a whole object."""
        sealed = self.sealed
        verify(self.decrypt(data), sealed.layout, sealed.namespace, sealed.chunk.key, sealed.hasher)

    def reason(self, data: Any, **changes: Any) -> Reason:
        with pytest.raises(FormatError) as caught:
            self.decrypt(data, **changes)
        return caught.value.reason

    def unkeyed_reason(self, data: Any) -> Reason:
        """What somebody without the key finds wrong."""
        with pytest.raises(FormatError) as caught:
            check_stored(data, self.layout, self.sealed.chunk.key, self.sealed.hasher)
        return caught.value.reason

    def swapped(self, one: range, other: range) -> bytearray:
        data = bytearray(self.data)
        data[one.start : one.stop] = self.data[other.start : other.stop]
        data[other.start : other.stop] = self.data[one.start : one.stop]
        return data


@pytest.fixture
def encrypted(make_sealed: Make) -> Encrypted:
    return Encrypted(make_sealed())


def test_golden_header(encrypted: Encrypted) -> None:
    """[M42] Byte for byte; the length field makes the data begin at 4096."""
    assert encrypted.data[:8] == struct.pack("<Q", 4088)
    assert encrypted.data[8:4096].rstrip(b" ") == GOLDEN_HEADER.replace(b"KEY_ID", KEY.id.encode())


@pytest.mark.parametrize("digest", sorted(DIGEST_BYTES))
def test_golden_objects(make_sealed: Make, digest: str) -> None:
    """[M42] With one salt everything is fixed: another hash here is another format."""
    encrypted = Encrypted(make_sealed(digest=digest, secret=SECRET if digest == KEYED else None))
    assert KEY.id == GOLDEN_KEY_ID
    assert hashlib.sha256(encrypted.data).hexdigest() == GOLDEN_SHA256[digest]


def derived(context: str, *parts: bytes) -> bytes:
    return blake3(b"".join(parts), derive_key_context=context).digest()


def test_every_byte_is_where_the_table_says(encrypted: Encrypted) -> None:
    """[M42] [M44] [M45] The whole object, rebuilt from FORMAT.md's section 13 without our code's offsets."""
    sealed = encrypted.sealed
    key, chunk_key = bytes(range(32, 64)), sealed.chunk.key
    cells = {
        (head, layer): bytes(sealed.buf[span.start : span.stop])
        for head in (0, 1)
        for row, layer in enumerate((0, 2))
        for span in [sealed.layout.cell_range(head, row)]
    }
    aead = AESGCM(derived("tplayout 1 object encryption", key, SALT, chunk_key, struct.pack("<I", 0)))

    def where(head: int, layer: int) -> bytes:
        return b"tplayout1 cell\0\0" + chunk_key + struct.pack("<III", head, layer, 4) + b"full"

    def digest(head: int, layer: int, data: bytes) -> bytes:
        return sealed.hasher.cell(chunk_key, "full", head, layer, memoryview(data))

    ids = struct.pack("<4i", 1, 2, 3, 4) + bytes(32) + sealed.chunk.extras
    ids += b"".join(digest(head, layer, cell) for (head, layer), cell in cells.items())
    none = 2**32 - 1
    sealed_ids = aead.encrypt((0).to_bytes(12, "little"), ids, where(none, none))
    wanted = digest(none, none, SALT + sealed_ids) + SALT + sealed_ids
    number = 0
    for head in (0, 1):
        digests, stored = b"", b""
        for layer in (0, 2):
            number += 1
            own = aead.encrypt(number.to_bytes(12, "little"), cells[head, layer], where(head, layer))
            digests += digest(head, layer + 2**31, own)
            stored += own
        wanted += digests + stored
    assert encrypted.data[4096:] == wanted
    assert derived("tplayout 1 encryption key id", key)[:8].hex() == KEY.id


def test_any_safetensors_reader_reads_it(encrypted: Encrypted) -> None:
    tensors = load_safetensors(encrypted.data)
    assert tensors["salt"].tobytes() == SALT
    assert list(tensors["h1.sealed"].shape) == [2, 48]


def test_what_is_decrypted_is_what_was_encrypted(make_sealed: Make) -> None:
    for digest in DIGEST_BYTES:
        encrypted = Encrypted(make_sealed(digest=digest, secret=SECRET if digest == KEYED else None))
        assert len(encrypted.data) == encrypted.layout.nbytes
        assert encrypted.decrypt(encrypted.data) == encrypted.sealed.buf
        assert encrypted.decrypt(encrypted.data, hasher=None) == encrypted.sealed.buf
        out = memoryview(bytearray(b"\xaa" * (encrypted.sealed.layout.nbytes + 10)))
        assert encrypted.decrypt(encrypted.data, out=out) == encrypted.sealed.buf
        assert out[-10:] == b"\xaa" * 10
        encrypted.verify(encrypted.data)


@st.composite
def geometries(draw: st.DrawFn) -> Geometry:
    dims = draw(st.lists(st.integers(1, 9), min_size=1, max_size=3))
    group = Group(
        "g",
        draw(st.sampled_from(["full", "latent", "state"])),
        tuple(range(draw(st.integers(1, 3)))),
        draw(st.integers(1, 3)),
        tuple(Part(f"p{i}", dim) for i, dim in enumerate(dims)),
        draw(st.sampled_from(["F32", "F16", "BF16", "F8_E4M3", "F8_E5M2", "U8"])),
    )
    return Geometry(draw(st.integers(1, 9)), (group,))


@settings(deadline=None, max_examples=100)
@given(geometries(), st.sampled_from(sorted(DIGEST_BYTES)), st.integers(0, 2**32))
def test_round_trips(geometry: Geometry, digest: str, seed: int) -> None:
    """[M44] Any geometry and dtype; and any byte range of the plain object."""
    random = Random(seed)
    hasher = make_hasher(digest, SECRET if digest == KEYED else None)
    layout = chunk_layout(geometry, 0, hasher.name, hasher.key_id)
    buf = bytearray(random.randbytes(layout.nbytes))
    chunk = chain(bytes(32), range(geometry.chunk_tokens), geometry.chunk_tokens)[0]
    seal(buf, layout, bytes(32), chunk, hasher)
    own = encrypted_layout(layout, KEY.id)
    data = bytes(encrypt(buf, own, chunk.key, KEY, random.randbytes(32), hasher, Gcm))
    assert decrypt(data, own, chunk.key, KEY, hasher, Gcm) == buf
    assert salvage(data, own, chunk.key, KEY, Gcm) == buf
    check_stored(data, own, chunk.key, hasher)
    head = data[: own.info_bytes]
    check_info(head, len(data), own)
    assert plain_beginning(head, own, chunk.key, KEY, Gcm) == buf[: layout.sections]
    for _ in range(10):
        start = random.randrange(layout.nbytes)
        span = range(start, random.randrange(start, layout.nbytes) + 1)
        found = plain_range(span, own, chunk.key, KEY, Gcm, lambda at, count: data[at : at + count])
        assert found == buf[span.start : span.stop]


def test_a_range_reads_only_the_cells_it_needs(encrypted: Encrypted) -> None:
    asked: list[range] = []

    def read(at: int, count: int) -> bytes:
        asked.append(range(at, at + count))
        return encrypted.data[at : at + count]

    layout, shard = encrypted.sealed.layout, Shard(range(1, 2), range(2))
    key = encrypted.sealed.chunk.key
    parts = {span: plain_range(span, encrypted.layout, key, KEY, Gcm, read) for span in layout.shard_sections(shard)}
    verify_shard(parts, layout, key, encrypted.sealed.hasher, shard)
    cells = range(encrypted.layout.sealed_range(2).start, len(encrypted.data))
    assert asked == [range(encrypted.layout.info_bytes), cells]


def test_a_range_of_changed_bytes_is_refused(encrypted: Encrypted) -> None:
    """[M44] Where no digest of what is stored is looked at, tags are."""
    places = {
        "salt": encrypted.layout.salt_range,
        "ids": encrypted.layout.ids_range,
        "a cell": encrypted.layout.sealed_range(2),
    }
    span = encrypted.sealed.layout.cell_range(1, 0)
    for place in places.values():
        for at in (place.start, place.stop - 1):
            data = bytearray(encrypted.data)
            data[at] ^= 1
            with pytest.raises(FormatError) as caught:
                plain_range(
                    span,
                    encrypted.layout,
                    encrypted.sealed.chunk.key,
                    KEY,
                    Gcm,
                    lambda at, count, data=data: bytes(data[at : at + count]),
                )
            assert caught.value.reason is Reason.BAD_TAG


def test_whatever_bit_is_flipped_is_noticed(encrypted: Encrypted) -> None:
    """[M28] [M44] [M45] With the key, and without it too."""
    data = bytearray(encrypted.data)
    start = len(encrypted.layout.header)
    in_header = (8 * byte + byte % 8 for byte in range(start))  # compared byte for byte: one bit of each will do
    for bit in (*in_header, *range(8 * start, 8 * len(data))):
        data[bit // 8] ^= 1 << bit % 8
        with pytest.raises(FormatError):
            encrypted.verify(data)
        with pytest.raises(FormatError):
            check_stored(data, encrypted.layout, encrypted.sealed.chunk.key, encrypted.sealed.hasher)
        if not in_digests(encrypted, bit // 8):
            with pytest.raises(FormatError):
                encrypted.decrypt(data, hasher=None)
        data[bit // 8] ^= 1 << bit % 8
    encrypted.verify(data)


def in_digests(encrypted: Encrypted, byte: int) -> bool:
    """Whether a byte is of a digest of stored bytes, which is nobody's who has no hasher."""
    layout = encrypted.layout
    return byte in layout.info_digest_range or any(byte in layout.digest_range(cell) for cell in range(layout.cells))


def test_truncation_at_every_byte_is_noticed(encrypted: Encrypted) -> None:
    """[M27] And what follows the content; without the key too."""
    for length in range(len(encrypted.data)):
        assert encrypted.reason(encrypted.data[:length]) is Reason.TRUNCATED
        assert encrypted.unkeyed_reason(encrypted.data[:length]) is Reason.TRUNCATED
    assert encrypted.reason(encrypted.data + b"\0") is Reason.TRAILING


def test_swapped_cells_are_refused(encrypted: Encrypted) -> None:
    """[M44] By the digests; and by the tags, where somebody has made digests that fit."""
    layout = encrypted.layout
    for one, other in ((0, 1), (0, 2), (1, 3)):
        data = encrypted.swapped(layout.sealed_range(one), layout.sealed_range(other))
        assert encrypted.reason(data) is Reason.DIGEST_MISMATCH
        assert encrypted.unkeyed_reason(data) is Reason.DIGEST_MISMATCH
        assert encrypted.reason(data, hasher=None) is Reason.BAD_TAG
        forged = forge(encrypted, data)
        check_stored(forged, layout, encrypted.sealed.chunk.key, encrypted.sealed.hasher)
        assert encrypted.reason(forged) is Reason.BAD_TAG


def forge(encrypted: Encrypted, data: bytearray) -> bytearray:
    """With digests that fit: there is no secret, so anybody can."""
    layout, view = encrypted.layout, memoryview(data)
    for cell in range(layout.cells):
        head, layer = layout.coordinates(cell)
        span, table = layout.sealed_range(cell), layout.digest_range(cell)
        own = view[span.start : span.stop]
        digest = encrypted.sealed.hasher.cell(encrypted.sealed.chunk.key, "full", head, layer + 2**31, own)
        view[table.start : table.stop] = digest
    return data


def test_cells_of_another_writing_are_refused(encrypted: Encrypted) -> None:
    """[M43] [M44] The same chunk, written with another salt: its cells do not fit, its whole object does."""
    again = Encrypted(encrypted.sealed, salt=bytes(32))
    span = encrypted.layout.sealed_range(1)
    data = bytearray(encrypted.data)
    data[span.start : span.stop] = again.data[span.start : span.stop]
    assert encrypted.reason(forge(encrypted, data)) is Reason.BAD_TAG
    encrypted.verify(again.data)
    body = len(encrypted.layout.header)
    assert sum(a == b for a, b in zip(again.data[body:], encrypted.data[body:], strict=True)) < 20


def test_an_object_under_another_name_is_refused(encrypted: Encrypted) -> None:
    """[M26] [M44] The name's key is in the object's key and in every digest."""
    assert encrypted.reason(encrypted.data, chunk_key=bytes(32)) is Reason.DIGEST_MISMATCH
    assert encrypted.reason(encrypted.data, chunk_key=bytes(32), hasher=None) is Reason.BAD_TAG
    with pytest.raises(FormatError) as caught:
        check_stored(encrypted.data, encrypted.layout, bytes(32), encrypted.sealed.hasher)
    assert caught.value.reason is Reason.DIGEST_MISMATCH


def test_another_key_is_refused_by_name(encrypted: Encrypted, make_sealed: Make) -> None:
    """[M47] And where the id is forged, by the tags."""
    other = EncryptionKey(bytes(32))
    theirs = Encrypted(make_sealed(), key=other)
    assert encrypted.reason(theirs.data) is Reason.WRONG_ENCRYPTION_KEY
    renamed = bytearray(theirs.data)
    renamed[: len(encrypted.layout.header)] = encrypted.layout.header
    assert encrypted.reason(renamed) is Reason.BAD_TAG


def test_objects_of_another_codec_are_refused_by_name(encrypted: Encrypted) -> None:
    """[M41] [M47] In all directions."""
    sealed = encrypted.sealed

    class Raw:
        def compress(self, data: bytes) -> bytes:
            return data + b"!"

        def expand(self, frame: memoryview, nbytes: int) -> bytes:
            raise AssertionError

    packed = packed_layout(sealed.layout)
    assert encrypted.reason(sealed.buf) is Reason.WRONG_CODEC
    assert encrypted.reason(pack(sealed.buf, packed, sealed.hasher, Raw())) is Reason.WRONG_CODEC
    with pytest.raises(FormatError) as caught:
        verify(encrypted.data, sealed.layout, sealed.namespace, sealed.chunk.key, sealed.hasher)
    assert caught.value.reason is Reason.WRONG_CODEC


def test_headers_for_something_else(make_sealed: Make, encrypted: Encrypted) -> None:
    """[M42]"""
    assert encrypted.reason(Encrypted(make_sealed(group_index=1)).data) is Reason.WRONG_GROUP
    assert encrypted.reason(Encrypted(make_sealed(digest="blake3")).data) is Reason.WRONG_DIGEST
    ours, theirs = (Encrypted(make_sealed(digest=KEYED, secret=secret)) for secret in (SECRET, SECRET[::-1]))
    assert ours.reason(theirs.data) is Reason.WRONG_SECRET
    spaced = bytearray(encrypted.data)
    end = spaced.index(b"}}  ") + 2
    spaced[end - 1 : end + 1] = b" }"
    assert encrypted.reason(spaced) is Reason.BAD_HEADER
    for id_ in (b"x" * 16, b"0" * 8 + b'"\\n"'.ljust(8, b"0")):
        assert encrypted.reason(encrypted.data.replace(KEY.id.encode(), id_)) in (
            Reason.BAD_METADATA,
            Reason.NOT_JSON,
        )
    assert encrypted.reason(b"x" * len(encrypted.data)) is Reason.TOO_LARGE


def test_forged_stored_bytes_are_found_without_the_key_where_there_is_a_secret(make_sealed: Make) -> None:
    """[M45] Digests of what is stored are keyed like all others."""
    encrypted = Encrypted(make_sealed(digest=KEYED, secret=SECRET))
    forger = Encrypted(make_sealed(digest=KEYED, secret=SECRET[::-1]))
    data = bytearray(forger.data)
    data[: len(encrypted.layout.header)] = encrypted.layout.header
    assert encrypted.unkeyed_reason(data) is Reason.DIGEST_MISMATCH
    check_stored(encrypted.data, encrypted.layout, encrypted.sealed.chunk.key, None)  # header and size only


def test_nothing_plain_is_left(encrypted: Encrypted) -> None:
    """[M46] Neither ids nor cells nor the key."""
    sealed = encrypted.sealed
    plain = [struct.pack("<4i", 1, 2, 3, 4), sealed.chunk.extras, bytes(range(32, 64)), KEY.reveal().encode()]
    for head in range(2):
        for row in range(2):
            span = sealed.layout.cell_range(head, row)
            plain.append(bytes(sealed.buf[span.start : span.stop]))
            digest = sealed.layout.digest_range(head, row)
            plain.append(bytes(sealed.buf[digest.start : digest.stop]))
    for text in plain:
        assert text not in encrypted.data
        for start in range(0, len(text) - 8, 4):
            assert text[start : start + 8] not in encrypted.data


def test_only_plain_objects_of_the_group_are_encrypted(make_sealed: Make, encrypted: Encrypted) -> None:
    sealed = encrypted.sealed
    for wrong in (sealed.buf[:-1], make_sealed(group_index=1).buf, bytes(len(sealed.buf))):
        with pytest.raises(FormatError) as caught:
            encrypt(wrong, encrypted.layout, sealed.chunk.key, KEY, SALT, sealed.hasher, Gcm)
        assert caught.value.reason is Reason.BAD_HEADER


def test_what_is_left_of_a_damaged_object_is_shown(encrypted: Encrypted) -> None:
    """[M44] Lost cells are zeros: what does not authenticate is not shown either."""
    lost = encrypted.layout.sealed_range(1)
    data = bytearray(encrypted.data)
    data[lost.start] ^= 1
    key, plain = encrypted.sealed.chunk.key, encrypted.sealed.layout.cell_range(0, 1)
    left = salvage(data, encrypted.layout, key, KEY, Gcm)
    assert left[: plain.start] == encrypted.sealed.buf[: plain.start]
    assert bytes(left[plain.start : plain.stop]) == bytes(32)
    assert left[plain.stop :] == encrypted.sealed.buf[plain.stop :]
    last = encrypted.sealed.layout.cell_range(1, 1)
    cut = salvage(encrypted.data[:-1], encrypted.layout, key, KEY, Gcm)
    assert bytes(cut[last.start : last.stop]) == bytes(32)
    data[encrypted.layout.ids_range.start] ^= 1
    for broken, reason in ((data, Reason.BAD_TAG), (data[: encrypted.layout.info_bytes - 1], Reason.TRUNCATED)):
        with pytest.raises(FormatError) as caught:
            salvage(broken, encrypted.layout, key, KEY, Gcm)
        assert caught.value.reason is reason


def test_cells_that_no_library_seals_are_refused() -> None:
    """[M48]"""
    for dim, fits in ((2**13, False), (2**13 - 1, True)):
        group = Group("g", "full", (0,), 1, (Part("k", 2**14), Part("v", 2**14 - (2**13 - dim))), "U8")
        layout = chunk_layout(Geometry(2**16, (group,)), 0, "xxh3-128")
        assert (layout.cell_bytes + 16 < 2**31) is fits
        if fits:
            assert encrypted_layout(layout, KEY.id).cells == 1
            continue
        with pytest.raises(GeometryError, match="smaller chunks"):
            encrypted_layout(layout, KEY.id)


@pytest.mark.parametrize("length", [0, 16, 31, 33, 64])
def test_keys_have_32_bytes(length: int) -> None:
    """[M46]"""
    with pytest.raises(ConfigError, match="32"):
        EncryptionKey(bytes(length))


def test_keys_are_64_hex_digits_as_text() -> None:
    assert EncryptionKey.parse(b"\n20" + bytes(range(33, 64)).hex().encode() + b"\n", "a file").id == KEY.id
    assert EncryptionKey.parse(KEY.reveal().upper().encode(), "a file").id == KEY.id
    for text in (b"", b"20" * 31, b"20" * 33, b"zz" * 32, b"\xff" * 64, b" ".join([b"20" * 8] * 4)[:64], bytes(32)):
        with pytest.raises(ConfigError, match=r"^the file holds no encryption key, .* openssl rand -hex 32") as caught:
            EncryptionKey.parse(text, "the file")
        assert b"20" not in str(caught.value).encode().replace(b"openssl", b"")


def test_keys_show_in_nothing() -> None:
    """[M46]"""
    for text in (repr(KEY), str(KEY), f"{KEY!r}"):
        assert text == f"<encryption key {GOLDEN_KEY_ID}>"
    for duplicate in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled"):
            duplicate(KEY)
