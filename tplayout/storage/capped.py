"""A local store that keeps its directory below a limit, whatever other processes write there under one too.

The file system itself is the record: under a limit a file has its full size from the moment it is begun, under its
temporary name. So the sum of all sizes is never less than what is written or promised, whoever was killed when. The
account, a number in a file, only spares summing up. It is changed under a lock, together with the names that it
counts, and in such an order that a process which dies in between leaves it too high. It is summed up anew when a
process begins, when the limit seems reached, and every ten minutes: for what others do who keep no account.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import math
import os
import random
import time
from collections.abc import Callable, Iterator, Sequence

from tplayout.errors import OverLimit, StorageTimeout, Unavailable
from tplayout.storage import beneath
from tplayout.storage.base import DEFAULT_TIMEOUT_S, RESERVED, ObjectInfo
from tplayout.storage.bounded import Deadline
from tplayout.storage.local import LocalStore

DIRECTORY = f"{RESERVED}usage"  # not counted itself
ACCOUNT = f"{DIRECTORY}/bytes"
EVICTING = f"{DIRECTORY}/evicting"

_DIGITS = 20
_LOCK_S = 10.0  # held for microseconds, or while a directory is summed up
_SUM_UP_S = 600.0
_NO_LOCKS = {errno.EINVAL, errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP}


class Account:
    """What a directory holds, in bytes, while its lock is held."""

    def __init__(self, root: str, fd: int, sum_up: bool) -> None:
        """fd: the locked account file. sum_up: do not believe what it says."""
        self._root = root
        self._fd = fd
        text = os.pread(fd, _DIGITS + 1, 0)
        self.nbytes = int(text) if len(text) == _DIGITS and text.isdigit() else -1
        if sum_up or self.nbytes < 0:
            self.sum_up()

    def sum_up(self) -> None:
        """Look at every file."""
        self._set(beneath.total_size(self._root, DIRECTORY))

    def add(self, nbytes: int) -> None:
        """So much more is there, or less."""
        self._set(max(0, self.nbytes + nbytes))

    def _set(self, nbytes: int) -> None:
        os.pwrite(self._fd, b"%0*d" % (_DIGITS, nbytes), 0)  # always in all of its bytes
        self.nbytes = nbytes


class CappedStore(LocalStore):
    """The store in a directory whose files together never have more than max_bytes, by their sizes.

    `put` raises OverLimit where they would. All files below the directory count, those of others too.
    """

    def __init__(self, root: str, max_bytes: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(root, timeout_s)
        self.max_bytes = max_bytes
        self._summed_up_at = -math.inf

    def room(self) -> int:
        """Bytes that may still be written."""

        def look() -> int:
            with self._account() as account:
                return self.max_bytes - account.nbytes

        return self._call("put", ACCOUNT, look, Deadline(self.timeout_s))

    @contextlib.contextmanager
    def evicting(self) -> Iterator[None]:
        """Be the only one who makes room. Raises StorageError if others take too long."""
        try:
            # On this thread: a worker's would keep the lock that it gets when nobody waits for it any more.
            fd = self._lock(EVICTING, self.timeout_s)
        except OSError as error:
            raise self._error("put", EVICTING, error) from None
        try:
            yield
        finally:
            os.close(fd)

    def _list(self, prefix: str, deadline: Deadline) -> Iterator[ObjectInfo]:
        """Without the account, which is nobody's object."""
        return (info for info in super()._list(prefix, deadline) if not info.key.startswith(f"{DIRECTORY}/"))

    def _publish(self, key: str, temporary: str, nbytes: int, write: Callable[[int], None]) -> None:
        with self._account() as account:
            self._reserve(account, key, nbytes)
            try:
                draft = beneath.Draft(self._root, key, temporary, nbytes)
            except BaseException:
                account.add(-nbytes)
                raise
        published = False
        try:
            draft.fill(write)
            with self._account() as account:
                replaced = draft.publish()
                published = True
                account.add(-replaced)
        except BaseException:
            if not published:
                self._give_up(draft, nbytes)
            raise

    def _reserve(self, account: Account, key: str, nbytes: int) -> None:
        if account.nbytes + nbytes > self.max_bytes:
            account.sum_up()
        if account.nbytes + nbytes > self.max_bytes:
            raise OverLimit(
                f"put {key!r} on {self.url}: {nbytes} bytes more would exceed max_bytes, {account.nbytes} of "
                f"{self.max_bytes} are in use, and not enough could be evicted (only servers evict); raise "
                "max_bytes, run `tplayout gc`, or remove what else is in that directory",
                nbytes=nbytes,
            )
        account.add(nbytes)

    def _give_up(self, draft: beneath.Draft, nbytes: int) -> None:
        """Remove it; where the account cannot be had, it stays too high until it is summed up."""
        with contextlib.ExitStack() as stack:
            account = None
            with contextlib.suppress(OSError, StorageTimeout, Unavailable):
                account = stack.enter_context(self._account())
            draft.discard()
            if account is not None:
                account.add(-nbytes)

    def _unlink(self, keys: Sequence[str]) -> None:
        with self._account() as account:
            for key in keys:
                account.add(-beneath.unlink(self._root, key))

    @contextlib.contextmanager
    def _account(self) -> Iterator[Account]:
        fd = self._lock(ACCOUNT, _LOCK_S)
        try:
            now = time.monotonic()
            sum_up = now - self._summed_up_at > _SUM_UP_S
            account = Account(self._root, fd, sum_up)
            if sum_up:
                self._summed_up_at = now
            yield account
        finally:
            os.close(fd)

    def _lock(self, key: str, seconds: float) -> int:
        """A descriptor of the file, locked until it is closed. Raises StorageTimeout, Unavailable, OSError.

        It is tried again and again: a lock that is waited for in the kernel would hold a thread for as long as a
        frozen process holds it.
        """
        deadline = Deadline(seconds)
        while (fd := self._try_lock(key)) is None:
            if not deadline.left():
                raise StorageTimeout(
                    f"put {key!r} on {self.url}: another process keeps it locked for {seconds:g} s; "
                    + ("it takes long to make room" if key == EVICTING else "look for one that is stopped")
                )
            time.sleep(random.uniform(0.0005, 0.004))
        return fd

    def _try_lock(self, key: str) -> int | None:
        fd, locked = beneath.open_shared(self._root, key), False
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            locked = beneath.is_same(self._root, key, fd)  # else it was removed, and others lock a new one
        except (BlockingIOError, FileNotFoundError):
            pass
        except OSError as error:
            if error.errno in _NO_LOCKS:
                raise Unavailable(
                    f"put {key!r} on {self.url}: this file system has no locks ({error.strerror}), so max_bytes "
                    "cannot hold; leave it out, and run `tplayout gc` now and then"
                ) from None
            raise
        finally:
            if not locked:
                os.close(fd)
        return fd if locked else None
