"""What is remembered about the store without asking it: objects there, chunks that are damaged, uses it was told of.

All are bounded and only ever save work: forgetting is harmless, and what is wrongly remembered is
corrected by the next answer of the store.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterable

MOST_KNOWN = 65536  # objects, and chunks
_MOST_DAMAGED = 4096


class KnownStored:
    """Objects (key, group) seen in the store, the most recently seen `most` of them."""

    def __init__(self, most: int, seconds: float, clock: Callable[[], float]) -> None:
        """Nothing known. seconds: how long an object is taken to be there: others remove some."""
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._seen: OrderedDict[tuple[bytes, int], float] = OrderedDict()

    def add(self, key: bytes, groups: Iterable[int]) -> None:
        """These objects are in the store."""
        for group in groups:
            self._seen[key, group] = self._clock()
            self._seen.move_to_end((key, group))
        while len(self._seen) > self._most:
            self._seen.popitem(last=False)

    def has(self, key: bytes, group: int) -> bool:
        """The object is known to be in the store."""
        seen = self._seen.get((key, group))
        return seen is not None and self._clock() - seen < self._seconds

    def forget(self, key: bytes, groups: Iterable[int]) -> None:
        """These objects may not be in the store."""
        for group in groups:
            self._seen.pop((key, group), None)

    def clear(self) -> None:
        """Nothing is known any more."""
        self._seen.clear()


class UsesTold:
    """Chunks of whose use the store was told, so that it is not told each time. The last `most` of them."""

    def __init__(self, most: int, seconds: float, clock: Callable[[], float]) -> None:
        """seconds: how long a chunk counts as used by what was told."""
        self._most = most
        self._seconds = seconds
        self._clock = clock
        self._told: OrderedDict[bytes, float] = OrderedDict()

    def told(self, key: bytes) -> None:
        """The store knows of a use just now."""
        self._told[key] = self._clock()
        self._told.move_to_end(key)
        if len(self._told) > self._most:
            self._told.popitem(last=False)

    def due(self, key: bytes) -> bool:
        """The chunk is used, and the store should be told again."""
        last = self._told.get(key)
        return last is None or self._clock() - last >= self._seconds


class Damaged:
    """Chunks whose object failed verification: not worth a load for a while."""

    def __init__(self, seconds: float, clock: Callable[[], float]) -> None:
        """seconds: how long a chunk stays here."""
        self._seconds = seconds
        self._clock = clock
        self._until: OrderedDict[bytes, float] = OrderedDict()

    def add(self, key: bytes) -> bool:
        """The chunk was found damaged just now. True unless that was known (so that it is reported once)."""
        new = key not in self._until
        self._until[key] = self._clock() + self._seconds
        self._until.move_to_end(key)
        if len(self._until) > _MOST_DAMAGED:
            self._until.popitem(last=False)
        return new

    def has(self, key: bytes) -> bool:
        """The chunk was found damaged and not replaced since: a save should replace it."""
        return key in self._until

    def skip(self, key: bytes) -> bool:
        """The chunk was found damaged so recently that it is not loaded again."""
        return self._until.get(key, 0.0) > self._clock()

    def remove(self, key: bytes) -> None:
        """The chunk was replaced, or is good after all."""
        self._until.pop(key, None)

    def clear(self) -> None:
        """Nothing is known any more."""
        self._until.clear()
