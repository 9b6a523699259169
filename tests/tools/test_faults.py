"""The harness's last line and exit status follow from the verdict. The stages run in tests/e2e/test_faults.py."""

import random
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import faults_engines
from faults import Outcome, Tally, problems
from faults_engines import IO_PROCESS, Ground, check_remains, kill_io_processes
from faults_log import Entry, RequestLog, Verdict

LOST = Entry("stage", "tp1", "p", None, "the engine is gone")


def outcome(**changes: object) -> Outcome:
    parts: dict[str, object] = {
        "tally": Tally(10, 2, 300),
        "verdict": Verdict(50, 640, (), ()),
        "leaks": [],
        "unsound": [],
        "red": True,
    }
    return Outcome(**{**parts, **changes})  # type: ignore[arg-type]


def test_a_clean_run_passes_and_says_what_it_did() -> None:
    clean = outcome()
    assert clean.passed
    assert not list(problems(clean))
    line = "faults: injected 10, kills 2, fuzzed 300 bytes, requests 50, wrong 0, failed 0, leaked 0"
    assert clean.line() == line


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"verdict": Verdict(50, 640, (LOST,), ())}, "wrong 1, failed 0, leaked 0"),
        ({"verdict": Verdict(50, 640, (), (LOST,))}, "wrong 0, failed 1, leaked 0"),
        ({"leaks": ["4711 io_process"]}, "wrong 0, failed 0, leaked 1"),
        ({"unsound": ["an object"]}, "wrong 1, failed 0, leaked 0"),
    ],
)
def test_whatever_is_found_makes_it_red_and_is_named(changes: dict[str, object], said: str) -> None:
    found = outcome(**changes)
    assert not found.passed
    assert found.line().endswith(said)
    assert len(list(problems(found))) == 1


@pytest.mark.parametrize("changes", [{"red": False}, {"verdict": Verdict(50, 0, (), ())}])
def test_a_run_that_shows_nothing_does_not_pass(changes: dict[str, object]) -> None:
    """The bug on purpose was not seen, or nothing came from a cache."""
    assert not outcome(**changes).passed


class Left:
    """What is looked at of an engine that has ended: the processes that are left of it, and their command lines."""

    def __init__(self, pids: dict[int, str]) -> None:
        self._pids = pids

    def pids(self) -> dict[int, str]:
        return self._pids


@pytest.fixture
def ground(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ground:
    monkeypatch.setattr(faults_engines, "ENDED_S", 0.1)
    monkeypatch.setattr(faults_engines, "REPLACED_S", 0.1)
    return Ground(tmp_path, RequestLog(tmp_path / "log"), {}, random.Random(1))


def test_an_io_process_that_outlives_its_engine_is_a_leak(ground: Ground) -> None:
    with subprocess.Popen(["sleep", "60"]) as other:
        check_remains(ground, Left({other.pid: "VLLM::EngineCore"}))  # type: ignore[arg-type]
        assert ground.leaks == []
        check_remains(ground, Left({other.pid: f"python -m {IO_PROCESS} 3 4 5"}))  # type: ignore[arg-type]
        other.kill()
    assert ground.leaks == [f"{other.pid} python -m {IO_PROCESS} 3 4 5"]


def test_io_processes_that_are_not_replaced_are_told(ground: Ground) -> None:
    assert kill_io_processes(ground, [Left({})], 1) == 0  # type: ignore[list-item]
    assert len(ground.unsound) == 1
