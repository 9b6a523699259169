"""The generic fsspec path: publishing by rename, backends that hang, and the errors of their libraries."""

from __future__ import annotations

import errno
import threading
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from fsspec import AbstractFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from s3fs import S3FileSystem
from scripted_s3 import ScriptedS3, hang

from tplayout.errors import Forbidden, NotFound, StorageError, StorageFull, StorageTimeout, Unavailable
from tplayout.storage.generic import GenericStore, _modified
from tplayout.storage.redact import Scrubber


class Remote(MemoryFileSystem):  # type: ignore[misc]
    """A file server in memory: files are written in place, and there is a rename. `fail` breaks one method."""

    protocol = "remote"
    cachable = False
    made = 0

    def __init__(self, store: dict[str, Any], fail: dict[str, Any]) -> None:
        super().__init__()
        self.store, self.pseudo_dirs, self.fail = store, [""], fail
        Remote.made += 1

    def _maybe(self, name: str) -> None:
        problem = self.fail.get(name)
        if isinstance(problem, threading.Event):
            problem.wait(30)
        elif problem is not None:
            raise problem

    def cat_file(self, path: str, **kwargs: Any) -> bytes:
        self._maybe("cat_file")
        return super().cat_file(path, **kwargs)

    def pipe_file(self, path: str, value: bytes, **kwargs: Any) -> None:
        super().pipe_file(path, value[: len(value) // 2])  # what a reader sees in mid-write
        self._maybe("pipe_file")
        super().pipe_file(path, value)

    def mv(self, path1: str, path2: str, **kwargs: Any) -> None:
        self._maybe("mv")
        self.store[path2] = self.store.pop(path1)

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        self._maybe("info")
        return super().info(path)


@pytest.fixture
def fail() -> Iterator[dict[str, Any]]:
    problems: dict[str, Any] = {}
    yield problems
    for problem in problems.values():
        if isinstance(problem, threading.Event):
            problem.set()


@pytest.fixture
def contents() -> dict[str, Any]:
    return {}


@pytest.fixture
def store(contents: dict[str, Any], fail: dict[str, Any]) -> GenericStore:
    return GenericStore("remote://host/kv", lambda: Remote(contents, fail), "/kv", "remote", Scrubber({}))


def test_a_write_that_breaks_off_is_not_visible(
    store: GenericStore, contents: dict[str, Any], fail: dict[str, Any]
) -> None:
    store.put("ns/k", b"old content")
    fail["pipe_file"] = ConnectionResetError("gone")
    with pytest.raises(Unavailable, match="ns/k"):
        store.put("ns/k", b"new content")
    assert store.get("ns/k") == b"old content"
    assert list(contents) == ["/kv/ns/k"]


def test_a_lost_race_is_success(store: GenericStore, contents: dict[str, Any], fail: dict[str, Any]) -> None:
    store.put("ns/k", b"content")
    fail["mv"] = OSError(errno.EEXIST, "exists")
    store.put("ns/k", b"content")
    assert list(contents) == ["/kv/ns/k"]


def test_a_rename_that_fails_leaves_nothing(
    store: GenericStore, contents: dict[str, Any], fail: dict[str, Any]
) -> None:
    fail["mv"] = OSError(errno.EIO, "broken")
    with pytest.raises(Unavailable):
        store.put("ns/k", b"content")
    assert list(contents) == []


def test_a_backend_that_hangs(store: GenericStore, fail: dict[str, Any]) -> None:
    store.put("k", b"content")
    made = Remote.made
    hung = fail["cat_file"] = threading.Event()
    buf = bytearray(7)
    start = time.monotonic()
    with pytest.raises(StorageTimeout, match=r"0\.1 s"):
        store.get_into("k", buf, deadline=0.1)
    assert time.monotonic() - start < 5  # the deadline, and what a busy machine may add
    del fail["cat_file"]
    assert store.get("k", deadline=5) == b"content"  # on a new connection: the old one still hangs
    assert Remote.made == made + 1
    hung.set()
    time.sleep(0.05)
    assert buf == bytes(7)


def test_connecting_may_hang_too() -> None:
    release = threading.Event()

    def connect() -> AbstractFileSystem:
        release.wait(30)
        return MemoryFileSystem()

    store = GenericStore("remote://h", connect, "/x", "remote", Scrubber({}))
    with pytest.raises(StorageTimeout):
        store.get("k", deadline=0.1)
    release.set()


class HttpError(Exception):
    def __init__(self, status: int) -> None:
        self.code = status


@pytest.mark.parametrize(
    ("problem", "kind"),
    [
        (FileNotFoundError("x"), NotFound),
        (HttpError(404), NotFound),
        (PermissionError("x"), Forbidden),
        (HttpError(401), Forbidden),
        (HttpError(403), Forbidden),
        (NotImplementedError("x"), Forbidden),
        (OSError(errno.EROFS, "x"), Forbidden),
        (OSError(errno.ENOSPC, "x"), StorageFull),
        (HttpError(507), StorageFull),
        (HttpError(503), Unavailable),
        (ConnectionError("x"), Unavailable),
        (TimeoutError("of the library's own"), Unavailable),
        (RuntimeError("odd"), Unavailable),
    ],
    ids=repr,
)
def test_errors(store: GenericStore, fail: dict[str, Any], problem: Exception, kind: type[StorageError]) -> None:
    store.put("k", b"x")
    fail["cat_file"] = problem
    with pytest.raises(kind, match=r"get 'k' on remote://host/kv"):
        store.get("k")


def test_connecting_may_fail() -> None:
    def connect() -> AbstractFileSystem:
        raise ConnectionError("no route with pass-word")

    store = GenericStore("remote://h", connect, "/x", "remote", Scrubber({"password": "pass-word"}))
    with pytest.raises(Unavailable, match=r"no route with \*\*\*"):
        store.put("k", b"x")


@pytest.mark.parametrize(
    ("info", "seconds"),
    [
        ({"mtime": 5}, 5.0),
        ({"mtime": 5.5}, 5.5),
        ({"LastModified": datetime(1970, 1, 1, 0, 0, 7, tzinfo=UTC)}, 7.0),
        ({"last_modified": datetime(1970, 1, 1, 0, 0, 7)}, 7.0),
        ({"updated": "1970-01-01T00:00:09+00:00"}, 9.0),
        ({"updated": "yesterday", "created": 3}, 3.0),
        ({}, None),
    ],
)
def test_modification_times(info: dict[str, Any], seconds: float | None) -> None:
    assert _modified(info) == seconds


class TestAsynchronous:
    """An asynchronous file system, as gcsfs and adlfs are: s3fs, on a server that does as it is told."""

    @pytest.fixture
    def server(self) -> Iterator[ScriptedS3]:
        with ScriptedS3() as server:
            yield server

    @pytest.fixture
    def store(self, server: ScriptedS3) -> GenericStore:
        def connect() -> AbstractFileSystem:
            return S3FileSystem(**server.options, use_listings_cache=False, skip_instance_cache=True)

        return GenericStore("gs://bucket/kv", connect, "bucket/kv", "gs", Scrubber(server.options))

    def test_a_round_trip(self, store: GenericStore, server: ScriptedS3) -> None:
        store.put("k", b"0123456789")
        assert server.objects["/bucket/kv/k"] == b"0123456789"
        assert store.get("k") == b"0123456789"
        buf = bytearray(12)
        assert store.get_into("k", buf) == 10
        assert buf == b"0123456789\0\0"
        assert store.get_range("k", 3, 4) == b"3456"
        assert store.exists(["k"]) == [True]

    def test_a_server_that_hangs(self, store: GenericStore, server: ScriptedS3) -> None:
        store.put("k", b"x" * 100)
        server.otherwise = hang
        buf = bytearray(100)
        for call in (
            lambda: store.get("k", deadline=0.2),
            lambda: store.get_into("k", buf, deadline=0.2),
            lambda: store.put("k", b"x", deadline=0.2),
            lambda: store.exists(["k", "l"], deadline=0.2),
            lambda: list(store.list(deadline=0.2)),
        ):
            start = time.monotonic()
            with pytest.raises(StorageTimeout):
                call()
            assert time.monotonic() - start < 5  # the deadline, and what a busy machine may add
        assert buf == bytes(100)
