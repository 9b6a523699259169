"""File-system paths that cannot leave a store's root: every component is opened without following links.

Only the root itself, which the user names, may be or contain a symbolic link. Directories are made 0700 and files
0600 whatever the umask. Functions raise OSError, or NotPlain where something other than a file or directory is met.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
import time
from collections.abc import Callable

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC  # O_NONBLOCK: a planted FIFO must not block
_NOATIME = getattr(os, "O_NOATIME", 0)  # Linux: reading does not count as use, see touch
_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC


class NoRoot(OSError):
    """The store's root, or what is above it, is no directory."""


class NotPlain(Exception):
    """A link, device or the like stands where a file or directory belongs; str() is its path below the root."""


def open_parent(root: str, key: str, create: bool) -> tuple[int, str]:
    """A descriptor of the directory that holds `key`, for the caller to close, and the last component.

    create: make what is missing, the root included."""
    *parents, name = key.split("/")
    return open_directory(root, parents, create), name


def open_directory(root: str, components: list[str], create: bool = False) -> int:
    """A descriptor of a directory below root (root itself for no components), for the caller to close."""
    fd = _open_root(root, create)
    for depth, component in enumerate(components):
        try:
            below = _open_child(fd, component, create)
        except NotADirectoryError:
            path = "/".join(components[: depth + 1])
            if stat.S_ISREG(os.stat(component, dir_fd=fd, follow_symlinks=False).st_mode):
                raise
            raise NotPlain(path) from None
        finally:
            os.close(fd)
        fd = below
    return fd


def open_file(root: str, key: str) -> tuple[int, int]:
    """A descriptor for reading, for the caller to close, and the size in bytes."""
    parent, name = open_parent(root, key, create=False)
    try:
        fd = _open_unnoticed(name, parent)
    except OSError as exc:
        if exc.errno in (errno.ELOOP, errno.ENXIO):  # a symbolic link; a socket
            raise NotPlain(key) from None
        raise
    finally:
        os.close(parent)
    info = os.fstat(fd)
    if stat.S_ISREG(info.st_mode):
        return fd, info.st_size
    os.close(fd)
    if stat.S_ISDIR(info.st_mode):
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), key)
    raise NotPlain(key)


def _open_unnoticed(name: str, parent: int) -> int:
    """Open for reading, without a trace in the access time where the file is ours."""
    try:
        return os.open(name, _READ | _NOATIME, dir_fd=parent)
    except PermissionError:  # somebody else's file, which we may yet be allowed to read
        return os.open(name, _READ, dir_fd=parent)


def touch(root: str, key: str) -> None:
    """Set a file's access time to now; its other times, and files that are missing or another's, stay as they are."""
    try:
        fd, _ = open_file(root, key)
    except (FileNotFoundError, NotADirectoryError, PermissionError, NotPlain):
        return
    try:
        with contextlib.suppress(PermissionError):
            os.utime(fd, ns=(time.time_ns(), os.fstat(fd).st_mtime_ns))
    except OSError as exc:
        if exc.errno != errno.EROFS:
            raise
    finally:
        os.close(fd)


def is_file(root: str, key: str) -> bool:
    """True if key names a regular file that open_file would open."""
    try:
        parent, name = open_parent(root, key, create=False)
    except (FileNotFoundError, NotADirectoryError, NotPlain):
        return False
    try:
        return stat.S_ISREG(os.stat(name, dir_fd=parent, follow_symlinks=False).st_mode)
    except FileNotFoundError:
        return False
    finally:
        os.close(parent)


class Draft:
    """A file under a temporary name, until it is published or discarded: one of both must be called, once."""

    def __init__(self, root: str, key: str, temporary: str, nbytes: int = 0) -> None:
        """temporary: a last component nobody else uses. nbytes: the size that it has from the start.

        The directory may vanish at any time: FileNotFoundError."""
        self._parent, self._name = open_parent(root, key, create=True)
        self._temporary = temporary
        self._fd = -1
        try:
            self._fd = os.open(temporary, _CREATE, 0o600, dir_fd=self._parent)
            os.fchmod(self._fd, 0o600)  # an odd umask may have taken the owner's bits
            if nbytes:
                os.ftruncate(self._fd, nbytes)
        except BaseException:
            self.discard()
            raise

    def fill(self, write: Callable[[int], None]) -> None:
        """Let write(fd) write the content."""
        try:
            write(self._fd)
        finally:
            self._close()  # network file systems report a full disk here

    def publish(self) -> int:
        """Rename it to its key. Returns the size of the file that it replaced, 0 for none."""
        replaced = _size_of(self._name, self._parent)
        os.rename(self._temporary, self._name, src_dir_fd=self._parent, dst_dir_fd=self._parent)
        os.close(self._parent)
        return replaced

    def discard(self) -> None:
        """Remove it, as far as it is there."""
        made = self._fd != -1
        self._close()
        if made:
            with contextlib.suppress(OSError):
                os.unlink(self._temporary, dir_fd=self._parent)
        os.close(self._parent)

    def _close(self) -> None:
        if self._fd >= 0:
            fd, self._fd = self._fd, -2
            os.close(fd)


def publish(root: str, key: str, temporary: str, write: Callable[[int], None]) -> None:
    """Let write(fd) fill a new file and rename it to key; on any failure nothing is left and nothing changed.

    temporary: see `Draft`, and what it raises."""
    draft = Draft(root, key, temporary)
    try:
        draft.fill(write)
        draft.publish()
    except BaseException:
        draft.discard()
        raise


def unlink(root: str, key: str) -> int:
    """Remove a file or a link; what is missing, or a directory, is left alone. Returns the size of what is gone."""
    with contextlib.suppress(FileNotFoundError, NotADirectoryError, IsADirectoryError, NotPlain):
        parent, name = open_parent(root, key, create=False)
        try:
            size = _size_of(name, parent)
            os.unlink(name, dir_fd=parent)
            return size
        finally:
            os.close(parent)
    return 0


def total_size(root: str, leave_out: str) -> int:
    """The sum of the sizes of all regular files below root. leave_out: a directory right below it."""
    total = 0
    stack: list[list[str]] = [[]]
    while stack:
        path = stack.pop()
        try:
            fd = open_directory(root, path)
        except (FileNotFoundError, NotADirectoryError, PermissionError, NotPlain):
            continue
        try:
            with os.scandir(fd) as entries:
                for entry in entries:
                    if not entry.is_dir(follow_symlinks=False):
                        total += _size_of(entry.name, fd)
                    elif [*path, entry.name] != [leave_out]:
                        stack.append([*path, entry.name])
        finally:
            os.close(fd)
    return total


def remove_empty(root: str, directory: str) -> None:
    """Remove the directory and then its parents, below root, as far as they are empty."""
    while directory:
        try:
            parent, name = open_parent(root, directory, create=False)
            try:
                os.rmdir(name, dir_fd=parent)
            finally:
                os.close(parent)
        except (OSError, NotPlain):
            return
        directory = directory.rpartition("/")[0]


def open_shared(root: str, key: str) -> int:
    """A descriptor of a file that is changed in place, made if it is missing, for the caller to close."""
    parent, name = open_parent(root, key, create=True)
    try:
        return os.open(name, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=parent)
    finally:
        os.close(parent)


def is_same(root: str, key: str, fd: int) -> bool:
    """True if key still names the open file."""
    parent, name = open_parent(root, key, create=False)
    try:
        return os.path.samestat(os.stat(name, dir_fd=parent, follow_symlinks=False), os.fstat(fd))
    finally:
        os.close(parent)


def _size_of(name: str, parent: int) -> int:
    """Of a regular file; 0 for what is missing or something else."""
    try:
        info = os.stat(name, dir_fd=parent, follow_symlinks=False)
    except FileNotFoundError:
        return 0
    return info.st_size if stat.S_ISREG(info.st_mode) else 0


def _open_root(root: str, create: bool) -> int:
    try:
        try:
            return os.open(root, _DIRECTORY)
        except FileNotFoundError:
            if not create:
                raise
        make_directories(root)
        return os.open(root, _DIRECTORY)
    except NotADirectoryError:  # not what it means further below, where it may be another's mistake, or an attack
        raise NoRoot(errno.ENOTDIR, os.strerror(errno.ENOTDIR), root) from None


def make_directories(path: str) -> None:
    """Like os.makedirs, but the parents that it makes are 0700 too."""
    try:
        _make_directory(path)
    except FileNotFoundError:
        make_directories(os.path.dirname(path))
        _make_directory(path)


def _make_directory(path: str, dir_fd: int | None = None) -> None:
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, 0o700, dir_fd=dir_fd)
        if os.stat(path, dir_fd=dir_fd, follow_symlinks=False).st_mode & 0o777 != 0o700:
            os.chmod(path, 0o700, dir_fd=dir_fd)  # an odd umask


def _open_child(fd: int, component: str, create: bool) -> int:
    """Open a directory below fd without following a link; NotADirectoryError for anything else."""
    try:
        return _open_no_follow(fd, component)
    except FileNotFoundError:
        if not create:
            raise
    _make_directory(component, dir_fd=fd)
    return _open_no_follow(fd, component)


def _open_no_follow(fd: int, component: str) -> int:
    try:
        return os.open(component, _DIRECTORY | os.O_NOFOLLOW, dir_fd=fd)
    except OSError as exc:
        if exc.errno == errno.ELOOP:  # macOS; Linux says ENOTDIR for a link
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), component) from None
        raise
