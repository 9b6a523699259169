"""Any other fsspec file system: memory://, gs://, az://, sftp:// …, through its public file methods.

Object stores and memory:// publish a whole object in one call. Other backends get a temporary beside the object's
place and a rename, where they have one. Asynchronous file systems run on fsspec's loop and are cancelled at the
deadline; the others run on a daemon thread of ours, one call at a time unless they are known to be thread-safe.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
from collections.abc import Callable, Coroutine, Iterator, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeVar

from fsspec import AbstractFileSystem

from tplayout.errors import Forbidden, NotFound, StorageError, StorageErrorKind, StorageFull, Unavailable
from tplayout.storage.base import (
    DEFAULT_TIMEOUT_S,
    Bools,
    ObjectInfo,
    Store,
    is_key,
    is_stranger,
    is_temporary,
    temporary_name,
)
from tplayout.storage.bounded import Deadline, Workers
from tplayout.storage.redact import Scrubber

T = TypeVar("T")

PUBLISH_WHOLE = frozenset({"memory", "gs", "gcs", "az", "abfs", "abfss", "oss", "obs", "tos", "oci", "bos"})
_THREAD_SAFE = frozenset({"memory", "hdfs", "arrow_hdfs"})
_CLEAN_UP_S = 1.0
_HEADS = 32  # exists calls in flight on an asynchronous file system
_MODIFIED = ("mtime", "modified", "LastModified", "last_modified", "updated", "created")


class GenericStore(Store):
    """The objects below `root`, a path of the file system that `connect` makes."""

    def __init__(
        self,
        url: str,
        connect: Callable[[], AbstractFileSystem],
        root: str,
        protocol: str,
        scrub: Scrubber,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        """connect: makes the file system; called on the first verb, and again after a call that hung."""
        super().__init__(url, timeout_s)
        self._connect = connect
        self._root = root.rstrip("/") + "/"
        self._whole = protocol in PUBLISH_WHOLE
        self._threads = 64 if protocol in _THREAD_SAFE else 1
        self._scrub = scrub
        self._workers = Workers(self._threads)
        self._connected: AbstractFileSystem | None = None

    def _get(self, key: str, max_bytes: int | None, deadline: Deadline) -> bytes:
        if max_bytes is not None:
            size = self._size("get", key, deadline)
            if size is not None and size > max_bytes:
                raise self._too_large("get", key, size, max_bytes)
        data = self._do("get", key, deadline, "cat_file", self._path(key))
        if max_bytes is not None and len(data) > max_bytes:
            raise self._too_large("get", key, len(data), max_bytes)
        return bytes(data)

    def _get_into(self, key: str, view: memoryview, deadline: Deadline) -> int:
        data = self._get(key, view.nbytes, deadline)
        view[: len(data)] = data  # here, not on a thread that may wake up after the deadline
        return len(data)

    def _get_range(self, key: str, start: int, length: int, deadline: Deadline) -> bytes:
        try:
            data = self._do("get_range", key, deadline, "cat_file", self._path(key), start=start, end=start + length)
        except NotFound:
            raise
        except StorageError:
            # Some backends answer a range behind the end with an error of their own.
            size = self._size("get_range", key, deadline)
            if size is None or size >= start + length:
                raise
            raise self._short("get_range", key, start + length, size) from None
        if len(data) != length:
            raise self._short("get_range", key, start + length, start + len(data))
        return bytes(data)

    def _put(self, key: str, view: memoryview, deadline: Deadline) -> None:
        data = bytes(view)  # fsspec's writers want bytes, and the caller's buffer must not outlive the call
        path = self._path(key)
        if self._whole:
            self._do("put", key, deadline, "pipe_file", path, data)
            return
        parent, _, name = path.rpartition("/")
        self._do("put", key, deadline, "makedirs", parent, exist_ok=True)
        if not self._renames():
            self._do("put", key, deadline, "pipe_file", path, data)
            return
        temporary = f"{parent}/{temporary_name(name)}"
        try:
            self._do("put", key, deadline, "pipe_file", temporary, data)
            self._rename(key, temporary, path, len(data), deadline)
        except StorageError:
            with contextlib.suppress(StorageError):
                self._do("put", key, Deadline(_CLEAN_UP_S), "rm_file", temporary)
            raise

    def _rename(self, key: str, temporary: str, path: str, size: int, deadline: Deadline) -> None:
        """Move the complete temporary into place, over an older object where the backend cannot replace."""
        try:
            self._do("put", key, deadline, "mv", temporary, path)
        except StorageError:
            there = self._size("put", key, deadline)
            if there is None:
                raise
            if there != size:  # else another writer was first, with the same object
                self._do("put", key, deadline, "rm_file", path)
                self._do("put", key, deadline, "mv", temporary, path)
                return
            self._do("put", key, deadline, "rm_file", temporary)

    def _exists(self, keys: Sequence[str], deadline: Deadline) -> Bools:
        fs = self._filesystem("exists", keys[0], deadline)
        if not fs.async_impl:
            return [self._size("exists", key, deadline) is not None for key in keys]
        at_once = asyncio.Semaphore(_HEADS)

        async def one(key: str) -> bool:
            async with at_once:
                try:
                    info = await fs._info(self._path(key))
                except FileNotFoundError:
                    return False
                return bool(info.get("type", "file") == "file")

        async def every() -> Bools:
            return list(await asyncio.gather(*map(one, keys)))

        try:
            return _on_loop(fs.loop, every(), deadline)
        except Exception as exc:
            self._raise("exists", keys[0], exc, deadline)

    def _list(self, prefix: str, deadline: Deadline) -> Iterator[ObjectInfo]:
        return (info for info in self._find("list", prefix, deadline) if is_key(info.key))

    def _temporaries(self, deadline: Deadline) -> Iterator[ObjectInfo]:
        if self._whole:
            return iter(())
        found = self._find("temporaries", "", deadline)
        return (info for info in found if is_temporary(info.key.rpartition("/")[2]))

    def _strangers(self, deadline: Deadline) -> Iterator[ObjectInfo]:
        return (info for info in self._find("strangers", "", deadline) if is_stranger(info.key))

    def _delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        for key in keys:
            with contextlib.suppress(NotFound):
                self._do("delete", key, deadline, "rm_file", self._path(key))

    def _remove_temporaries(self, keys: Sequence[str], deadline: Deadline) -> None:
        self._delete(keys, deadline)

    def _find(self, verb: str, prefix: str, deadline: Deadline) -> Iterator[ObjectInfo]:
        """Files below the root whose path starts with prefix: one request, since fsspec has no pages."""
        directory = self._path(prefix).rpartition("/")[0]
        try:
            self._do(verb, prefix, deadline, "invalidate_cache")
            found = self._do(verb, prefix, deadline, "find", directory, detail=True)
        except NotFound:
            return
        skip = len(self._root.lstrip("/"))
        for path, info in found.items():
            key = path.lstrip("/")[skip:]
            if key.startswith(prefix) and info.get("type", "file") == "file":
                yield ObjectInfo(key, int(info.get("size") or 0), _modified(info))

    def _size(self, verb: str, key: str, deadline: Deadline) -> int | None:
        """The object's length in bytes; None if there is no object."""
        try:
            info = self._do(verb, key, deadline, "info", self._path(key))
        except NotFound:
            return None
        return int(info.get("size") or 0) if info.get("type", "file") == "file" else None

    def _path(self, key: str) -> str:
        return self._root + key

    def _renames(self) -> bool:
        """True if the backend's mv is its own; fsspec's fallback copies, which is no better than writing in place."""
        return self._connected is not None and type(self._connected).mv is not AbstractFileSystem.mv

    def _do(self, verb: str, key: str, deadline: Deadline, method: str, *args: Any, **kwargs: Any) -> Any:
        """One method of the file system within the deadline; errors in the store's terms."""
        fs = self._filesystem(verb, key, deadline)
        try:
            coroutine = getattr(fs, f"_{method}", None) if fs.async_impl else None
            if coroutine is not None and asyncio.iscoroutinefunction(coroutine):
                return _on_loop(fs.loop, coroutine(*args, **kwargs), deadline)
            return self._workers.run(lambda: getattr(fs, method)(*args, **kwargs), deadline)
        except Exception as exc:
            self._raise(verb, key, exc, deadline)

    def _filesystem(self, verb: str, key: str, deadline: Deadline) -> AbstractFileSystem:
        if self._connected is None:
            try:
                self._connected = self._workers.run(self._connect, deadline)
            except Exception as exc:
                self._raise(verb, key, exc, deadline)
        return self._connected

    def _raise(self, verb: str, key: str, exc: Exception, deadline: Deadline) -> NoReturn:
        """The store's error for what a file system raised."""
        if isinstance(exc, TimeoutError) and not deadline.left():
            if self._threads == 1:  # the one thread hangs, and its connection with it: start afresh
                self._workers, self._connected = Workers(1), None
            self._timed_out(verb, key, deadline)
        raise _error(f"{verb} {key!r} on {self.url}", exc, self._scrub) from None


def _on_loop(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T], deadline: Deadline) -> T:
    """The coroutine's result; TimeoutError, and the coroutine cancelled, at the deadline."""

    async def bounded() -> T:
        async with asyncio.timeout(deadline.left()):
            return await coroutine

    future = asyncio.run_coroutine_threadsafe(bounded(), loop)
    try:
        return future.result(deadline.left())
    finally:
        future.cancel()


def _error(what: str, exc: Exception, scrub: Scrubber) -> StorageError:
    """The error of the closed set for an exception of a file system. what: verb, key and URL."""
    number = exc.errno if isinstance(exc, OSError) else None
    status = _status(exc)
    said = f"{what}: {type(exc).__name__}: {scrub(exc) or 'no details'}"
    if isinstance(exc, FileNotFoundError | NotADirectoryError | IsADirectoryError) or status == 404:
        return NotFound(said)
    if isinstance(exc, NotImplementedError):
        return Forbidden(f"{said}; this file system cannot do it, use another one for a store that is written")
    if isinstance(exc, PermissionError) or number == errno.EROFS or status in (401, 403):
        return Forbidden(f"{said}; check the credentials (storage_options) and permissions")
    if number in (errno.ENOSPC, errno.EDQUOT) or status == 507:
        return StorageFull(f"{said}; free space, raise the quota, or remove old chunks with `tplayout gc`")
    if status in (413, 416):
        return StorageError(said, StorageErrorKind.TOO_LARGE if status == 413 else StorageErrorKind.SHORT_READ)
    return Unavailable(f"{said}; check the URL, the network and the server")


def _status(exc: Exception) -> int | None:
    """The HTTP status that an exception of gcsfs, adlfs or aiohttp carries."""
    for name in ("status", "status_code", "code"):
        value = getattr(exc, name, None)
        if isinstance(value, int | str) and str(value).isdecimal():
            return int(value)
    return None


def _modified(info: dict[str, Any]) -> float | None:
    """When an object was written, in seconds since the epoch, from whatever form the file system has."""
    for name in _MODIFIED:
        value = info.get(name)
        if isinstance(value, int | float):
            return float(value)
        with contextlib.suppress(ValueError):
            if isinstance(value, str):
                value = datetime.fromisoformat(value)
            if isinstance(value, datetime):
                return (value if value.tzinfo else value.replace(tzinfo=UTC)).timestamp()
    return None
