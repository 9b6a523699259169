"""What the soak test calls growth, and when the store breaks in it. The run itself is `make soak`."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from soak import FAULTY_S, SOUND_S, Growth, Sample, growths, phases, role, sample

MEMORY = ("memory", "scheduler")
MIB = 2.0**20


def run_of(values: list[float]) -> list[Growth]:
    samples = [Sample(float(at), {MEMORY: value}) for at, value in enumerate(values)]
    return growths(samples, 0.0, float(len(values)))


def test_the_last_quarter_is_compared_with_the_second() -> None:
    (growth,) = run_of([0.0] * 10 + [100.0] * 10 + [7.0] * 10 + [300.0] * 10)
    assert (growth.what, growth.who, growth.before, growth.after) == (*MEMORY, 100.0, 300.0)


@pytest.mark.parametrize(
    ("before", "after", "flat"),
    [
        (1000 * MIB, 1049 * MIB, True),
        (1000 * MIB, 1051 * MIB, False),
        (10 * MIB, 25 * MIB, True),
        (10 * MIB, 27 * MIB, False),
        (1000 * MIB, 10 * MIB, True),
    ],
)
def test_growth_is_more_than_a_share_and_more_than_what_breathes(before: float, after: float, flat: bool) -> None:
    assert Growth(*MEMORY, before, after).flat is flat


def test_a_process_that_is_only_there_at_times_is_compared_over_the_samples_that_have_it() -> None:
    samples = [Sample(float(at), {MEMORY: float(at)} if at % 2 else {}) for at in range(40)]
    (growth,) = growths(samples, 0.0, 40.0)
    assert (growth.before, growth.after) == (15.0, 35.0)


def test_the_store_breaks_in_turn_until_the_end() -> None:
    found = list(phases(100.0, 100.0 + 2 * (SOUND_S + FAULTY_S) + 1))
    assert [broken for broken, _ in found] == [False, True, False, True, False]
    assert found[0][1] == 100.0 + SOUND_S
    assert found[-1][1] == 100.0 + 2 * (SOUND_S + FAULTY_S) + 1


def test_processes_are_told_apart_by_their_command_lines() -> None:
    assert role("VLLM::Worker_TP1") == "rank 1"
    assert role("python -m tplayout.staging.io_process 3 4 5") == "I/O process"
    assert role("python vllm_engine_driver.py {}") == "front end"
    assert role("python -c from multiprocessing.resource_tracker import main;main(5)") == "helper"


class Server:
    """As much of an engine as is sampled. processes: its scheduler's; a rank has just ended."""

    def __init__(self, *processes: int) -> None:
        self._processes = processes

    def pids(self) -> dict[int, str]:
        return {2**22 + 1: "VLLM::Worker_TP0", **dict.fromkeys(self._processes, "VLLM::EngineCore")}

    def metrics(self) -> dict[str, float]:
        return {"vllm:tplayout_staging_used": 3.0}


def test_a_sample_holds_all_processes_of_a_role_together() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as other:
        apart = [sample(Server(pid)).value for pid in (os.getpid(), other.pid)]  # type: ignore[arg-type]
        together = sample(Server(os.getpid(), other.pid)).value  # type: ignore[arg-type]
        other.kill()
    for what, slack in (("memory", 8 * MIB), ("handles", 4)):
        least = [value[what, "scheduler"] for value in apart]
        assert min(least) > 0
        assert together[what, "scheduler"] == pytest.approx(sum(least), abs=slack)
    assert together["slots in use", "staging"] == 3
    assert ("memory", "rank 0") not in together
