"""What the fault harness wrote down, and the verdict over it: answers are judged after the runs, from the log alone.

The log is a file of JSON lines, one a request. Cold answers come from an engine that has no connector.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

# Log-probabilities of float32 runs that differ only in where the KV came from; seen is 3e-5.
TOLERANCE = 3e-4


@dataclass(frozen=True)
class Answer:
    """tokens: the answer's; logprobs: by token id, of the best tokens at each of its positions."""

    tokens: list[int]
    logprobs: list[dict[str, float]] = field(default_factory=list)


@dataclass(frozen=True)
class Entry:
    """One request. answer None: it had none, because of `error`. excused: we killed its server while it ran.

    cached: prompt tokens that came from a cache. seconds: until its end.
    """

    stage: str
    server: str
    prompt: str
    answer: Answer | None
    error: str = ""
    excused: bool = False
    cached: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Verdict:
    """Over a log. wrong, failed: the requests by which a run is red."""

    requests: int
    cached_tokens: int
    wrong: tuple[Entry, ...]
    failed: tuple[Entry, ...]


class RequestLog:
    """Appends entries; from any thread."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        path.touch()

    def add(self, entry: Entry) -> None:
        """Write one down."""
        with self._lock, self._path.open("a") as file:
            file.write(json.dumps(asdict(entry)) + "\n")

    def read(self) -> list[Entry]:
        """All that was written down."""
        return [entry_of(json.loads(line)) for line in self._path.read_text().splitlines()]


def entry_of(fields: dict[str, Any]) -> Entry:
    """An entry from its JSON."""
    answer = fields.pop("answer")
    return Entry(answer=Answer(**answer) if answer else None, **fields)


def judge(entries: Iterable[Entry], cold: Mapping[str, Answer], slowest_s: float) -> Verdict:
    """Compare every answer with the cold one of its prompt.

    failed: no answer though its server was not killed, or none within slowest_s. KeyError for a prompt without a cold
    answer: nothing passes unjudged.
    """
    requests = cached = 0
    wrong, failed = [], []
    for entry in entries:
        expected = cold[entry.prompt]
        requests += 1
        cached += entry.cached
        if entry.answer is None:
            if not entry.excused:
                failed.append(entry)
        elif not same(entry.answer, expected):
            wrong.append(entry)
        elif entry.seconds > slowest_s:
            failed.append(entry)
    return Verdict(requests, cached, tuple(wrong), tuple(failed))


def decided(answer: Answer) -> bool:
    """Whether each token led by so much that rounding cannot choose another one."""
    best = (sorted(logprobs.values())[-2:] for logprobs in answer.logprobs)
    return all(first - second > 2 * TOLERANCE for second, first in best)


def same(answer: Answer, cold: Answer) -> bool:
    """The same tokens, and log-probabilities within TOLERANCE where both state one."""
    if answer.tokens != cold.tokens or len(answer.logprobs) != len(cold.logprobs):
        return False
    return all(
        abs(mine[token] - theirs[token]) < TOLERANCE
        for mine, theirs in zip(answer.logprobs, cold.logprobs, strict=True)
        for token in mine.keys() & theirs.keys()
    )
