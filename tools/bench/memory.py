"""Memory of an engine's processes while they load: the peak of what is their own above what they have at rest.

Staging is not counted: it is shared, and of a size that the user sets.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType

from vllm_engine import Engine, engine

from bench.engines import (
    CHUNK,
    COMPUTED,
    PREFIX,
    PROMPT,
    REST_S,
    RESULT_S,
    WARM_UP,
    NotMeasured,
    ask,
    engine_args,
    forget,
    offload,
    prompt,
    wait_until_stored,
    warm_up,
)
from bench.measure import MIB, Row, Sense, Setting, row_of

TP = 2
PROMPTS = 4  # at once
CHUNKS = PROMPTS * PREFIX // CHUNK
ROUNDS = 5
SAMPLE_S = 0.002
CHUNK_BYTES = 256 * 30 * 4 * 2 * 64 * 2  # tokens, layers, heads, K and V, dim, bytes of an element
SHARD_BYTES = CHUNK_BYTES // TP
# By process: words of its command line, and what it may take.
BOUNDS = {
    "I/O process": ("tplayout.staging.io_process", "3 chunks", 3 * CHUNK_BYTES),
    "rank 0": ("Worker_TP0", "2 shards", 2 * SHARD_BYTES),
    "rank 1": ("Worker_TP1", "2 shards", 2 * SHARD_BYTES),
    "scheduler": ("EngineCore", "64 MiB", 64 * MIB),
}


def memory_rows(setting: Setting, directory: Path) -> Iterator[Row]:
    """The most over all rounds, of which the first loads for the first time."""
    store = directory / "store"
    with engine(engine_args(TP, **offload(store)), directory / "engine.log") as running:
        warm_up(running)
        prompts = [prompt(1 + number) for number in range(PROMPTS)]
        for tokens in prompts:
            ask(running, tokens, COMPUTED)
        wait_until_stored(store, CHUNKS + WARM_UP // CHUNK)
        forget(running, host=True)
        time.sleep(REST_S)
        pids = {who: running.pid_of(words) for who, (words, _, _) in BOUNDS.items()}
        rest = {who: anonymous(pid) for who, pid in pids.items()}
        with Peaks(pids) as peaks:
            for _ in range(ROUNDS):
                _load(running, prompts)
                forget(running, host=True)
    for who, (_, bound, nbytes) in BOUNDS.items():
        name = f"memory while loading {CHUNKS} chunks, TP={TP}: {who}"
        yield row_of(name, bound, [max(0, peaks.most[who] - rest[who])], [nbytes], Sense.TIME, 1, unit="B")


def _load(running: Engine, prompts: list[list[int]]) -> None:
    """All prompts at once, from the store."""
    before = running.metrics()["vllm:tplayout_loads_total"]
    pending = [running.submit(tokens, 1, logprobs=None) for tokens in prompts]
    cached = [each.result(RESULT_S).cached for each in pending]
    read = running.metrics()["vllm:tplayout_loads_total"] - before
    if cached != [PREFIX] * PROMPTS or read != CHUNKS:
        raise NotMeasured(f"of {PROMPT} tokens each {cached} came from caches, in {read:g} chunks from the store")


def anonymous(pid: int) -> int:
    """Bytes of memory that are the process's own, without files and shared memory."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024 * int(next(line for line in status if line.startswith("RssAnon:")).split()[1])


class Peaks:
    """Looks at processes again and again. most: bytes of anonymous memory by process, the most that was seen."""

    def __init__(self, pids: dict[str, int]) -> None:
        self.most: defaultdict[str, int] = defaultdict(int)
        self._pids = pids
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._look)

    def __enter__(self) -> Peaks:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._stop.wait(SAMPLE_S):
            for who, pid in self._pids.items():
                self.most[who] = max(self.most[who], anonymous(pid))
