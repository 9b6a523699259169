"""A comparison is fair: sides take turns, the fastest other side counts, one interruption does not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from bench import measure
from bench.measure import Sense, Setting, compare, row_of

SETTING = Setting(runs=5, least=2, seconds=60.0)


class Clock:
    """Stands still but for the work."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, *seconds: float) -> measure.Work:
        """A function that takes these times, one after the other, then the last."""
        left = list(seconds)

        def run() -> None:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_sides_take_turns_and_the_first_of_each_does_not_count() -> None:
    clock = Clock()
    ours, other = clock.work("ours", 1000, 2), {"b": clock.work("other", 1, 4)}
    row = compare("a", ours, other, SETTING, clock=clock, before=clock.work("before", 7))
    assert (row.ratio, row.low, row.high, row.ours, row.other) == (2, 2, 2, 2, 4)
    assert clock.calls[:8] == ["ours", "other", "before", "ours", "other", "before", "other", "ours"]
    assert clock.calls.count("ours") == clock.calls.count("other") == 6


def test_the_fastest_other_side_is_what_counts() -> None:
    clock = Clock()
    others = {"slow": clock.work("slow", 9), "fast": clock.work("fast", 1), "middling": clock.work("middling", 4)}
    row = compare("a", clock.work("ours", 2), others, SETTING, clock=clock)
    assert (row.against, row.ratio) == ("fast", 0.5)


def test_one_interrupted_round_does_not_count_much() -> None:
    clock = Clock()
    row = compare("a", clock.work("ours", 2, 2, 99, 2), {"b": clock.work("other", 2)}, SETTING, clock=clock)
    assert row.ratio == 1.0


def test_it_ends_when_the_time_is_over_but_has_a_few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(measure.time, "monotonic", clock)
    compare("a", clock.work("ours", 50), {"b": clock.work("other", 50)}, SETTING, clock=clock)
    assert clock.calls.count("ours") == 1 + SETTING.least


def test_times_by_chunk_are_compared_by_chunk() -> None:
    clock = Clock()
    ours, other = clock.work("ours", 100), {"b": clock.work("other", 10)}
    row = compare("a", ours, other, SETTING, clock=clock, sense=Sense.TIME, target=1.3, scales=(50.0, 5.0))
    assert (row.ours, row.other, row.ratio, row.met) == (2, 2, 1, True)


@pytest.mark.parametrize(
    ("sense", "ours", "other", "ratio", "bound"),
    [
        (Sense.SPEED, 2.0, 1.8, 0.9, "≥ 0.9"),
        (Sense.TIME, 3.0, 1.0, 3.0, "≤ 3"),
        (Sense.SHARE, 4.0, 3.0, 0.25, "≤ 0.25"),
    ],
)
def test_a_target_is_a_bound_on_the_better_side(
    sense: Sense, ours: float, other: float, ratio: float, bound: str
) -> None:
    def row(factor: float) -> measure.Row:
        return row_of("a", "b", [ours * factor], [other], sense, ratio)

    assert (row(1).ratio, row(1).bound, row(1).met) == (pytest.approx(ratio), bound, True)
    assert (row(0.9).met, row(1.1).met) == (True, False)


def test_without_a_target_there_is_no_verdict() -> None:
    row = row_of("a", "b", [1.0], [1.0])
    assert (row.bound, row.met) == (None, None)


def test_the_sizes_of_chunks_are_those_of_the_rows_names() -> None:
    assert SETTING.chunk.nbytes == 8 << 20
    assert SETTING.large.nbytes == 80 << 20
