"""How long a prefix the store can supply, when some layers need all of it and others only its last window.

Layer: below scheduler.py, above the Stager. A hit of n tokens needs every full-attention part before n, and the
window parts that cover the last W tokens before n. So it looks up the full parts first, then the windows at the
end that they allow; where a window part is missing, the hit ends before that chunk and the next windows are tried.
"""

from __future__ import annotations

from collections.abc import Sequence

from tplayout.format.geometry import Geometry
from tplayout.format.keys import ChunkId
from tplayout.staging.slots import SlotRef
from tplayout.staging.stager import Stager

_TRIES = 8  # windows looked up for one request before it takes nothing; each is one more wait for the store


def windows_of(geometry: Geometry) -> dict[int, int]:
    """Group -> tokens of its window, for the groups that need no more than that."""
    return {g: group.window for g, group in enumerate(geometry.groups) if group.window is not None}


class PrefixSearch:
    """One request's search. Tokens and chunks count from the request's start.

    chunks: ids of its full chunks. start: first chunk to look up. limit: tokens that can be used at most. local: tokens
    that the engine holds.
    """

    def __init__(
        self, stager: Stager, geometry: Geometry, name: str, chunks: Sequence[ChunkId], start: int, limit: int
    ) -> None:
        self._stager = stager
        self._size = geometry.chunk_tokens
        self._windows = windows_of(geometry)
        whole = tuple(g for g in range(len(geometry.groups)) if g not in self._windows)
        # A model of window layers only has nothing that says how far its prefix reaches but the windows themselves.
        self._whole = whole or tuple(self._windows)
        self._two_phases = bool(whole and self._windows)
        self._name, self._tail = name, f"{name}\0windows"
        self._chunks, self.start, self._limit = chunks, start, limit
        self._end: int | None = None  # token where the hit being tried ends; None while the full parts are looked up
        self._tail_start = 0
        self._tries = 0
        useful = chunks[start : -(-limit // self._size)]
        stager.start_lookup(name, useful, lambda _: self._whole)

    def poll(self, local: int) -> int | None:
        """Where the longest hit behind `local` tokens ends, `local` or less when there is none; None: not known yet."""
        state = self._stager.lookup(self._name)
        if not state.done:
            return None
        reach = min((self.start + state.ready) * self._size, self._limit)
        if not self._two_phases or reach <= local:
            return reach
        if self._end is None or self._end > reach:
            self._try(reach, local)
        while self._end is not None and self._end > local:
            tail = self._stager.lookup(self._tail)
            if not tail.done:
                return None
            if tail.ready == self._wanted(local):
                return self._end
            self._try((self._tail_start + tail.ready) * self._size, local)
        return local

    def claim(self, first: int, last: int) -> list[tuple[int, SlotRef]]:
        """(chunk, slot) of all that a hit [first, last) needs, pinned until `release`."""
        begin, end = first // self._size, -(-last // self._size)
        slots = list(enumerate(self._stager.claim(self._name, begin - self.start, end - self.start), begin))
        if self._two_phases:
            stop = max(self._tail_start, end)
            tail = self._stager.claim(self._tail, 0, stop - self._tail_start)
            slots += list(enumerate(tail, self._tail_start))
        return slots

    def _try(self, end: int, local: int) -> None:
        """Look up the windows of a hit that ends at token `end`."""
        self._stager.release(self._tail)
        self._tries += 1
        self._end = end if self._tries <= _TRIES else local
        if self._end <= local:
            return
        self._tail_start = max(self._end - max(self._windows.values()) + 1, local, 0) // self._size
        wanted = self._chunks[self._tail_start : -(-self._end // self._size)]
        self._stager.start_lookup(self._tail, wanted, self._window_groups)

    def _window_groups(self, position: int) -> tuple[int, ...]:
        """The window groups that a chunk of the tail is needed for."""
        assert self._end is not None
        chunk_end = (self._tail_start + position + 1) * self._size
        return tuple(g for g, window in self._windows.items() if chunk_end > self._end - window + 1)

    def _wanted(self, local: int) -> int:
        assert self._end is not None
        return -(-self._end // self._size) - self._tail_start


def release(stager: Stager, name: str) -> None:
    """Let go of all that a request's search holds. Idempotent."""
    stager.release(name)
    stager.release(f"{name}\0windows")
