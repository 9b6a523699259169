"""kill -9 of each process of a running engine: no memory of ours stays, no process stays, nothing wrong is stored.

All shared memory of the connector is anonymous, so it is looked for where it would be: in the maps and descriptors of
processes that still live.
"""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_cases import CHUNK, assert_same, engine_args, noise, offload
from e2e_store import objects, verified, wait_until_stored
from faults_engines import IO_PROCESS, holders
from vllm_engine import Engine, EngineFailed, engine

ENDED_S = 25.0  # drain time, and one store operation beyond it


def busy(running: Engine, seed: int) -> None:
    """Start requests that save and load, and leave them running."""
    for i in range(6):
        running.submit(noise(5 * CHUNK + 10, seed + i), 100)
    time.sleep(0.3)


def check_remains(running: Engine, root: Path) -> None:
    """After the death of an engine: without any help, its memory is gone and no I/O process is left."""
    deadline = time.monotonic() + ENDED_S
    while left := [*holders(running)]:
        assert time.monotonic() < deadline, left
        time.sleep(0.2)
    running.kill()
    assert not [path for path in Path("/dev/shm").iterdir() if "tplayout" in path.name]
    assert len(verified(root)) == len(objects(root))  # raises for a file that is there and wrong


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Engine]:
    args = engine_args("llama", 2, block_size=32, max_num_batched_tokens=512, **offload(f"file://{tmp_path / 'store'}"))
    with engine(args, tmp_path / "engine.log") as started:
        tokens = noise(2 * CHUNK + 5, 1)
        started.generate(tokens)
        wait_until_stored(tmp_path / "store", tokens, 2 * CHUNK)
        assert len([*holders(started)]) >= 4  # the engine core, two workers, an I/O process
        yield started


def test_an_io_process_then_the_engine_core(running: Engine, tmp_path: Path) -> None:
    """The engine goes on without its I/O process, with a new one; then the engine core is killed at work."""
    tokens = noise(2 * CHUNK + 5, 2)
    old = running.pid_of(IO_PROCESS)
    os.kill(old, signal.SIGKILL)
    first = running.generate(tokens)
    deadline = time.monotonic() + 30
    seed = 50
    while True:  # what was being saved at that moment may be lost; later prompts are saved again
        later = noise(CHUNK + 5, seed)
        running.generate(later, 1)
        try:
            wait_until_stored(tmp_path / "store", later, CHUNK, within=2)
            break
        except AssertionError:
            assert time.monotonic() < deadline
            seed += 1
    assert running.pid_of(IO_PROCESS) != old
    assert running.metrics()["vllm:tplayout_io_restarts_total"] >= 1
    assert running.call("reset_prefix_cache", connector=True)
    assert_same(running.generate(tokens), first)

    busy(running, 100)
    os.kill(running.pid_of("EngineCore"), signal.SIGKILL)
    check_remains(running, tmp_path / "store")


@pytest.mark.slow
def test_a_worker(running: Engine, tmp_path: Path) -> None:
    busy(running, 200)
    os.kill(running.pid_of("Worker_TP1"), signal.SIGKILL)
    with pytest.raises(EngineFailed):
        running.generate(noise(10, 3), timeout=60)
    check_remains(running, tmp_path / "store")


@pytest.mark.slow
def test_the_server_process(running: Engine, tmp_path: Path) -> None:
    """The front end dies; vLLM's own engine core notices that by itself, or not: then it goes with this test."""
    busy(running, 300)
    running.process.kill()
    running.process.wait()
    if not running.gone("EngineCore", 30):
        os.kill(running.pid_of("EngineCore"), signal.SIGKILL)
    check_remains(running, tmp_path / "store")


@pytest.mark.slow
def test_everything_at_once(running: Engine, tmp_path: Path) -> None:
    busy(running, 400)
    for pid in running.pids():
        os.kill(pid, signal.SIGKILL)
    check_remains(running, tmp_path / "store")
