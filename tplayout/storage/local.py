"""file://: a directory of a local or shared file system.

An object is a file, written under a temporary name beside its place and renamed. No fsync: after a power loss a
file may hold other bytes than were written, which its digests tell; a crash of the process cannot do that. The
calls run on daemon threads, so that a file system that hangs costs its callers their deadline and nothing else.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

from tplayout.errors import Forbidden, NotFound, StorageError, StorageErrorKind, StorageFull, Unavailable, Unusable
from tplayout.storage import beneath
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
from tplayout.storage.bounded import Deadline, Lease, Workers

T = TypeVar("T")

THREADS = 64  # a hanging call keeps its thread: room for some of them
_PIECE = 1 << 20  # bytes a system call: a bounce buffer that stays in the CPU's cache
_DIRECT = 8 << 20  # bytes read while the lease cannot end: a millisecond or two
_WRITE = 8 << 20
_NOWAIT = getattr(os, "RWF_NOWAIT", 0)  # Linux
_DIRECTORY_VANISHED_TRIES = 5

_FORBIDDEN = {errno.EACCES, errno.EPERM, errno.EROFS}
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EMLINK}
_IN_THE_WAY = {errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY}


class LocalStore(Store):
    """The store in the directory `root`, an absolute path. Nothing is made before the first verb.

    Use is noted in a file's access time: reading leaves it alone, `touch` sets it.
    """

    notes_use = True

    def __init__(self, root: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        if not os.path.isabs(root):
            raise ValueError(f"root {root!r} must be absolute")
        super().__init__(f"file://{root}", timeout_s)
        self._root = root
        self._workers = Workers(THREADS)

    def _get(self, key: str, max_bytes: int | None, deadline: Deadline) -> bytes:
        def read() -> bytes:
            fd, size = beneath.open_file(self._root, key)
            try:
                if max_bytes is not None and size > max_bytes:
                    raise self._too_large("get", key, size, max_bytes)
                return self._read_exactly("get", key, fd, 0, size)
            finally:
                os.close(fd)

        return self._call("get", key, read, deadline)

    def _get_range(self, key: str, start: int, length: int, deadline: Deadline) -> bytes:
        def read() -> bytes:
            fd, size = beneath.open_file(self._root, key)
            try:
                if start + length > size:  # before anything of that length is allocated
                    raise self._short("get_range", key, start + length, size)
                return self._read_exactly("get_range", key, fd, start, length)
            finally:
                os.close(fd)

        return self._call("get_range", key, read, deadline)

    def _get_into(self, key: str, view: memoryview, deadline: Deadline) -> int:
        lease = Lease(view)

        def read() -> int:
            fd, size = beneath.open_file(self._root, key)
            try:
                if size > lease.nbytes:
                    raise self._too_large("get_into", key, size, lease.nbytes)
                done, bounce = 0, memoryview(b"")
                while done < size:
                    count = _read_cached(fd, lease, done, size)
                    if not count:
                        bounce = bounce or memoryview(bytearray(min(_PIECE, size)))
                        count = _read_waiting(fd, lease, done, bounce[: size - done])
                    if not count:
                        raise self._short("get_into", key, size, done)
                    done += count
                return size
            finally:
                os.close(fd)

        try:
            return self._call("get_into", key, read, deadline)
        finally:
            lease.end()

    def _put(self, key: str, view: memoryview, deadline: Deadline) -> None:
        lease = Lease(view)

        def write(fd: int) -> None:
            done = 0
            while done < lease.nbytes:
                done += os.write(fd, lease.slice(done, _WRITE))
            lease.check()  # else the last bytes may not be the caller's any more

        def publish() -> None:
            for _ in range(_DIRECTORY_VANISHED_TRIES):
                try:
                    return self._publish(key, temporary_name(key.rpartition("/")[2]), lease.nbytes, write)
                except FileNotFoundError:  # somebody removes directories: make them again
                    lease.check()
            raise Unavailable(
                f"put {key!r} on {self.url}: its directory cannot be made, or vanishes while it is written"
            )

        try:
            self._call("put", key, publish, deadline)
        finally:
            lease.end()

    def _exists(self, keys: Sequence[str], deadline: Deadline) -> Bools:
        return self._call("exists", keys[0], lambda: [beneath.is_file(self._root, key) for key in keys], deadline)

    def _list(self, prefix: str, deadline: Deadline) -> Iterator[ObjectInfo]:
        return self._walk("list", prefix, is_key, deadline)

    def _temporaries(self, deadline: Deadline) -> Iterator[ObjectInfo]:
        return self._walk("temporaries", "", is_temporary, deadline)

    def _delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        def delete() -> None:
            self._unlink(keys)
            for directory in sorted({key.rpartition("/")[0] for key in keys}, reverse=True):
                beneath.remove_empty(self._root, directory)

        self._call("delete", keys[0], delete, deadline)

    def _touch(self, keys: Sequence[str], deadline: Deadline) -> None:
        def touch() -> None:
            for key in keys:
                beneath.touch(self._root, key)

        self._call("touch", keys[0], touch, deadline)

    def _publish(self, key: str, temporary: str, nbytes: int, write: Callable[[int], None]) -> None:
        """Write a file of nbytes, whole or not at all. On a worker thread; raises OSError or StorageError."""
        beneath.publish(self._root, key, temporary, write)

    def _unlink(self, keys: Sequence[str]) -> None:
        """Remove the files. On a worker thread; raises OSError or StorageError."""
        for key in keys:
            beneath.unlink(self._root, key)

    def _remove_temporaries(self, keys: Sequence[str], deadline: Deadline) -> None:
        self._delete(keys, deadline)

    def _strangers(self, deadline: Deadline) -> Iterator[ObjectInfo]:
        stack = [""]
        while stack:
            infos, below = self._call("strangers", "", partial(self._odd, stack.pop()), deadline.again())
            stack.extend(sorted(below, reverse=True))
            yield from infos

    def _odd(self, directory: str) -> tuple[list[ObjectInfo], list[str]]:
        """What lies in a directory and is no object and no temporary, links and devices included; its directories."""
        infos: list[ObjectInfo] = []
        below: list[str] = []
        with contextlib.suppress(FileNotFoundError, NotADirectoryError, beneath.NotPlain):
            fd = beneath.open_directory(self._root, directory.split("/") if directory else [])
            try:
                with os.scandir(fd) as entries:
                    for entry in entries:
                        path = f"{directory}/{entry.name}" if directory else entry.name
                        if entry.is_dir(follow_symlinks=False):
                            below.append(path)
                        elif is_stranger(path) or not entry.is_file(follow_symlinks=False):
                            about = entry.stat(follow_symlinks=False)
                            infos.append(ObjectInfo(path, about.st_size, about.st_mtime))
            finally:
                os.close(fd)
        return infos, below

    def _walk(self, verb: str, prefix: str, wanted: Callable[[str], bool], deadline: Deadline) -> Iterator[ObjectInfo]:
        """Files whose last component is wanted; one directory is one page, with its own deadline."""
        stack = [prefix.rpartition("/")[0]]
        while stack:
            scan = partial(self._scan, stack.pop(), prefix, wanted)
            infos, below = self._call(verb, prefix, scan, deadline.again())
            stack.extend(sorted(below, reverse=True))
            yield from infos

    def _scan(self, directory: str, prefix: str, wanted: Callable[[str], bool]) -> tuple[list[ObjectInfo], list[str]]:
        """The wanted files and the directories in one directory, as far as they start with prefix."""
        infos: list[ObjectInfo] = []
        below: list[str] = []
        try:
            fd = beneath.open_directory(self._root, directory.split("/") if directory else [])
        except (FileNotFoundError, NotADirectoryError, beneath.NotPlain):
            return infos, below
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    path = f"{directory}/{entry.name}" if directory else entry.name
                    if not path.startswith(prefix):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        if is_key(entry.name):
                            below.append(path)
                    elif wanted(entry.name):
                        info = _info(path, entry)
                        if info is not None:
                            infos.append(info)
        finally:
            os.close(fd)
        return infos, below

    def _call(self, verb: str, key: str, function: Callable[[], T], deadline: Deadline) -> T:
        """function() on a worker thread, its errors in the store's terms."""
        try:
            return self._workers.run(function, deadline)
        except TimeoutError:
            self._timed_out(verb, key, deadline)
        except beneath.NotPlain as exc:
            raise Forbidden(
                f"{verb} {key!r} on {self.url}: {str(exc)!r} is a link or a device; a store never holds one, remove it"
            ) from None
        except OSError as exc:
            raise self._error(verb, key, exc) from None

    def _error(self, verb: str, key: str, exc: OSError) -> StorageError:
        if isinstance(exc, beneath.NoRoot):
            return Unusable(
                f"{verb} {key!r} on {self.url}: that is a file, or below one, and a store is a directory; "
                "give another URL, or remove what is in the way"
            )
        what = f"{verb} {key!r} on {self.url}: {os.strerror(exc.errno) if exc.errno else exc}"
        if exc.errno == errno.ENOENT:
            return NotFound(what)
        if exc.errno in _FORBIDDEN:
            return Forbidden(f"{what}; check the owner and mode of the directory and whether it is mounted read-only")
        if exc.errno in _FULL:
            return StorageFull(f"{what}; free space or inodes, or remove old chunks with `tplayout gc`")
        if exc.errno == errno.ENAMETOOLONG:
            return StorageError(what, StorageErrorKind.INVALID_NAME)
        if exc.errno in _IN_THE_WAY:
            if verb == "put":
                return StorageError(
                    f"{what}; a file and a directory have the same name, and one of them is no chunk: remove it",
                    StorageErrorKind.EXISTS,
                )
            return NotFound(what)
        return Unavailable(f"{what}; check the file system and the system's log")

    def _read_exactly(self, verb: str, key: str, fd: int, start: int, length: int) -> bytes:
        pieces: list[bytes] = []
        done = 0
        while done < length:
            piece = os.pread(fd, length - done, start + done)
            if not piece:
                raise self._short(verb, key, start + length, start + done)
            pieces.append(piece)
            done += len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def _read_cached(fd: int, lease: Lease, done: int, size: int) -> int:
    """Read what the page cache has from `done` on straight into the lease; how much, 0 if that cannot be had.

    The system call returns at once where it would have to wait, and fails on file systems that cannot promise that
    (NFS, FUSE, tmpfs): so it cannot hang, and the lease may stay locked meanwhile.
    """
    if not _NOWAIT:
        return 0
    try:
        return lease.fill(done, min(_DIRECT, size - done), lambda view: os.preadv(fd, [view], done, _NOWAIT))
    except OSError:  # what is really wrong, the read that waits will find too
        return 0


def _read_waiting(fd: int, lease: Lease, done: int, bounce: memoryview) -> int:
    """Read what fits into bounce from `done` on, however long that takes; how much, 0 at the end of the file.

    Through that buffer of our own, since a read that wakes up after the deadline must not find the caller's memory. The
    copy is made from the CPU's cache, and costs a third of the read.
    """
    count = os.preadv(fd, [bounce], done)
    lease.write(done, bounce[:count])
    return count


def _info(path: str, entry: os.DirEntry[str]) -> ObjectInfo | None:
    """What a listing says of a regular file; None for anything else, and for a file deleted meanwhile."""
    try:
        info = entry.stat(follow_symlinks=False)
    except FileNotFoundError:
        return None
    if not stat.S_ISREG(info.st_mode):
        return None
    return ObjectInfo(path, info.st_size, info.st_mtime, max(info.st_atime, info.st_mtime))
