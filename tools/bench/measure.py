"""How benchmarks measure: all sides in turn in one run, and the ratio of what they took.

The machine may be busy with other things, so a single time says little, and one side's times from another run say
nothing. Sides that ran back to back saw the same machine; the median over rounds forgets the interrupted ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

Clock = Callable[[], float]
Work = Callable[[], object]

WALL: Clock = time.perf_counter
CPU: Clock = time.thread_time  # for work on one thread: what others do meanwhile hardly counts
MIB = 1 << 20


class Sense(Enum):
    """What a ratio says, given what ours and the other side took."""

    SPEED = "≥"  # other / ours: how many times as fast we are; a target is a lower bound
    TIME = "≤"  # ours / other: how many times as long we take; a target is an upper bound
    # The blank keeps it a member of its own.
    SHARE = "≤ "  # 1 - other / ours: the share of our time that the other side does without; an upper bound

    def ratio(self, ours: float, other: float) -> float:
        """Of one round. ours, other: above 0."""
        if self is Sense.SPEED:
            return other / ours
        return ours / other if self is Sense.TIME else 1 - other / ours

    def met(self, ratio: float, target: float) -> bool:
        """Whether the ratio keeps the bound."""
        return ratio >= target if self is Sense.SPEED else ratio <= target


@dataclass(frozen=True)
class Shape:
    """A rank's KV: layers, heads, dim of K and of V, tokens of a chunk. An element has two bytes."""

    layers: int
    heads: int
    dim: int
    tokens: int = 256

    @property
    def nbytes(self) -> int:
        """Bytes of the KV of a chunk."""
        return self.layers * self.heads * 2 * self.tokens * self.dim * 2


@dataclass(frozen=True)
class Setting:
    """What is measured on, and for how long.

    chunk, large: chunks of 8 and of 80 MiB. objects, large_objects: of one chunk each, stored and fetched at a time.
    runs: rounds of a comparison; it ends after `seconds`, once it has `least` of them. copies, short: `runs` and
    `seconds` of what takes some ms, or less than one. prefix: chunks that are looked up. growth: chunks of the stores
    that are compared, the smallest first. reloads: rounds of reloads through a vLLM engine, 0 for no engines at all.
    everything: also what takes long and says little new.
    """

    chunk: Shape = Shape(32, 4, 64)
    large: Shape = Shape(80, 8, 128)
    objects: int = 8
    large_objects: int = 4
    copied: int = 4
    runs: int = 31
    least: int = 5
    seconds: float = 10.0
    copies: tuple[int, float] = (31, 2.0)
    short: tuple[int, float] = (101, 4.0)
    prefix: int = 128
    growth: Sequence[int] = (100, 10_000, 100_000)
    reloads: int = 11
    everything: bool = True
    ceph: bool = True


QUICK = Setting(
    runs=7,
    least=3,
    seconds=2.0,
    copies=(15, 0.5),
    short=(31, 1.5),
    growth=(100, 10_000),
    reloads=3,
    everything=False,
)
TINY = Setting(
    chunk=Shape(2, 4, 8),
    large=Shape(2, 8, 8),
    objects=2,
    large_objects=2,
    copied=1,
    runs=1,
    least=1,
    seconds=0.0,
    copies=(1, 0.0),
    short=(1, 0.0),
    prefix=4,
    growth=(4, 8),
    reloads=0,
    everything=False,
    ceph=False,
)


@dataclass(frozen=True)
class Row:
    """One line. ours, other: medians, in `unit`; ratio: the median over rounds; low, high: its quartiles.

    target: the bound that the ratio is to keep, None where it is only reported.
    """

    name: str
    against: str
    ours: float
    other: float
    ratio: float
    low: float
    high: float
    sense: Sense
    target: float | None
    unit: str = "s"

    @property
    def bound(self) -> str | None:
        """The target in writing, as "≥ 0.9"."""
        return None if self.target is None else f"{self.sense.value.strip()} {self.target:g}"

    @property
    def met(self) -> bool | None:
        """Whether the target is met; None without one."""
        return None if self.target is None else self.sense.met(self.ratio, self.target)


@dataclass(frozen=True)
class Note:
    """What could not be measured, and why."""

    text: str


Result = Row | Note


def compare(
    name: str,
    ours: Work,
    others: Mapping[str, Work],
    setting: Setting,
    *,
    sense: Sense = Sense.SPEED,
    target: float | None = None,
    clock: Clock = WALL,
    before: Work = lambda: None,
    scales: tuple[float, float] = (1.0, 1.0),
    limits: tuple[int, float] | None = None,
) -> Row:
    """Run all sides in turn, after one run of each that does not count; compare with the fastest other side.

    others: the sides by name. before: runs before each round, untimed. scales: what the times of ours and of the
    others are divided by, as a number of chunks. limits: rounds and seconds, else those of the setting.
    """
    runs, seconds = limits or (setting.runs, setting.seconds)
    sides = [ours, *others.values()]
    for work in sides:
        work()
    end = time.monotonic() + seconds
    times: list[list[float]] = [[] for _ in sides]
    while (rounds := len(times[0])) < setting.least or (rounds < runs and time.monotonic() < end):
        before()
        for turn in range(len(sides)):  # each is first in its turn: nobody always finds the caches of another
            index = (turn + rounds) % len(sides)
            times[index].append(timed(sides[index], clock) / scales[min(index, 1)])
    medians = [statistics.median(side) for side in times]
    best = min(range(1, len(sides)), key=medians.__getitem__)
    return row_of(name, list(others)[best - 1], times[0], times[best], sense, target)


def timed(work: Work, clock: Clock = WALL) -> float:
    """Seconds that work() takes on that clock; never 0."""
    start = clock()
    work()
    return max(clock() - start, 1e-9)


def row_of(
    name: str,
    against: str,
    ours: Sequence[float],
    other: Sequence[float],
    sense: Sense = Sense.SPEED,
    target: float | None = None,
    unit: str = "s",
) -> Row:
    """A row of what both sides took in each of at least one round."""
    ratios = [sense.ratio(mine, theirs) for mine, theirs in zip(ours, other, strict=True)]
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    ratio = statistics.median(ratios)
    return Row(name, against, statistics.median(ours), statistics.median(other), ratio, low, high, sense, target, unit)
