"""Time that a step of the engine spends inside the connector's calls, where it loads and saves nothing.

A busy server decodes for several requests while others come and go. The connector is `timed_connector.py`'s.
"""

from __future__ import annotations

import json
import statistics
import time
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from vllm_engine import Engine, engine

from bench.engines import RESULT_S, NotMeasured, engine_args, importable, offload, prompt, warm_up
from bench.measure import Note, Result, Sense, Setting, row_of

TIMES = "BENCH_STEP_TIMES"  # environment: the directory of the files that timed_connector.py writes
SIZES = (1, 2)
REQUESTS, AT_ONCE = 48, 8
LENGTHS, ANSWERS = (40, 150, 220, 300), (60, 90, 120)
FEWEST = 200  # steps that say something about a 99th percentile
MEDIAN_S, P99_S = 0.0003, 0.001
MOST_CALLS = 6  # of a profile


def step_rows(setting: Setting, directory: Path) -> Iterator[Result]:
    """The median and the 99th percentile, both sides together, at both TP sizes."""
    for tp in SIZES:
        times = directory / f"times-{tp}"
        times.mkdir()
        with engine(
            engine_args(tp, **offload(directory / f"store-{tp}", "TimedConnector", "bench.timed_connector")),
            directory / f"engine-{tp}.log",
            env={TIMES: str(times), **importable()},
        ) as running:
            warm_up(running)
            begun = len(read_steps(times, "scheduler")[0])
            _serve(running)
        quiet = quiet_steps(read_steps(times, "scheduler")[0][begun:], read_steps(times, "worker"))
        if len(quiet) < FEWEST:
            raise NotMeasured(f"only {len(quiet)} steps neither loaded nor saved")
        seconds = [scheduler.seconds + rank.seconds for scheduler, rank in quiet]
        for share, name, bound in ((50, "median", MEDIAN_S), (99, "99th percentile", P99_S)):
            value = statistics.quantiles(seconds, n=100, method="inclusive")[share - 1]
            what = f"a step's time in the connector, TP={tp}, {name}"
            yield row_of(what, f"{bound * 1000:g} ms", [value], [bound], Sense.TIME, 1)
        yield Note(f"steps: TP={tp}, mean by call: {profile(quiet)}")


def _serve(running: Engine) -> None:
    with ThreadPoolExecutor(AT_ONCE) as pool:
        list(pool.map(lambda number: _request(running, number), range(1, 1 + REQUESTS)))


def _request(running: Engine, number: int) -> None:
    length, answer = LENGTHS[number % len(LENGTHS)], ANSWERS[number % len(ANSWERS)]
    running.submit(prompt(number, length), answer, logprobs=None).result(RESULT_S)


@dataclass(frozen=True)
class Step:
    """One side's part of a step. ended: by the monotonic clock. calls: seconds in each of the connector's methods.

    tokens: that the step computes; copies: it loads or saves. Only the scheduler's side knows both.
    """

    ended: float
    calls: dict[str, float]
    tokens: int = 0
    copies: bool = False

    @property
    def seconds(self) -> float:
        """In all calls."""
        return sum(self.calls.values())


class Clock:
    """Seconds by call since the last step; a call within another counts as that one's.

    What it measures in vain, its own calls, is 0.3 µs a call: 25 µs a step of 30 layers.
    """

    def __init__(self) -> None:
        self._depth = 0
        self._name = ""
        self._began = 0.0
        self._calls: defaultdict[str, float] = defaultdict(float)

    def of(self, name: str) -> Clock:
        """To be entered for a call of that name."""
        if self._depth == 0:
            self._name = name
        return self

    def __enter__(self) -> None:
        if self._depth == 0:
            self._began = time.monotonic()
        self._depth += 1

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if self._depth == 0:
            self._calls[self._name] += time.monotonic() - self._began

    def step(self, tokens: int = 0, copies: bool = False) -> Step:
        """A step has ended."""
        step = Step(time.monotonic(), dict(self._calls), tokens, copies)
        self._calls.clear()
        return step


def read_steps(directory: Path, side: str) -> list[list[Step]]:
    """What each process of a side has written. The last line may be cut off."""
    return [
        [Step(**json.loads(line)) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]
        for path in sorted(directory.glob(f"{side}-*.jsonl"))
    ]


def quiet_steps(scheduler: Sequence[Step], workers: Sequence[Sequence[Step]]) -> list[tuple[Step, Step]]:
    """The scheduler's part and the slowest rank's, of each step that computes and copies nothing.

    A rank's part belongs to the last step that the scheduler's side had planned before it.
    """
    planned = [step.ended for step in scheduler]
    ranks: dict[int, list[Step]] = {}
    for steps in workers:
        for step in steps:
            ranks.setdefault(bisect_right(planned, step.ended) - 1, []).append(step)
    return [
        (step, max(ranks[index], key=lambda part: part.seconds))
        for index, step in enumerate(scheduler)
        if step.tokens and not step.copies and len(ranks.get(index, ())) == len(workers)
    ]


def profile(steps: Sequence[tuple[Step, Step]]) -> str:
    """The calls that take most, in µs a step."""
    sums: Counter[str] = Counter()
    for parts in steps:
        for side, part in zip(("scheduler", "rank"), parts, strict=True):
            sums.update({f"{side}'s {name}": seconds for name, seconds in part.calls.items()})
    return ", ".join(f"{name} {1e6 * seconds / len(steps):.0f} µs" for name, seconds in sums.most_common(MOST_CALLS))
