"""Local files that tools read and write beside stores: exact reads, files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from tplayout.errors import FormatError, Reason, StorageFull, Unavailable
from tplayout.format.header import Header, header_size, parse_header
from tplayout.storage.base import temporary_name
from tplayout.storage.beneath import make_directories


class ReadFile:
    """An open file for reading in pieces, from several threads."""

    def __init__(self, path: Path) -> None:
        """Raises OSError."""
        self.path = path
        self._fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        self.size = os.fstat(self._fd).st_size

    def read(self, start: int, length: int) -> bytes:
        """Exactly these bytes; FormatError truncated if the file ends before."""
        pieces = []
        done = 0
        while done < length:
            piece = os.pread(self._fd, length - done, start + done)
            if not piece:
                raise FormatError(Reason.TRUNCATED, f"ends at byte {start + done}", str(self.path))
            pieces.append(piece)
            done += len(piece)
        return b"".join(pieces)

    def safetensors_header(self) -> Header:
        """The file's strictly parsed header; FormatError that names the file."""
        try:
            size = header_size(self.read(0, min(8, self.size)), self.size)
            return parse_header(self.read(0, size), self.size)
        except FormatError as error:
            raise error.at(str(self.path)) from None

    def close(self) -> None:
        """Close the file; again does nothing."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> ReadFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def is_safetensors(path: Path) -> bool:
    """Whether a file begins as safetensors do: what is damaged behind that is another question. Raises StorageError."""
    with os_errors(), ReadFile(path) as file:
        return file.size > 8 and file.read(8, 1) == b"{"


class NewFile:
    """A file that is written in pieces, from several threads, and has its name once it is complete, by `publish`.

    Until then it has none where the file system allows that, so that a tool which is killed leaves nothing behind.
    """

    def __init__(self, path: Path, size: int) -> None:
        """size: bytes it will have; what is not written stays zero. Directories are made; all is its
        owner's alone. Raises OSError."""
        self.path = path
        make_directories(str(path.parent.absolute()))
        self._temporary = path.parent / temporary_name(path.name)
        self._fd, self._named = _open_unnamed(path.parent), False  # whether the temporary name is in use
        if self._fd < 0:
            self._fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            self._named = True
        try:
            os.ftruncate(self._fd, size)
        except OSError as error:  # larger than a file may be
            self.discard()
            error.filename = str(path)
            raise

    def write(self, start: int, data: bytes | bytearray | memoryview) -> None:
        """Write at an offset. Raises OSError."""
        view = memoryview(data).cast("B")
        done = 0
        try:
            while done < len(view):
                done += os.pwrite(self._fd, view[done:], start + done)
        except OSError as error:
            error.filename = str(self.path)
            raise

    def publish(self) -> None:
        """Give the file its name, replacing what had it."""
        if not self._named:  # a link replaces nothing, a rename does
            os.link(_path_of(self._fd), self._temporary, src_dir_fd=self._fd, follow_symlinks=True)
            self._named = True
        os.close(self._fd)
        self._fd = -1
        os.rename(self._temporary, self.path)
        self._named = False

    def discard(self) -> None:
        """Remove the temporary, unless it was published."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
        if self._named:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)


def _open_unnamed(directory: Path) -> int:
    """A new file in the directory that has no name; -1 where file system or machine do not have such files."""
    with contextlib.suppress(OSError):
        fd = os.open(directory, os.O_WRONLY | getattr(os, "O_TMPFILE", 0) | os.O_CLOEXEC, 0o600)
        if os.path.exists(_path_of(fd)):
            return fd
        os.close(fd)
    return -1


def _path_of(fd: int) -> str:
    """Where Linux shows an open file, named or not."""
    return f"/proc/self/fd/{fd}"


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """OSError of local files in the words of a store, for one line to the user."""
    try:
        yield
    except OSError as error:
        said = f"{error.filename or 'local file'}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"{said}; free space and run the same command again") from None
        raise Unavailable(said) from None
