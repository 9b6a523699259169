"""Throughput of a busy server that saves everything, against the same server without a connector.

Both servers are there at once, and what is measured on one finds the other at rest. Each round has prompts that neither
has seen. Ranks of TP=2 keep both cores of a small machine busy, so what saving costs is taken from them.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

from vllm_engine import Engine, engine

from bench.engines import CHUNK, REST_S, RESULT_S, WARM_UP, engine_args, offload, prompt, wait_until_stored, warm_up
from bench.measure import Row, Setting, row_of, timed

TP = 2
ROUNDS = 5
PREFILLS, PREFILL_TOKENS, AT_ONCE = 8, 1041, 2
DECODES, DECODE_PROMPT, ANSWER = 8, 160, 128  # a chunk becomes full while decoding
CHUNKS = PREFILLS * (PREFILL_TOKENS // CHUNK) + DECODES * ((DECODE_PROMPT + ANSWER) // CHUNK)
TARGET = 0.97


def busy_rows(setting: Setting, directory: Path) -> Iterator[Row]:
    """Prompts computed, then answers decoded, several requests at a time."""
    store = directory / "store"
    with (
        engine(engine_args(TP, **offload(store)), directory / "saving.log") as saving,
        engine(engine_args(TP), directory / "plain.log") as plain,
    ):
        stored = WARM_UP // CHUNK
        for running in (saving, plain):
            warm_up(running)
        seconds: dict[str, list[tuple[float, float]]] = {"saving": [], "plain": []}
        for turn in range(ROUNDS):
            sides = [("saving", saving), ("plain", plain)]
            for name, running in sides if turn % 2 else sides[::-1]:
                wait_until_stored(store, stored)  # nothing of the other side is under way
                sleep(REST_S)
                seconds[name].append(_round(running, 1 + turn * (PREFILLS + DECODES)))
                stored += CHUNKS if name == "saving" else 0
        wait_until_stored(store, stored)
    for part, what in enumerate((f"prompts of {PREFILL_TOKENS:,} tokens", f"answers to {DECODES} requests at once")):
        ours, other = ([each[part] for each in seconds[side]] for side in ("saving", "plain"))
        name = f"a busy server that saves everything, TP={TP}: {what}"
        yield row_of(name, "without a connector", ours, other, target=TARGET)


def _round(running: Engine, first: int) -> tuple[float, float]:
    """Seconds of prompts and of answers. first: number of the first prompt."""
    with ThreadPoolExecutor(AT_ONCE) as pool:
        tasks = range(first, first + PREFILLS)
        prefill = timed(lambda: list(pool.map(lambda number: _prefill(running, number), tasks)))
    return prefill, _decode(running, first + PREFILLS)


def _prefill(running: Engine, number: int) -> None:
    running.submit(prompt(number, PREFILL_TOKENS), 1, logprobs=None).result(RESULT_S)


def _decode(running: Engine, first: int) -> float:
    """Seconds from when all have their first token until all have their last."""
    prompts = [prompt(first + number, DECODE_PROMPT) for number in range(DECODES)]
    pending = [running.submit(tokens, ANSWER, logprobs=None) for tokens in prompts]
    outputs = [each.result(RESULT_S) for each in pending]
    return max(output.total_s for output in outputs) - max(output.first_token_s for output in outputs)
