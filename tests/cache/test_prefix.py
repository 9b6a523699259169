"""How many chunks can be served, against a slow and obvious count; and how little is asked for it."""

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tplayout.cache.prefix import Place, needed, servable
from tplayout.format.geometry import Geometry, Group, Part

T = 4


def geometry(*windows: int | None) -> Geometry:
    groups = [
        Group(f"g{i}", "full" if w is None else "window", (i,), 1, (Part("k", 1),), "F16", w)
        for i, w in enumerate(windows)
    ]
    return Geometry(T, tuple(groups))


def obvious(shape: Geometry, count: int, there: set[Place]) -> int:
    """The largest n for which, group by group and token by token, all that is attended to is there."""

    def serves(n: int) -> bool:
        for index, group in enumerate(shape.groups):
            first = 0 if group.window is None else max(0, n * T - (group.window - 1))  # the next token sees itself too
            if any((token // T, index) not in there for token in range(first, n * T)):
                return False
        return True

    return max(n for n in range(count + 1) if serves(n))


@given(
    windows=st.lists(st.sampled_from([None, 1, 3, 4, 5, 9, 100]), min_size=1, max_size=3),
    count=st.integers(0, 40),
    data=st.data(),
)
def test_servable_is_the_obvious_count(windows: list[int | None], count: int, data: st.DataObject) -> None:
    shape = geometry(*windows)
    places = [(chunk, group) for chunk in range(count) for group in range(len(windows))]
    missing = data.draw(st.sets(st.sampled_from(places), max_size=8)) if places else set()
    damaged = data.draw(st.sets(st.sampled_from(places), max_size=4)) if places else set()
    asked: list[Place] = []

    def exist(batch: Sequence[Place]) -> list[bool]:
        asked.extend(batch)
        return [place not in missing for place in batch]

    assert servable(shape, count, exist) == obvious(shape, count, set(places) - missing)
    assert len(asked) == len(set(asked))
    asked.clear()
    read: list[Place] = []

    def sound(place: Place) -> bool:
        read.append(place)
        assert place not in missing
        return place not in damaged

    found = servable(shape, count, exist, sound)
    assert found == obvious(shape, count, set(places) - missing - damaged)
    assert len(asked) == len(set(asked))
    assert len(read) == len(set(read))
    assert set(needed(shape, found)) <= set(read) - damaged


@pytest.mark.parametrize("stored", [0, 1, 5000])
@pytest.mark.parametrize("window", [None, 64])
def test_long_prefixes_take_few_questions(stored: int, window: int | None) -> None:
    batches: list[int] = []

    def exist(batch: Sequence[Place]) -> list[bool]:
        batches.append(len(batch))
        return [chunk < stored for chunk, _ in batch]

    assert servable(geometry(None, window), 5000, exist) == stored
    assert len(batches) <= 14
    assert stored or sum(batches) <= 64


def test_only_windows_and_nothing_stored() -> None:
    batches: list[int] = []

    def exist(batch: Sequence[Place]) -> list[bool]:
        batches.append(len(batch))
        return [False] * len(batch)

    assert servable(geometry(8), 5000, exist) == 0
    assert len(batches) <= 20
