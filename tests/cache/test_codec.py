"""tplayout/cache/codec.py: codecs by name, zstd frames, and what is said where zstandard is missing."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tplayout.cache.codec import Plain, ShuffleZstd, Zstd, make_codec, require
from tplayout.errors import ConfigError, FormatError, Reason
from tplayout.format.chunk import seal
from tplayout.format.digest import make_hasher
from tplayout.format.keys import chain
from tplayout.format.layout import CODECS, ChunkLayout, chunk_layout


def test_each_codec_has_its_class() -> None:
    assert {name: type(make_codec(name, make_hasher())) for name in CODECS} == {
        "none": Plain,
        "shuffle-zstd": ShuffleZstd,
    }
    with pytest.raises(FormatError) as caught:
        make_codec("gzip", None)
    assert caught.value.reason is Reason.UNSUPPORTED_CODEC
    with pytest.raises(ConfigError, match="none, shuffle-zstd"):
        require("gzip")


@pytest.mark.parametrize("name", CODECS)
def test_codecs_agree_about_plain_objects(kit: Any, name: str) -> None:
    hasher = make_hasher()
    geometry = kit.identity(kit.group()).geometry
    layout: ChunkLayout = chunk_layout(geometry, 0, hasher.name)
    buf = bytearray(layout.nbytes)
    seal(buf, layout, bytes(32), chain(bytes(32), range(4), 4)[0], hasher)
    codec = make_codec(name, hasher)
    stored = codec.pack(buf, layout)
    assert codec.unpack(stored, layout) == buf
    assert codec.salvage(stored, layout) == buf
    assert len(stored) in codec.sizes(layout)
    head = bytes(stored)[: codec.info_bytes(layout)]
    assert codec.beginning(head, len(stored), layout) == (buf[: layout.sections], layout.nbytes)


def test_a_codec_for_reading_writes_nothing(kit: Any) -> None:
    layout = chunk_layout(kit.identity(kit.group()).geometry, 0, "xxh3-128")
    with pytest.raises(AssertionError, match="for reading"):
        make_codec("shuffle-zstd", None).pack(bytes(layout.nbytes), layout)


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


def test_the_library_is_imported_only_where_it_is_needed() -> None:
    modules = "tplayout.staging.io_process, tplayout.admin.verify, tplayout.cache"
    code = f"import sys, {modules}; print('zstandard' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"
