"""tools/bench.py: every row that README shows is measured, and a comparison is fair."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "tools"))

import bench_measure
from bench_measure import Setting, compare, row_of, table_head, table_line

ROOT = Path(__file__).resolve().parents[2]
SETTING = Setting(runs=5, least=2, seconds=60.0)


def rows_of(text: str) -> list[list[str]]:
    """The cells of a Markdown table's lines, its two head lines included."""
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]


@pytest.fixture(scope="module")
def measured(tmp_path_factory: pytest.TempPathFactory) -> list[list[str]]:
    """What a tiny run prints."""
    directory = tmp_path_factory.mktemp("bench")
    path = os.pathsep.join([str(ROOT), str(ROOT / "connectors")])
    run = subprocess.run(
        [sys.executable, str(ROOT / "tools" / "bench.py"), "--tiny", "--directory", str(directory)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert list(directory.iterdir()) == []
    return rows_of(run.stdout)


@pytest.mark.s3
def test_readme_shows_the_rows_that_are_measured(measured: list[list[str]]) -> None:
    section = re.search(r"\n## Measured\n(.*?)\n## ", (ROOT / "README.md").read_text(), re.DOTALL)
    assert section
    assert [cells[:2] for cells in rows_of(section[1])] == [cells[:2] for cells in measured]


@pytest.mark.s3
def test_every_row_has_a_ratio(measured: list[list[str]]) -> None:
    ratios = {(what, against): float(ratio) for what, against, ratio, _ in measured[2:]}
    assert len(ratios) == len(measured) - 2 == 18
    assert all(ratio > 0 for ratio in ratios.values())


@pytest.mark.s3
def test_a_shard_is_read_without_the_rest(measured: list[list[str]]) -> None:
    (share,) = [float(ratio) for what, _, ratio, _ in measured[2:] if "bytes read" in what]
    assert share <= 0.5


class Clock:
    """Stands still but for the work."""

    def __init__(self) -> None:
        self.now = 0.0
        self.calls: list[str] = []

    def __call__(self) -> float:
        return self.now

    def work(self, name: str, *seconds: float) -> object:
        """A function that takes these times, one after the other, then the last."""
        left = list(seconds)

        def run() -> None:
            self.calls.append(name)
            self.now += left.pop(0) if len(left) > 1 else left[0]

        return run


def test_sides_take_turns_and_the_first_of_each_does_not_count() -> None:
    clock = Clock()
    ours, other = clock.work("ours", 1000, 2), clock.work("other", 1, 4)
    row = compare("a", "b", ours, other, SETTING, clock, before=clock.work("before", 7))  # type: ignore[arg-type]
    assert (row.ratio, row.low, row.high) == (0.5, 0.5, 0.5)
    assert clock.calls[:8] == ["ours", "other", "before", "other", "ours", "before", "ours", "other"]
    assert clock.calls.count("ours") == clock.calls.count("other") == 6


def test_one_interrupted_run_does_not_count_much() -> None:
    clock = Clock()
    ours, other = clock.work("ours", 2, 2, 99, 2), clock.work("other", 2)
    assert compare("a", "b", ours, other, SETTING, clock).ratio == 1.0  # type: ignore[arg-type]


def test_it_ends_when_the_time_is_over_but_has_a_few_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(bench_measure.time, "monotonic", clock)
    ours, other = clock.work("ours", 50), clock.work("other", 50)
    compare("a", "b", ours, other, SETTING, clock)  # type: ignore[arg-type]
    assert clock.calls.count("ours") == 1 + SETTING.least


def test_the_table_is_aligned_whatever_the_numbers() -> None:
    rows = [row_of("a", "b", [1.0]), row_of("x" * 41, "y" * 32, [500.0, 1234.5])]
    lines = [*table_head().splitlines(), *map(table_line, rows)]
    assert len({len(line) for line in lines}) == 1
    assert all(len(line) <= 120 for line in lines)
    assert rows_of(lines[2]) == [["a", "b", "1.00", "exact"]]
