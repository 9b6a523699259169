"""The picture shows how far a row is from its target."""

from __future__ import annotations

import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from bench.measure import Sense, row_of
from bench.plot import draw, margin
from bench.report import Machine, document

RESULTS = document(
    [
        row_of("fast", "b", [1.0], [1.8], Sense.SPEED, 0.9),
        row_of("slow", "b", [6.0], [1.0], Sense.TIME, 3),
        row_of("no digests at all", "b", [1.0], [1.0], Sense.SHARE, 0.15),
        row_of("no target", "b", [6.0], [1.0]),
    ],
    [],
    "quick",
    Machine("a CPU", 2, 23.5, 1.0),
)


def test_more_is_better_whatever_the_sense() -> None:
    rows = RESULTS["rows"]
    assert margin(rows[0]) == pytest.approx(2)
    assert margin(rows[1]) == pytest.approx(0.5)
    assert margin(rows[2]) > 10


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="NOT TESTED: plots, since matplotlib is not installed")
def test_it_is_drawn(tmp_path: Path) -> None:
    draw(RESULTS, tmp_path / "latest.png")
    assert (tmp_path / "latest.png").read_bytes().startswith(b"\x89PNG")
