"""Time to the first token of a prompt that another TP size has stored: from local disk, and from host memory.

One engine answers the same prompt in turn from the store, from its own prefix cache, from the connector's host memory,
from its own prefix cache again, and computed. It computes under a salt of its own, and what it stores then is what the
next engine of the chain, of another TP size, reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

from vllm_engine import Engine, engine

from bench.engines import (
    CHUNK,
    COMPUTED,
    ENGINE,
    HOST,
    PREFIX,
    PROMPT,
    STORE,
    WARM_UP,
    ask,
    engine_args,
    forget,
    offload,
    prompt,
    wait_until_stored,
    warm_up,
)
from bench.measure import Row, Sense, Setting, row_of

CHAIN = (4, 2, 1, 2)
QUICK_CHAIN = (1, 2)
HOST_ROWS = ((1, 2), (2, 1))  # one reader of each TP size
FROM_DISK = {1: 1.35, 2: 1.5}  # targets by TP size
FROM_HOST = {1: 1.2, 2: 1.3}
COMPUTED_ROUNDS = 5  # each takes long
OWN = "vLLM's own prefix cache"
TOKENS = f"{PREFIX:,} of {PROMPT:,} tokens"


@dataclass
class Times:
    """Seconds to the first token, a value a round. disk and own ran in turn, as host and again did."""

    disk: list[float] = field(default_factory=list)
    own: list[float] = field(default_factory=list)
    host: list[float] = field(default_factory=list)
    again: list[float] = field(default_factory=list)
    computed: list[float] = field(default_factory=list)


def first_token_rows(setting: Setting, directory: Path) -> Iterator[Row]:
    """TP 1 → 2 in a quick run; else also 4 → 2 and 2 → 1, and each against computing."""
    chain = CHAIN if setting.everything else QUICK_CHAIN
    computed = COMPUTED_ROUNDS if setting.everything else 0
    place = _Place(directory)
    with engine(engine_args(chain[0], **offload(place.store)), place.log()) as running:
        place.warm_up(running)
        place.compute(running, "0")
    for number, (wrote, reads) in enumerate(pairwise(chain)):
        with engine(engine_args(reads, **offload(place.store)), place.log()) as running:
            place.warm_up(running)
            times = _measure(place, running, number, setting.reloads, computed)
        yield from _rows(times, wrote, reads)


class _Place:
    """The store, what it must hold, and where logs go."""

    def __init__(self, directory: Path) -> None:
        self.store = directory / "store"
        self._directory = directory
        self._chunks = 0
        self._logs = 0

    def log(self) -> Path:
        self._logs += 1
        return self._directory / f"engine-{self._logs}.log"

    def warm_up(self, running: Engine) -> None:
        """An engine whose log was made last."""
        warm_up(running, salt=f"engine {self._logs}")
        self._chunks += WARM_UP // CHUNK
        wait_until_stored(self.store, self._chunks)

    def compute(self, running: Engine, salt: str) -> float:
        """Seconds to the first token of the prompt, of which nothing is stored under that salt; then it is."""
        seconds = ask(running, prompt(1), COMPUTED, salt=salt).first_token_s
        self._chunks += PREFIX // CHUNK
        wait_until_stored(self.store, self._chunks)
        return seconds


def _measure(place: _Place, running: Engine, salt: int, rounds: int, computed: int) -> Times:
    """All rounds, after one that does not count. salt: under which the prompt is stored; the first that is computed is
    stored under the next."""
    _round(running, str(salt))
    times = Times()
    sides = (times.disk, times.own, times.host, times.again)
    for turn in range(rounds):
        for side, seconds in zip(sides, _round(running, str(salt)), strict=True):
            side.append(seconds)
        if turn < computed:
            later = f", round {turn}" if turn else ""
            times.computed.append(place.compute(running, f"{salt + 1}{later}"))
    return times


def _round(running: Engine, salt: str) -> list[float]:
    """Seconds to the first token from disk, own prefix cache, host memory, own prefix cache."""
    seconds = []
    for source in (STORE, HOST):
        forget(running, host=source == STORE)
        seconds += [ask(running, prompt(1), place, salt=salt).first_token_s for place in (source, ENGINE)]
    return seconds


def _rows(times: Times, wrote: int, reads: int) -> Iterator[Row]:
    change = f"TP={wrote} to {reads}"
    name = f"first token, {TOKENS} from local disk, {change}"
    yield row_of(name, OWN, times.disk, times.own, Sense.TIME, FROM_DISK[reads])
    if times.computed:
        some = times.disk[: len(times.computed)]
        yield row_of(f"first token, {TOKENS} from local disk or computed, {change}", "computing", some, times.computed)
    if (wrote, reads) in HOST_ROWS:
        name = f"first token, {TOKENS} from host memory, TP={reads}"
        yield row_of(name, OWN, times.host, times.again, Sense.TIME, FROM_HOST[reads])
