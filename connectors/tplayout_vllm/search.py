"""How long a prefix the store can supply, when some layers need all of it and others only its last window.

Layer: below scheduler.py, above the Stager. A hit of n tokens needs every full-attention part before n, and the
window parts that token n attends to. So it looks up the full parts first, then the windows at the end that they
allow; where a window part is missing, the hit ends before that chunk and the next windows are tried.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tplayout.format.geometry import Geometry, window_start
from tplayout.format.keys import ChunkId
from tplayout.staging.slots import SlotRef
from tplayout.staging.stager import Stager
from tplayout_vllm.blocks import Tables

_TRIES = 8  # windows looked up for one request before it takes nothing; each is one more wait for the store


@dataclass(frozen=True)
class Windows:
    """What a hit needs of the window groups. sizes: canonical group -> tokens of its window."""

    sizes: dict[int, int]
    tables: Tables

    @classmethod
    def of(cls, geometry: Geometry, tables: Tables) -> Windows:
        """The window groups of a geometry. One whose blocks the engine keeps must be filled like any other."""
        sizes = {
            index: group.window
            for index, group in enumerate(geometry.groups)
            if group.window is not None and tables.kept.isdisjoint(tables.of_group[index])
        }
        return cls(sizes, tables)

    def start(self, group: int, end: int) -> int:
        """The first token that a hit ending at token `end` must fill.

        More than the window shows: the engine keeps the block where it begins, and would hand it, as a whole, to a
        request with a shorter hit.
        """
        return self.tables.block_start(group, window_start(end, self.sizes[group]))

    def first(self, end: int) -> int:
        """The same for all window groups together."""
        return min(self.start(group, end) for group in self.sizes)


class PrefixSearch:
    """One request's search. Tokens and chunks count from the request's start.

    chunks: ids of its full chunks. start: first chunk to look up. limit: tokens that can be used at most. local: tokens
    that the engine holds.
    """

    def __init__(
        self,
        stager: Stager,
        geometry: Geometry,
        windows: Windows,
        name: str,
        chunks: Sequence[ChunkId],
        start: int,
        limit: int,
    ) -> None:
        self._stager = stager
        self._size = geometry.chunk_tokens
        self._windows = windows
        whole = tuple(g for g in range(len(geometry.groups)) if g not in windows.sizes)
        # A model of window layers only has nothing that says how far its prefix reaches but the windows themselves.
        self._whole = whole or tuple(windows.sizes)
        self._two_phases = bool(whole and windows.sizes)
        self._name, self._tail = name, f"{name}\0windows"
        self._chunks, self.start, self._limit = chunks, start, limit
        self._end: int | None = None  # token where the hit being tried ends; None while the full parts are looked up
        self._tail_start = 0
        self._tail_local = 0  # what the engine held when the tail was chosen; it may hold less later
        self._tries = 0
        useful = chunks[start : -(-limit // self._size)]
        stager.start_lookup(name, useful, lambda _: self._whole)

    def poll(self, local: int, worth: float | None = None) -> int | None:
        """Where the longest hit behind `local` tokens ends, `local` or less when there is none; None: not known yet.

        worth: seconds of waiting that a chunk of the hit is worth, None for any number.
        """
        state = self._stager.lookup(self._name, worth)
        if not state.done:
            return None
        reach = min((self.start + state.ready) * self._size, self._limit)
        if not self._two_phases or reach <= local:
            return reach
        if self._end is None or self._end > reach:
            self._try(reach, local)
        elif local < self._tail_local:
            self._try(self._end, local)
        while self._end is not None and self._end > local:
            tail = self._stager.lookup(self._tail, self._worth_of_tail(worth, local))
            if not tail.done:
                return None
            if tail.ready == -(-self._end // self._size) - self._tail_start:
                return self._end
            self._try((self._tail_start + tail.ready) * self._size, local)
        return local

    def _worth_of_tail(self, worth: float | None, local: int) -> float | None:
        """The same for a chunk of the windows: without them all of the hit is lost."""
        assert self._end is not None
        chunks = -(-self._end // self._size) - self._tail_start
        return None if worth is None else worth * (self._end - local) / self._size / chunks

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
        self._tail_start, self._tail_local = max(self._windows.first(self._end), local) // self._size, local
        wanted = self._chunks[self._tail_start : -(-self._end // self._size)]
        self._stager.start_lookup(self._tail, wanted, self._window_groups, self._name)

    def _window_groups(self, position: int) -> tuple[int, ...]:
        """The window groups that a chunk of the tail is needed for."""
        assert self._end is not None
        chunk_end = (self._tail_start + position + 1) * self._size
        return tuple(g for g in self._windows.sizes if chunk_end > self._windows.start(g, self._end))


def release(stager: Stager, name: str) -> None:
    """Let go of all that a request's search holds. Idempotent."""
    stager.release(name)
    stager.release(f"{name}\0windows")
