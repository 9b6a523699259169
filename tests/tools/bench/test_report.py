"""The table is aligned whatever the numbers, and the results are what was measured."""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from bench.measure import Sense, row_of
from bench.report import Machine, document, summary, table_head, table_line, write

ROWS = [
    row_of("a", "b", [1.0], [1.0]),
    row_of("x" * 62, "y" * 28, [2.0, 4.0], [1.0, 3.0], Sense.SPEED, 0.9),
    row_of("c", "d", [300.0], [100.0], Sense.TIME, 3, unit="B"),
]
MACHINE = Machine("a CPU", 2, 23.5, 1.0)


def test_the_table_is_aligned_whatever_the_numbers() -> None:
    lines = [*table_head().splitlines(), *map(table_line, ROWS)]
    assert len({len(line) for line in lines}) == 1
    assert [cell.strip() for cell in lines[2].strip("|").split("|")] == ["a", "b", "1.00", "exact", "", ""]
    assert [cell.strip() for cell in lines[4].strip("|").split("|")] == ["c", "d", "3.00", "exact", "≤ 3", "yes"]


def test_the_summary_counts_rows_with_a_target() -> None:
    assert summary(ROWS) == "1 of 2 targets met, 1 rows have none"


def test_the_results_are_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "new" / "latest.json"
    write(path, document(ROWS, ["a note"], "quick", MACHINE))
    kept = json.loads(path.read_text())
    assert [path.name for path in path.parent.iterdir()] == ["latest.json"]
    assert (kept["mode"], kept["notes"], kept["machine"]["cpu"]) == ("quick", ["a note"], "a CPU")
    assert kept["rows"][0] == {
        "name": "a",
        "against": "b",
        "unit": "s",
        "ours": 1.0,
        "other": 1.0,
        "ratio": 1.0,
        "quartiles": [1.0, 1.0],
        "target": None,
        "met": None,
    }
    assert [(row["ratio"], row["target"], row["met"]) for row in kept["rows"][1:]] == [
        (0.625, "≥ 0.9", False),
        (3.0, "≤ 3", True),
    ]
