"""Saving and reloading through vLLM, against vLLM's ExampleConnector, which stores raw pages of one rank in files.

Engines of both sides are there at once and answer in turn. Prompts are computed in one step: ExampleConnector stores
only what a prompt's first step has blocks for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from time import sleep

from vllm_engine import Engine, Output, engine

from bench.engines import (
    CHUNK,
    COMPUTED,
    PROMPT,
    REST_S,
    WARM_UP,
    Source,
    ask,
    connector,
    engine_args,
    forget,
    offload,
    prompt,
    wait_until_stored,
    warm_up,
)
from bench.measure import Row, Sense, Setting, row_of

ONE_STEP = {"max_num_batched_tokens": 8192}
SAVES, SAVED = 5, 2065  # prompts, and tokens of each
RIGHT, RIGHT_TOKENS, ANSWER = 3, 1041, 16  # prompts, their tokens, and those of an answer
SAVE_PROMPTS, RELOAD_PROMPT, RIGHT_PROMPTS = range(1, 1 + SAVES), 100, range(200, 200 + RIGHT)
TARGET = 0.95
EXAMPLE = "vLLM's ExampleConnector"


@dataclass
class Side:
    """An engine with a connector. store: of ours, None for the other's; chunks: that it must hold."""

    running: Engine
    store: Path | None = None
    chunks: int = 0

    def warm_up(self) -> None:
        """Before anything is measured."""
        warm_up(self.running)
        self._settle(WARM_UP)

    def compute(self, number: int, length: int) -> float:
        """Seconds to the first token of a prompt that nobody has seen, which is then stored."""
        seconds = ask(self.running, prompt(number, length), COMPUTED).first_token_s
        self._settle(length)
        return seconds

    def reload(self, number: int, length: int, answer: int = 1) -> Output:
        """The answer to a prompt that only the store holds."""
        forget(self.running, host=self.store is not None)
        chunks = length // CHUNK
        source = Source(chunks * CHUNK, chunks * CHUNK, read=0 if self.store is None else chunks)
        return ask(self.running, prompt(number, length), source, answer)

    def right(self, number: int) -> bool:
        """Whether the answer after a reload is that of the engine's own prefix hit."""
        self.compute(number, RIGHT_TOKENS)
        own = Source(cached=RIGHT_TOKENS // CHUNK * CHUNK)
        wanted = ask(self.running, prompt(number, RIGHT_TOKENS), own, ANSWER)
        return self.reload(number, RIGHT_TOKENS, ANSWER).tokens == wanted.tokens

    def _settle(self, length: int) -> None:
        """A prompt of so many tokens is being stored: ExampleConnector did so before it answered."""
        if self.store is not None:
            self.chunks += length // CHUNK
            wait_until_stored(self.store, self.chunks)


def example_rows(setting: Setting, directory: Path) -> Iterator[Row]:
    """Saving and reloading at TP=1; then whether answers after a reload at TP=2 are right."""
    with _sides(directory, 1) as sides:
        seconds = _in_turn(sides, len(SAVE_PROMPTS), lambda side, turn: side.compute(SAVE_PROMPTS[turn], SAVED))
        yield row_of(f"save through vLLM, TP=1: first token of {SAVED:,}", EXAMPLE, *seconds, target=TARGET)
        for side in sides:
            side.compute(RELOAD_PROMPT, PROMPT)
            side.reload(RELOAD_PROMPT, PROMPT)
        seconds = _in_turn(sides, setting.reloads, lambda side, _: side.reload(RELOAD_PROMPT, PROMPT).first_token_s)
        yield row_of(f"reload through vLLM, TP=1 to 1: first token of {PROMPT:,}", EXAMPLE, *seconds, target=TARGET)
    with _sides(directory, 2) as sides:
        ours, other = (sum(map(side.right, RIGHT_PROMPTS)) / RIGHT for side in sides)
    name = "share of answers that are right after a reload, TP=2 to 2"
    yield Row(name, EXAMPLE, ours, other, ours, ours, ours, Sense.SPEED, 1, unit="of all")


@contextmanager
def _sides(directory: Path, tp: int) -> Iterator[tuple[Side, Side]]:
    """Ours and the other, each with a store of its own."""
    store, others = directory / f"store-{tp}", directory / f"example-{tp}"
    example = connector("ExampleConnector", {"shared_storage_path": str(others)})
    with (
        engine(engine_args(tp, **ONE_STEP, **offload(store)), directory / f"ours-{tp}.log") as running,
        engine(engine_args(tp, **ONE_STEP, **example), directory / f"example-{tp}.log") as other,
    ):
        sides = Side(running, store), Side(other)
        for side in sides:
            side.warm_up()
        yield sides


def _in_turn(
    sides: tuple[Side, Side], rounds: int, work: Callable[[Side, int], float]
) -> tuple[list[float], list[float]]:
    """Seconds that work(side, round) says, of each side; each is first in its turn."""
    seconds: tuple[list[float], list[float]] = ([], [])
    for turn in range(rounds):
        for index in (0, 1) if turn % 2 else (1, 0):
            sleep(REST_S)
            seconds[index].append(work(sides[index], turn))
    return seconds
