"""tplayout/cache/codec.py: codecs by name, zstd frames, AES-GCM, keys, and what is said where a library is missing."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tplayout.cache.codec import (
    Aes256Gcm,
    Codec,
    Gcm,
    Plain,
    ShuffleZstd,
    Zstd,
    begun_codec,
    check_key,
    make_codec,
    require,
)
from tplayout.errors import ConfigError, FormatError, Reason
from tplayout.format.chunk import seal
from tplayout.format.digest import CellHasher, make_hasher
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.keys import ChunkId, chain
from tplayout.format.layout import CODECS, ChunkLayout, chunk_layout

KEY, OTHER = EncryptionKey(bytes(32)), EncryptionKey(bytes(range(32)))


def codec_of(name: str, hasher: Any) -> Codec:
    return make_codec(name, hasher, KEY.id, KEY) if name == "aes-256-gcm" else make_codec(name, hasher)


def test_each_codec_has_its_class() -> None:
    assert {name: type(codec_of(name, make_hasher())) for name in CODECS} == {
        "none": Plain,
        "shuffle-zstd": ShuffleZstd,
        "aes-256-gcm": Aes256Gcm,
    }
    with pytest.raises(FormatError) as caught:
        make_codec("gzip", None)
    assert caught.value.reason is Reason.UNSUPPORTED_CODEC
    with pytest.raises(ConfigError, match="none, shuffle-zstd, aes-256-gcm"):
        require("gzip")


@pytest.mark.parametrize("name", CODECS)
def test_codecs_agree_about_plain_objects(kit: Any, name: str) -> None:
    hasher = make_hasher()
    geometry = kit.identity(kit.group()).geometry
    layout: ChunkLayout = chunk_layout(geometry, 0, hasher.name)
    buf = bytearray(layout.nbytes)
    chunk = chain(bytes(32), range(4), 4)[0]
    seal(buf, layout, bytes(32), chunk, hasher)
    codec = codec_of(name, hasher)
    stored = bytes(codec.pack(buf, layout, chunk.key))
    assert codec.unpack(stored, layout, chunk.key) == buf
    out = memoryview(bytearray(layout.nbytes + 3))
    assert codec.unpack(stored, layout, chunk.key, out) == buf
    assert out == buf + bytes(3)
    assert codec.salvage(stored, layout, chunk.key) == buf
    assert len(stored) in codec.sizes(layout)
    assert len(stored) <= codec.most_bytes(layout)
    head = stored[: codec.info_bytes(layout)]
    assert codec.beginning(head, len(stored), layout, chunk.key) == (buf[: layout.sections], layout.nbytes)
    for span in (range(layout.nbytes), layout.tokens_range, layout.cell_range(1, 1)):
        found = codec.plain_range(span, layout, chunk.key, lambda at, count: stored[at : at + count])
        assert found == buf[span.start : span.stop]


def test_a_codec_for_reading_writes_nothing(kit: Any) -> None:
    layout = chunk_layout(kit.identity(kit.group()).geometry, 0, "xxh3-128")
    with pytest.raises(AssertionError, match="for reading"):
        make_codec("shuffle-zstd", None).pack(bytes(layout.nbytes), layout, bytes(32))
    with pytest.raises(AssertionError, match="for reading"):
        make_codec("aes-256-gcm", None, KEY.id, KEY).pack(bytes(layout.nbytes), layout, bytes(32))


def test_frames_from_many_threads() -> None:
    """The library's contexts are not made for that; each thread has its own."""
    zstd = Zstd()
    planes = [bytes([i % 7]) * 5000 + bytes(range(256)) for i in range(200)]

    def there_and_back(plane: bytes) -> bool:
        frame = zstd.compress(plane)
        return len(frame) < len(plane) and zstd.expand(memoryview(frame), len(plane)) == plane

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(there_and_back, planes))


def test_a_frame_of_another_size_is_refused() -> None:
    zstd = Zstd()
    frame = memoryview(zstd.compress(bytes(100)))
    for nbytes in (99, 101):
        with pytest.raises(FormatError) as caught:
            zstd.expand(frame, nbytes)
        assert caught.value.reason is Reason.BAD_PLANE


def test_without_the_library_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    require("none")
    for call in (
        lambda: require("shuffle-zstd"),
        lambda: Zstd().compress(b"x"),
        lambda: Zstd().expand(memoryview(b"x"), 1),
    ):
        with pytest.raises(ConfigError, match=r"pip install 'tplayout\[zstd\]'"):
            call()


def test_without_the_cipher_s_library_the_way_out_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    require("none")
    require("shuffle-zstd")
    for call in (lambda: require("aes-256-gcm"), lambda: Gcm(bytes(32))):
        with pytest.raises(ConfigError, match=r"pip install 'tplayout\[encrypt\]'"):
            call()


def sealed(kit: Any, hasher: CellHasher) -> tuple[ChunkLayout, bytearray, ChunkId]:
    """An object, and how it is laid out and which chunk it is."""
    layout = chunk_layout(kit.identity(kit.group()).geometry, 0, hasher.name)
    buf = bytearray(layout.nbytes)
    chunk = chain(bytes(32), range(4), 4)[0]
    seal(buf, layout, bytes(32), chunk, hasher)
    return layout, buf, chunk


def test_each_writing_has_a_salt_of_its_own(kit: Any) -> None:
    """[M43] The same object twice: nothing behind the header is equal."""
    hasher = make_hasher()
    layout, buf, chunk = sealed(kit, hasher)
    codec = Aes256Gcm(hasher, KEY.id, KEY)
    salt = codec.layout(layout).salt_range
    stored = [bytes(codec.pack(buf, layout, chunk.key)) for _ in range(100)]
    assert len({one[salt.start : salt.stop] for one in stored}) == 100
    assert len({one[-16:] for one in stored}) == 100


def test_without_the_key_only_what_is_stored_is_looked_at(kit: Any) -> None:
    """[M45] [M47]"""
    hasher = make_hasher()
    layout, buf, chunk = sealed(kit, hasher)
    stored = bytearray(Aes256Gcm(hasher, KEY.id, KEY).pack(buf, layout, chunk.key))
    blind = Aes256Gcm(hasher, KEY.id, None)
    assert blind.closed is blind
    assert Aes256Gcm(hasher, KEY.id, KEY).closed is None
    blind.check(stored, layout, chunk.key)
    blind.check_head(stored[: blind.info_bytes(layout)], len(stored), layout)
    for call in (blind.unpack, blind.pack, blind.salvage):
        with pytest.raises(FormatError) as caught:
            call(stored, layout, chunk.key)
        assert caught.value.reason is Reason.WRONG_ENCRYPTION_KEY
        assert KEY.id in str(caught.value)
    stored[-1] ^= 1
    with pytest.raises(FormatError) as caught:
        blind.check(stored, layout, chunk.key)
    assert caught.value.reason is Reason.DIGEST_MISMATCH


@pytest.mark.parametrize(
    ("codec", "key", "begun"),
    [
        (None, None, "none"),
        (None, KEY, "aes-256-gcm"),
        ("aes-256-gcm", KEY, "aes-256-gcm"),
        ("shuffle-zstd", None, "shuffle-zstd"),
        ("none", None, "none"),
    ],
)
def test_what_is_begun_follows_from_the_key(codec: str | None, key: EncryptionKey | None, begun: str) -> None:
    assert begun_codec(codec, key) == begun


@pytest.mark.parametrize(("codec", "key"), [("aes-256-gcm", None), ("none", KEY), ("shuffle-zstd", KEY)])
def test_a_key_and_a_codec_that_do_not_go_together_are_refused(codec: str, key: EncryptionKey | None) -> None:
    with pytest.raises(ConfigError, match="encrypt"):
        begun_codec(codec, key)


@pytest.mark.parametrize(
    ("stated", "key", "words"),
    [(None, KEY, "takes no encryption key"), (KEY.id, None, "none is given"), (KEY.id, OTHER, f"{OTHER.id} is given")],
)
def test_another_key_is_refused_by_name(stated: str | None, key: EncryptionKey | None, words: str) -> None:
    """[M47] In every direction."""
    with pytest.raises(FormatError, match=words) as caught:
        check_key("a-codec", stated, key)
    assert caught.value.reason is Reason.WRONG_ENCRYPTION_KEY
    check_key("a-codec", None if key is None else key.id, key)


def test_the_library_is_imported_only_where_it_is_needed() -> None:
    modules = "tplayout.staging.io_process, tplayout.admin.verify, tplayout.cache"
    code = f"import sys, {modules}; print([m for m in ('zstandard', 'cryptography') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
