"""A store that breaks on purpose: wraps any store and injects faults, by chance from a seed or one by one.

    store = FaultStore(inner, seed=1, rate=0.1)              # a tenth of the calls fail in some way
    store.inject(Fault.FLIPPED_BIT, verb="get_into")         # the next get_into returns one wrong bit
    store.injected[("put", Fault.HANG)]                      # how often that happened

The wrapper keeps the contract's deadlines: a hang lasts until the caller's deadline and no longer.
"""

from __future__ import annotations

import random
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from enum import StrEnum

from tplayout.errors import Forbidden, StorageError, StorageErrorKind, StorageFull, Unavailable
from tplayout.storage.base import ObjectInfo, Store
from tplayout.storage.bounded import Deadline


class Fault(StrEnum):
    """One way to break."""

    ERROR = "error"  # fails, and nothing was done
    DELAY = "delay"  # succeeds after delay_s
    HANG = "hang"  # nothing until the deadline
    SHORT_READ = "short-read"  # fewer bytes than the object has, and no error where the API allows that
    FLIPPED_BIT = "flipped-bit"  # one bit wrong in what is read, or in what is stored
    STALE_LIST = "stale-list"  # list and exists answer as of the store's first use
    REPORTED_FAILURE = "reported-failure"  # done completely, and an error reported
    FAILURE_AFTER_WRITE = "failure-after-write"  # half an object is visible, and an error reported


_EVERYWHERE = (Fault.ERROR, Fault.DELAY, Fault.HANG, Fault.REPORTED_FAILURE)
APPLICABLE: dict[str, tuple[Fault, ...]] = {
    "get": (*_EVERYWHERE, Fault.SHORT_READ, Fault.FLIPPED_BIT),
    "get_into": (*_EVERYWHERE, Fault.SHORT_READ, Fault.FLIPPED_BIT),
    "get_range": (*_EVERYWHERE, Fault.SHORT_READ, Fault.FLIPPED_BIT),
    "put": (*_EVERYWHERE, Fault.FLIPPED_BIT, Fault.FAILURE_AFTER_WRITE),
    "exists": (*_EVERYWHERE, Fault.STALE_LIST),
    "list": (*_EVERYWHERE, Fault.STALE_LIST),
    "delete": _EVERYWHERE,
}


class FaultStore(Store):
    """`inner` with faults. rate: the chance of a fault per call, among `faults` on `verbs` where they apply."""

    def __init__(
        self,
        inner: Store,
        *,
        seed: int = 0,
        rate: float = 0.0,
        faults: Collection[Fault] = tuple(Fault),
        verbs: Collection[str] = tuple(APPLICABLE),
        delay_s: float = 0.05,
    ) -> None:
        super().__init__(inner.url, inner.timeout_s)
        self.injected: Counter[tuple[str, Fault]] = Counter()
        self.calls = 0
        self._inner = inner
        self._random = random.Random(seed)
        self._rate = rate
        self._faults = frozenset(faults)
        self._verbs = frozenset(verbs)
        self._delay_s = delay_s
        self._scripted: list[tuple[Fault, str | None]] = []
        self._lock = threading.Lock()
        self._never = threading.Event()
        self._first: dict[str, ObjectInfo] | None = None
        if Fault.STALE_LIST in self._faults and rate:
            self._remember()

    def inject(self, fault: Fault, verb: str | None = None, times: int = 1) -> None:
        """Make the next `times` calls (of that verb) to which the fault applies fail so."""
        if verb is not None and fault not in APPLICABLE[verb]:
            raise ValueError(f"{fault} does not apply to {verb}")
        if fault is Fault.STALE_LIST:
            self._remember()
        with self._lock:
            self._scripted += [(fault, verb)] * times

    def _get(self, key: str, max_bytes: int | None, deadline: Deadline) -> bytes:
        fault = self._before("get", key, deadline)
        data = self._inner.get(key, deadline=_seconds(deadline), max_bytes=max_bytes)
        self._after("get", key, fault)
        if fault is Fault.SHORT_READ:
            return data[: self._below(len(data))]
        return self._flipped(data) if fault is Fault.FLIPPED_BIT else data

    def _get_into(self, key: str, view: memoryview, deadline: Deadline) -> int:
        fault = self._before("get_into", key, deadline)
        length = self._inner.get_into(key, view, deadline=_seconds(deadline))
        self._after("get_into", key, fault)
        if fault is Fault.SHORT_READ:
            return self._below(length)
        if fault is Fault.FLIPPED_BIT:
            view[:length] = self._flipped(view[:length])
        return length

    def _get_range(self, key: str, start: int, length: int, deadline: Deadline) -> bytes:
        fault = self._before("get_range", key, deadline)
        data = self._inner.get_range(key, start, length, deadline=_seconds(deadline))
        self._after("get_range", key, fault)
        if fault is Fault.SHORT_READ:  # the contract knows no shorter answer than an error
            raise StorageError(f"get_range {key!r}: injected {fault}", StorageErrorKind.SHORT_READ)
        return self._flipped(data) if fault is Fault.FLIPPED_BIT else data

    def _put(self, key: str, view: memoryview, deadline: Deadline) -> None:
        fault = self._before("put", key, deadline)
        data: bytes | memoryview = view
        if fault is Fault.FLIPPED_BIT:
            data = self._flipped(view)
        elif fault is Fault.FAILURE_AFTER_WRITE:
            data = view[: view.nbytes // 2]
        self._inner.put(key, data, deadline=_seconds(deadline))
        self._after("put", key, fault)

    def _exists(self, keys: Sequence[str], deadline: Deadline) -> list[bool]:
        fault = self._before("exists", keys[0], deadline)
        found = self._inner.exists(keys, deadline=_seconds(deadline))
        self._after("exists", keys[0], fault)
        return [key in (self._first or {}) for key in keys] if fault is Fault.STALE_LIST else found

    def _list(self, prefix: str, deadline: Deadline) -> Iterator[ObjectInfo]:
        fault = self._before("list", prefix, deadline)
        if fault is Fault.STALE_LIST:
            yield from (info for key, info in (self._first or {}).items() if key.startswith(prefix))
            return
        yield from self._inner.list(prefix, deadline=_seconds(deadline))
        self._after("list", prefix, fault)

    def _delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        fault = self._before("delete", keys[0], deadline)
        self._inner.delete(keys, deadline=_seconds(deadline))
        self._after("delete", keys[0], fault)

    def _temporaries(self, deadline: Deadline) -> Iterator[ObjectInfo]:
        return self._inner.temporaries(deadline=_seconds(deadline))

    def _strangers(self, deadline: Deadline) -> Iterator[ObjectInfo]:
        return self._inner.strangers(deadline=_seconds(deadline))

    def _remove_temporaries(self, keys: Sequence[str], deadline: Deadline) -> None:
        self._inner.remove_temporaries(keys, deadline=_seconds(deadline))

    def _close(self) -> None:
        self._inner.close()

    def _before(self, verb: str, key: str, deadline: Deadline) -> Fault | None:
        """The fault of this call, drawn and counted; those that come before the operation happen here."""
        fault = self._draw(verb)
        if fault is Fault.DELAY:
            time.sleep(min(self._delay_s, deadline.left()))
            if not deadline.left():
                self._timed_out(verb, key, deadline)
        elif fault is Fault.HANG:
            self._never.wait(deadline.left())
            self._timed_out(verb, key, deadline)
        elif fault is Fault.ERROR:
            raise self._error(verb, key, fault)
        return fault

    def _after(self, verb: str, key: str, fault: Fault | None) -> None:
        if fault in (Fault.REPORTED_FAILURE, Fault.FAILURE_AFTER_WRITE):
            raise Unavailable(f"{verb} {key!r}: injected {fault}")

    def _draw(self, verb: str) -> Fault | None:
        with self._lock:
            self.calls += 1
            fault = self._scripted_fault(verb) or self._random_fault(verb)
            if fault:
                self.injected[verb, fault] += 1
            return fault

    def _scripted_fault(self, verb: str) -> Fault | None:
        for index, (fault, wanted) in enumerate(self._scripted):
            if wanted in (None, verb) and fault in APPLICABLE[verb]:
                del self._scripted[index]
                return fault
        return None

    def _random_fault(self, verb: str) -> Fault | None:
        choice = [fault for fault in APPLICABLE[verb] if fault in self._faults]
        if verb not in self._verbs or not choice or self._random.random() >= self._rate:
            return None
        return self._random.choice(choice)

    def _error(self, verb: str, key: str, fault: Fault) -> StorageError:
        kinds = [Unavailable, Forbidden] + [StorageFull] * (verb == "put")
        with self._lock:
            kind = self._random.choice(kinds)
        return kind(f"{verb} {key!r}: injected {fault}")

    def _flipped(self, data: bytes | memoryview) -> bytes:
        out = bytearray(data)
        if out:
            bit = self._below(8 * len(out))
            out[bit // 8] ^= 1 << bit % 8
        return bytes(out)

    def _below(self, limit: int) -> int:
        with self._lock:
            return self._random.randrange(max(1, limit))

    def _remember(self) -> None:
        if self._first is None:
            self._first = {info.key: info for info in self._inner.list()}


def _seconds(deadline: Deadline) -> float:
    return max(deadline.left(), 1e-3)
