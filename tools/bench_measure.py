"""How benchmarks measure: two sides in turn in one run, and the ratio of what they took.

The machine may be busy with other things, so a single time says little, and one side's times from another run say
nothing. A pair that ran back to back saw the same machine; the median over pairs forgets the interrupted ones.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

Clock = Callable[[], float]
Work = Callable[[], object]

WALL: Clock = time.perf_counter
CPU: Clock = time.thread_time  # for work on one thread: what others do meanwhile hardly counts


@dataclass(frozen=True)
class Setting:
    """What is measured on, and for how long.

    The shape of one rank's KV: layers, heads, dim of K and of V, tokens of a chunk; chunks: copied at a time.
    objects: of one chunk each, stored and fetched at a time. runs: pairs of a comparison; it ends after `seconds`, once
    it has `least` of them. short_runs: the same where one takes less than a millisecond.
    """

    layers: int = 30
    heads: int = 4
    dim: int = 64
    chunk_tokens: int = 256
    chunks: int = 4
    objects: int = 8
    runs: int = 31
    short_runs: int = 301
    least: int = 7
    seconds: float = 12.0


TINY = Setting(layers=2, dim=8, chunks=1, objects=2, runs=1, short_runs=1, least=1, seconds=0.0)


@dataclass(frozen=True)
class Row:
    """One line of the table. ratio: ours / other, the median over pairs; low, high: its quartiles."""

    what: str
    against: str
    ratio: float
    low: float
    high: float


def compare(
    what: str,
    against: str,
    ours: Work,
    other: Work,
    setting: Setting,
    clock: Clock = WALL,
    before: Work = lambda: None,
) -> Row:
    """Run both sides in turn, after one run of each that does not count. before: runs before each pair, untimed."""
    ours()
    other()
    end = time.monotonic() + setting.seconds
    ratios: list[float] = []
    while len(ratios) < setting.runs and (len(ratios) < setting.least or time.monotonic() < end):
        before()
        first, second = (ours, other) if len(ratios) % 2 else (other, ours)  # neither always finds the other's caches
        times = {first: timed(first, clock), second: timed(second, clock)}
        ratios.append(times[ours] / times[other])
    return row_of(what, against, ratios)


def timed(work: Work, clock: Clock) -> float:
    """Seconds that work() takes on that clock; never 0."""
    start = clock()
    work()
    return max(clock() - start, 1e-9)


def row_of(what: str, against: str, ratios: list[float]) -> Row:
    """The median and the quartiles of at least one ratio."""
    low, _, high = statistics.quantiles(ratios, n=4, method="inclusive") if len(ratios) > 1 else ratios * 3
    return Row(what, against, statistics.median(ratios), low, high)


WIDTHS = (41, 32, 12, 18)
HEADING = ("what", "against", "ours / other", "half of runs")


def line(cells: tuple[str, ...]) -> str:
    """A line of the table, which is Markdown too."""
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)) + " |"


def table_head() -> str:
    """The first two lines of the table."""
    return "\n".join((line(HEADING), line(tuple("-" * width for width in WIDTHS))))


def table_line(row: Row) -> str:
    """A row as it is printed."""
    spread = "exact" if row.low == row.high else f"{row.low:.2f} to {row.high:.2f}"
    return line((row.what, row.against, f"{row.ratio:.2f}", spread))
