"""How far a hit goes, against a slow and obvious answer; with windows, odd blocks, and a local hit that changes."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.keys import ChunkId
from tplayout.staging.lookups import LookupState
from tplayout.staging.slots import SlotRef
from tplayout_vllm import search
from tplayout_vllm.blocks import Tables
from tplayout_vllm.search import PrefixSearch, Windows

SIZE = 8
Places = set[tuple[int, int]]  # (chunk, group)


def geometry(*windows: int | None) -> Geometry:
    groups = [
        Group(f"g{i}", "full" if w is None else "window", (i,), 1, (Part("k", 1),), "F16", w)
        for i, w in enumerate(windows)
    ]
    return Geometry(SIZE, tuple(groups))


def chunk_ids(count: int) -> list[ChunkId]:
    return [ChunkId(bytes([i]) * 32, bytes(32), (0,) * SIZE, bytes(32), i) for i in range(count)]


class FakeStager:
    """Knows which objects exist; each lookup is done when it is asked about for the `slow`-th time."""

    def __init__(self, there: Places, slow: int = 1) -> None:
        self.there, self.slow = there, slow
        self.open: dict[str, tuple[Sequence[ChunkId], list[tuple[int, ...]]]] = {}
        self.asked: dict[str, int] = {}
        self.read: Places = set()
        self.worths: list[tuple[str, float | None]] = []

    def start_lookup(
        self,
        name: str,
        chunks: Sequence[ChunkId],
        groups_for_chunk: Callable[[int], Sequence[int]],
        behind: str | None = None,
    ) -> None:
        assert behind is None or behind in self.open
        assert name not in self.open
        groups = [tuple(groups_for_chunk(position)) for position in range(len(chunks))]
        assert all(groups)
        self.open[name], self.asked[name] = (list(chunks), groups), 0
        self.read |= {(chunk.index, group) for chunk, some in zip(chunks, groups, strict=True) for group in some}

    def lookup(self, name: str, worth: float | None = None) -> LookupState:
        self.worths.append((name, worth))
        self.asked[name] += 1
        chunks, groups = self.open[name]
        ready = 0
        while ready < len(chunks) and all((chunks[ready].index, group) in self.there for group in groups[ready]):
            ready += 1
        done = self.asked[name] >= self.slow
        return LookupState(ready if done else 0, done, "")

    def claim(self, name: str, first: int, last: int) -> list[SlotRef]:
        chunks, groups = self.open[name]
        assert 0 <= first <= last <= self.lookup(name).ready
        return [SlotRef(chunks[i].index, 1, groups[i]) for i in range(first, last)]

    def release(self, name: str) -> None:
        self.open.pop(name, None)


def needs(shape: Geometry, tables: Tables, local: int, end: int) -> Places:
    """What a hit [local, end) must fill, token by token."""
    places = set()
    for group, spec in enumerate(shape.groups):
        start = 0
        if spec.window is not None:
            start = max(0, end - (spec.window - 1))
            while any(start % tables.block_sizes[table] for table in tables.of_group[group]):
                start -= 1  # the engine keeps blocks for whole
        places |= {(token // SIZE, group) for token in range(max(local, start), end)}
    return places


def answer(found: PrefixSearch, locals_: list[int]) -> int:
    """Poll as the scheduler does; `locals_`: what the engine holds at each poll, the last one for ever."""
    for turn in range(500):
        local = locals_[min(turn, len(locals_) - 1)]
        end = found.poll(local)
        if end is not None and turn >= len(locals_) - 1:
            return end
    raise AssertionError("it goes on for ever")


shapes = st.lists(st.sampled_from([None, 1, 2, 7, 8, 9, 20, 100]), min_size=1, max_size=3)


@settings(max_examples=300, deadline=None)
@given(
    windows=shapes,
    block=st.sampled_from([2, 4, 6, 8, 16]),
    count=st.integers(0, 9),
    extra=st.integers(1, SIZE),
    slow=st.integers(1, 3),
    data=st.data(),
)
def test_the_longest_hit_is_found(
    windows: list[int | None], block: int, count: int, extra: int, slow: int, data: Any
) -> None:
    shape = geometry(*windows)
    tables = Tables((block,) * len(windows), tuple((group,) for group in range(len(windows))))
    places = [(chunk, group) for chunk in range(count) for group in range(len(windows))]
    missing = data.draw(st.sets(st.sampled_from(places), max_size=5)) if places else set()
    stager = FakeStager(set(places) - missing, slow)
    limit = count * SIZE + extra - 1
    held = st.integers(0, limit // block).map(lambda blocks: blocks * block)
    first = data.draw(held)
    # The engine's own hit may shrink or grow while the store is asked, but not below the first chunk looked up.
    locals_ = [first, *data.draw(st.lists(held.filter(lambda n: n >= first // SIZE * SIZE), max_size=3))]
    local = locals_[-1]
    there = Windows.of(shape, tables)
    found = PrefixSearch(stager, shape, there, "r", chunk_ids(count), first // SIZE, limit)
    end = answer(found, locals_)
    if end > local:
        assert needs(shape, tables, local, end) <= stager.there
        slots = found.claim(local, end)
        held_places = {(index, group) for index, slot in slots for group in slot.groups}
        assert all(slot.slot == index for index, slot in slots)
        assert needs(shape, tables, local, end) <= held_places
    if len(locals_) == 1 and not (windows and all(windows)):
        ends = [min(limit, chunks * SIZE) for chunks in range(count + 1)]
        possible = [e for e in ends if e > local and needs(shape, tables, local, e) <= stager.there]
        assert max(end, local) == max(possible, default=local)
    search.release(stager, "r")
    assert not stager.open


def test_only_the_window_is_read_of_window_layers() -> None:
    shape, tables = geometry(None, 16), Tables((4, 4), ((0,), (1,)))
    stager = FakeStager({(chunk, group) for chunk in range(10) for group in range(2)})
    found = PrefixSearch(stager, shape, Windows.of(shape, tables), "r", chunk_ids(10), 0, 80)
    assert found.poll(0) == 80
    # Token 80 sees tokens 65 to 79, and block 16 starts with token 64.
    assert stager.read == {(chunk, 0) for chunk in range(10)} | {(8, 1), (9, 1)}
    assert [index for index, _ in found.claim(0, 80)] == [*range(10), 8, 9]


def test_many_missing_windows_end_the_search() -> None:
    """Each try is one more wait for the store."""
    shape, tables = geometry(None, 8), Tables((8, 8), ((0,), (1,)))
    stager = FakeStager({(chunk, 0) for chunk in range(50)})
    found = PrefixSearch(stager, shape, Windows.of(shape, tables), "r", chunk_ids(50), 0, 400)
    assert found.poll(0) == 0
    assert len(stager.read) <= 50 + 8 * 2


@pytest.mark.parametrize(("end", "start"), [(100, 84), (99, 84), (98, 72), (10, 0), (0, 0)])
def test_a_window_starts_with_a_block(end: int, start: int) -> None:
    """A window of 16 shows 15 tokens before the next one; blocks of 12."""
    windows = Windows.of(geometry(16), Tables((12,), ((0,),)))
    assert windows.start(0, end) == start
    """A window of 16 shows 15 tokens before the next one; blocks of 12."""
    windows = Windows.of(geometry(16), Tables((12,), ((0,),)))
    assert windows.start(0, end) == start


def test_a_local_hit_that_shrinks_is_made_up_for() -> None:
    """Blocks that the engine held when the windows were chosen are gone when the hit is claimed."""
    shape, tables = geometry(None, 100), Tables((8, 8), ((0,), (1,)))
    stager = FakeStager({(chunk, group) for chunk in range(10) for group in range(2)}, slow=2)
    found = PrefixSearch(stager, shape, Windows.of(shape, tables), "r", chunk_ids(10), 0, 80)
    assert answer(found, [64, 64, 64, 8]) == 80
    assert {index for index, slot in found.claim(8, 80) if 1 in slot.groups} == set(range(1, 10))


def test_what_waiting_is_worth_is_that_of_the_whole_hit_where_windows_end_it() -> None:
    """Four chunks, of which one needs its window: without it nothing of the hit can be had."""
    shape = geometry(None, SIZE)
    tables = Tables((SIZE, SIZE), ((0,), (1,)))
    stager = FakeStager({(chunk, group) for chunk in range(4) for group in range(2)})
    found = PrefixSearch(stager, shape, Windows.of(shape, tables), "r", chunk_ids(4), 0, 4 * SIZE)
    assert found.poll(0, worth=0.5) == 4 * SIZE
    assert stager.worths == [("r", 0.5), ("r\0windows", pytest.approx(2.0))]
