"""The harness's last line and exit status follow from the verdict. The stages run in tests/e2e/test_faults.py."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from faults import Outcome, Tally, problems
from faults_log import Entry, Verdict

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
