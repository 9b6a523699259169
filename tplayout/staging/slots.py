"""Which slot holds which chunk: bookkeeping of the staging pool, without any I/O.

A slot belongs to one key (chunk) at a time; each of its parts (one a group) has a state of its own, so that
a chunk's groups can be loaded and saved apart. A pinned or busy slot is never given to another key; idle
slots keep their content, least recently used first out. Each new key gets the slot a generation that it has
not had before, which is how a late writer or reader is told from the right one.
"""

from collections import Counter, OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from tplayout.staging.region import LAST_GENERATION


class Part(StrEnum):
    """State of one group's object in a slot."""

    EMPTY = "empty"
    FILLING = "filling"  # writers may write; then sealed by an I/O process
    PUBLISHING = "publishing"  # complete and readable, being stored
    LOADING = "loading"  # an I/O process may write
    CLEAN = "clean"  # complete and readable, nobody writes
    LIMBO = "limbo"  # given up, but a writer may still write


@dataclass(frozen=True)
class SlotRef:
    """The objects of some groups in one slot, as of one generation."""

    slot: int
    generation: int
    groups: tuple[int, ...]


READABLE = frozenset({Part.PUBLISHING, Part.CLEAN})
_STEPS = {
    Part.EMPTY: {Part.FILLING, Part.LOADING},
    Part.FILLING: {Part.PUBLISHING, Part.EMPTY, Part.LIMBO},
    Part.PUBLISHING: {Part.CLEAN},
    Part.LOADING: {Part.CLEAN, Part.EMPTY},
    Part.CLEAN: {Part.PUBLISHING},
    Part.LIMBO: {Part.EMPTY},
}
_SHOWN = (Part.LIMBO, Part.FILLING, Part.LOADING, Part.PUBLISHING)


@dataclass
class _Slot:
    parts: list[Part]
    key: bytes | None = None
    generation: int = 0
    pins: int = 0
    listed: bool = False  # its key leads here


class SlotTable:
    """The pool's slots. Every method is O(groups) but `counts` and `forget_all`."""

    def __init__(self, slots: int, groups: int, last_generation: int = LAST_GENERATION) -> None:
        """All slots free. last_generation: a slot that has reached it is never used again."""
        self._slots = [_Slot([Part.EMPTY] * groups) for _ in range(slots)]
        self._groups = groups
        self._last = last_generation
        self._by_key: dict[bytes, int] = {}
        # Freed slots come first again: their pages exist already, untouched ones cost a fault each.
        self._free = list(range(slots - 1, -1, -1))
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._retired = 0

    def __len__(self) -> int:
        return len(self._slots)

    def find(self, key: bytes) -> int | None:
        """The slot of a key, or None."""
        return self._by_key.get(key)

    def key(self, slot: int) -> bytes | None:
        """The key that a slot belongs to, None when it is free."""
        return self._slots[slot].key

    def generation(self, slot: int) -> int:
        """The slot's generation; 0 before its first use."""
        return self._slots[slot].generation

    def part(self, slot: int, group: int) -> Part:
        """State of one group's object."""
        return self._slots[slot].parts[group]

    def pins(self, slot: int) -> int:
        """How many hold the slot."""
        return self._slots[slot].pins

    def readable(self, slot: int, groups: Iterable[int]) -> bool:
        """All these groups' objects are complete."""
        parts = self._slots[slot].parts
        return all(parts[group] in READABLE for group in groups)

    @property
    def available(self) -> int:
        """Slots that a new key could get."""
        return len(self._free) + len(self._idle)

    @property
    def usable(self) -> int:
        """Slots that are not retired."""
        return len(self._slots) - self._retired

    def acquire(self, key: bytes, groups: Iterable[int], state: Part) -> int | None:
        """A slot for a key that has none, with `groups` in `state`; None if all slots are in use."""
        if key in self._by_key:
            raise ValueError("the key has a slot already")
        slot = self._take()
        if slot is None:
            return None
        entry = self._slots[slot]
        entry.key, entry.listed = key, True
        entry.generation += 1
        self._by_key[key] = slot
        self.change(slot, groups, state)
        return slot

    def change(self, slot: int, groups: Iterable[int], state: Part) -> None:
        """Put groups of a slot into the next state. A slot with nothing left and no pins becomes free."""
        entry = self._slots[slot]
        for group in groups:
            if entry.key is None or state not in _STEPS[entry.parts[group]]:
                raise ValueError(f"slot {slot}, group {group}: {entry.parts[group]} cannot become {state}")
            entry.parts[group] = state
        self._place(slot)

    def pin(self, slot: int) -> None:
        """Keep the slot for its key until `unpin`."""
        if self._slots[slot].key is None:
            raise ValueError(f"slot {slot} is free")
        self._slots[slot].pins += 1
        self._place(slot)

    def unpin(self, slot: int) -> None:
        """Undo one `pin`."""
        if self._slots[slot].pins < 1:
            raise ValueError(f"slot {slot} is not pinned")
        self._slots[slot].pins -= 1
        self._place(slot)

    def disown(self, slot: int) -> None:
        """The slot's key does not lead to it any more, so that another slot can have the key. See `forget_all`."""
        entry = self._slots[slot]
        if entry.key is None or not entry.listed:
            raise ValueError(f"no key leads to slot {slot}")
        del self._by_key[entry.key]
        entry.listed = False
        self._place(slot)

    def forget_all(self) -> None:
        """No key leads to a slot any more. Idle slots become free, the others when they become idle."""
        self._by_key.clear()
        for slot, entry in enumerate(self._slots):
            entry.listed = False
            if entry.key is not None:
                self._place(slot)

    def counts(self) -> dict[str, int]:
        """How many slots are free, filling, loading, publishing, clean, in limbo and retired; and pinned."""
        found = Counter(map(_shown, self._slots))
        states = ("free", *(part.value for part in (*_SHOWN, Part.CLEAN)))
        counts = {state: found[state] for state in states}
        counts["free"] -= self._retired
        return counts | {"retired": self._retired, "pinned": sum(entry.pins > 0 for entry in self._slots)}

    def _take(self) -> int | None:
        if self._free:
            return self._free.pop()
        if not self._idle:
            return None
        slot, _ = self._idle.popitem(last=False)
        self._clear(slot)
        return self._free.pop() if self._free else self._take()

    def _place(self, slot: int) -> None:
        """Put the slot where its state belongs: in use, idle (as the most recently used), or free."""
        entry = self._slots[slot]
        self._idle.pop(slot, None)
        if entry.key is None or entry.pins or not all(part in (Part.EMPTY, Part.CLEAN) for part in entry.parts):
            return
        if entry.listed and Part.CLEAN in entry.parts:
            self._idle[slot] = None
        else:
            self._clear(slot)

    def _clear(self, slot: int) -> None:
        entry = self._slots[slot]
        if entry.listed and entry.key is not None:
            del self._by_key[entry.key]
        entry.key, entry.listed = None, False
        entry.parts = [Part.EMPTY] * self._groups
        if entry.generation >= self._last:
            self._retired += 1
        else:
            self._free.append(slot)


def _shown(entry: _Slot) -> str:
    if entry.key is None:
        return "free"
    return next((state.value for state in _SHOWN if state in entry.parts), Part.CLEAN.value)
