"""A bounded part of `make faults`: under a running vLLM too no answer is wrong, no request fails, nothing stays."""

from pathlib import Path

import pytest
from faults import QUICK, problems, run


def test_a_little_of_every_fault(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    outcome = run(QUICK, seed=20, directory=tmp_path, say=said.append)
    assert not list(problems(outcome)), said
    assert outcome.red, "an engine with a bug on purpose was not found out"
    assert outcome.passed, said
    assert outcome.tally.injected >= QUICK.at_cache + QUICK.on_files
    assert outcome.tally.kills == QUICK.io_kills
