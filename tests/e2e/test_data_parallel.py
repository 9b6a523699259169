"""Data parallelism: two engines of one server share the store, and the memory for staging."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_cases import CHUNK, assert_same, engine_args, noise, offload
from e2e_one_process import OneProcess, forget, supplied
from e2e_store import verified, wait_until_stored
from vllm_engine import Engine, engine

FULL = 2 * CHUNK
RANKS = (0, 1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def two(root: Path, logs: Path) -> Iterator[Engine]:
    args = engine_args("llama", 1, data_parallel_size=2, **offload(f"file://{root}"))
    with engine(args, logs / "data-parallel.log") as running:
        yield running


@pytest.mark.row("Data parallel", "DP=2, TP=1: what one engine wrote the other reads, both ways")
def test_each_reads_what_the_other_wrote(two: Engine, one_process: OneProcess, root: Path) -> None:
    for writer in RANKS:
        tokens = noise(FULL + 40, 1 + writer)
        wanted = one_process.plain().generate(tokens)
        first, count = supplied(two, tokens, rank=writer)
        assert count == 0
        wait_until_stored(root, tokens, FULL)
        again, count = supplied(two, tokens, rank=1 - writer)
        assert count == FULL
        assert_same(first, wanted)
        assert_same(again, wanted)
    assert len(verified(root)) == 2 * FULL // CHUNK


@pytest.mark.row("Data parallel", "DP=2, TP=1: one server's answers from the store after both engines forgot")
def test_both_read_at_once(two: Engine, one_process: OneProcess, root: Path) -> None:
    tokens = noise(FULL + 40, 3)
    wanted = one_process.plain().generate(tokens)
    two.generate(tokens, rank=0)
    wait_until_stored(root, tokens, FULL)
    forget(two)
    for request in [two.submit(tokens, rank=rank) for rank in RANKS]:
        answer = request.result()
        assert answer.cached == FULL
        assert_same(answer, wanted)


def test_staging_memory_is_shared_fairly(two: Engine) -> None:
    slots = [value for name, value in two.metrics().items() if name.startswith("vllm:tplayout_staging_slots{engine=")]
    assert len(slots) == 2
    # A quarter of the free memory is for both together; the second may find a little less free than the first.
    assert min(slots) > 0.8 * max(slots)
    shares = [
        float(line.split("staging ")[1].split(" GiB")[0]) for line in two.text().splitlines() if "staging " in line
    ]
    assert len(shares) == 2
    memory = next(int(line.split()[1]) for line in Path("/proc/meminfo").read_text().splitlines() if "MemTotal" in line)
    assert sum(shares) * 2**20 < memory / 4
