"""Local files that tools read and write beside stores: exact reads, files that appear complete or not at all."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

from tplayout.errors import FormatError, Reason, StorageFull, Unavailable
from tplayout.format.header import Header, header_size, parse_header
from tplayout.storage.base import temporary_name


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


class NewFile:
    """A file that is written in pieces, from several threads, under a temporary name; `publish` renames it."""

    def __init__(self, path: Path, size: int) -> None:
        """size: bytes it will have; what is not written stays zero. Directories are made. Raises OSError."""
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._temporary = path.parent / temporary_name(path.name)
        self._fd = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        os.ftruncate(self._fd, size)

    def write(self, start: int, data: bytes | bytearray | memoryview) -> None:
        """Write at an offset. Raises OSError."""
        view = memoryview(data).cast("B")
        done = 0
        while done < len(view):
            done += os.pwrite(self._fd, view[done:], start + done)

    def publish(self) -> None:
        """Give the file its name, replacing what had it."""
        os.close(self._fd)
        self._fd = -1
        os.rename(self._temporary, self.path)

    def discard(self) -> None:
        """Remove the temporary, unless it was published."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
            with contextlib.suppress(OSError):
                os.unlink(self._temporary)


@contextlib.contextmanager
def os_errors() -> Iterator[None]:
    """OSError of local files in the words of a store, for one line to the user."""
    import errno

    try:
        yield
    except OSError as error:
        said = f"{error.filename or 'local file'}: {error.strerror or error}"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise StorageFull(f"{said}; free space and run the same command again") from None
        raise Unavailable(said) from None
