"""Calls that end: a deadline, threads that may hang without holding anybody up, and the lease on a caller's buffer.

Knows nothing of stores or keys. Threads here are daemons: one that hangs in the kernel (a dead NFS server) stops
neither its caller, whose deadline passes, nor the exit of the process.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

T = TypeVar("T")

IDLE_S = 10.0  # an idle thread ends after this


class Deadline:
    """A point in time that one whole operation, retries included, must not pass."""

    __slots__ = ("_end", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    def left(self) -> float:
        """Seconds until the deadline; 0.0 once it has passed."""
        return max(0.0, self._end - time.monotonic())

    def again(self) -> Deadline:
        """A new deadline of the same length, from now on (the next page of a listing)."""
        return Deadline(self.seconds)


class LeaseEnded(Exception):
    """The call that lent the buffer has returned: stop, and publish nothing."""


class Lease:
    """A caller's buffer, lent to other threads for the length of one call.

    After `end()` no thread touches the buffer again, however late it wakes up: the caller may have given it to
    somebody else. Methods raise LeaseEnded then.
    """

    def __init__(self, view: memoryview) -> None:
        self._view: memoryview | None = view
        self._lock = threading.Lock()
        self.nbytes = view.nbytes

    def write(self, offset: int, data: bytes | memoryview) -> None:
        """Copy data to the buffer at offset; ValueError if it does not fit."""
        with self._lock:
            if self._view is None:
                raise LeaseEnded
            if offset < 0 or offset + len(data) > self.nbytes:
                raise ValueError(f"{len(data)} bytes at {offset} do not fit into {self.nbytes}")
            self._view[offset : offset + len(data)] = data

    def fill(self, offset: int, count: int, read: Callable[[memoryview], int]) -> int:
        """read(a view of at most count bytes at offset), and its result. `end()` waits for it: it must not block."""
        with self._lock:
            if self._view is None:
                raise LeaseEnded
            with self._view[offset : offset + count] as view:
                return read(view)

    def read(self, offset: int, count: int) -> bytes:
        """A copy of at most count bytes at offset."""
        with self._lock:
            if self._view is None:
                raise LeaseEnded
            return bytes(self._view[offset : offset + count])

    def slice(self, offset: int, count: int) -> memoryview:
        """A view of at most count bytes, for reading only: its content is void unless `check()` passes later."""
        with self._lock:
            if self._view is None:
                raise LeaseEnded
            return self._view[offset : offset + count].toreadonly()

    def check(self) -> None:
        """Raise LeaseEnded if the call is over. What was read before a check that passes is the caller's data."""
        with self._lock:
            if self._view is None:
                raise LeaseEnded

    def end(self) -> None:
        with self._lock:
            self._view = None


class _Task(Generic[T]):
    """One function call on its way through a worker thread."""

    __slots__ = ("_error", "_function", "_result", "done")

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self.done = threading.Event()
        self._result: list[T] = []
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._result.append(self._function())
        except BaseException as exc:  # the caller's thread raises it
            self._error = exc
        finally:
            self.done.set()

    def result(self) -> T:
        if self._error is not None:
            error, self._error = self._error, None  # no reference cycle through the traceback
            raise error
        return self._result.pop()


class Workers:
    """At most `limit` daemon threads that run functions for callers who wait no longer than their deadline."""

    def __init__(self, limit: int, name: str = "tplayout-storage") -> None:
        self._limit = limit
        self._name = name
        self._ready = threading.Condition()
        self._queue: deque[_Task[object]] = deque()
        self._threads = 0
        self._idle = 0

    def run(self, function: Callable[[], T], deadline: Deadline) -> T:
        """function()'s result or exception; TimeoutError at the deadline, when the thread is left to itself."""
        task: _Task[T] = _Task(function)
        with self._ready:
            self._queue.append(task)  # type: ignore[arg-type]  # only run() and done are used of it there
            if self._idle < len(self._queue) and self._threads < self._limit:
                threading.Thread(target=self._serve, name=self._name, daemon=True).start()
                self._threads += 1
            self._ready.notify()
        if not task.done.wait(deadline.left()):
            self._abandon(task)
            raise TimeoutError
        return task.result()

    def _abandon(self, task: _Task[T]) -> None:
        """Nobody waits for the task any more: where no thread has taken it yet, none will."""
        with self._ready, contextlib.suppress(ValueError):
            self._queue.remove(task)  # type: ignore[arg-type]

    def _serve(self) -> None:
        while True:
            with self._ready:
                self._idle += 1
                found = self._ready.wait_for(lambda: self._queue, IDLE_S)
                self._idle -= 1
                if not found:
                    self._threads -= 1
                    return
                task = self._queue.popleft()
            task.run()
            del task  # an idle thread must not keep a caller's buffer alive
