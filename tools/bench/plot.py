"""A picture of latest.json: how far each row is from its target."""

from __future__ import annotations

from pathlib import Path
from typing import Any

MISSING = "no plot was drawn: matplotlib is not installed (pip install -e '.[dev]')"
_COLUMNS = 2
_RANGE = (0.1, 10.0)


def margin(row: dict[str, Any]) -> float:
    """By how much a row is better than its target, as a factor; 1 is on it, less misses it. The row has a target."""
    sense, bound = row["target"].split()
    better = row["ratio"] / float(bound)
    return float(better) if sense == "≥" else 1 / max(better, 1e-6)


def draw(results: dict[str, Any], path: Path) -> None:
    """Rows that have a target, in order, as bars from the target on. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    rows = [row for row in results["rows"] if row["target"]]
    height = -(-len(rows) // _COLUMNS)
    figure = Figure(figsize=(13, 1 + 0.17 * height), dpi=100, facecolor="white", layout="constrained")
    for column, axis in enumerate(figure.subplots(1, _COLUMNS, squeeze=False)[0]):
        part = rows[column * height : (column + 1) * height]
        ends = [min(max(margin(row), _RANGE[0]), _RANGE[1]) for row in part]
        colours = ["C2" if row["met"] else "C3" for row in part]
        axis.barh(range(len(part)), [end - 1 for end in ends], left=1, color=colours, height=0.7)
        labels = [f"{row['name']}   {row['ratio']:.2f} ({row['target']})" for row in part]
        axis.set_yticks(range(len(part)), labels, fontsize=7)
        axis.set_ylim(height - 0.5, -0.5)
        axis.set_xscale("log")
        axis.set_xlim(*_RANGE)
        axis.set_xticks([0.1, 0.3, 1, 3, 10], ["10 times\nworse", "3", "target", "3", "10 times\nbetter"], fontsize=7)
        axis.grid(axis="x", color="0.9", lw=0.6)
        axis.axvline(1, color="0.3", lw=0.8)
        axis.set_axisbelow(True)
    machine = results["machine"]
    about = f"{machine['cores']} cores of {machine['cpu']}, {results['date']}, load {machine['load_at_start']}"
    figure.suptitle(f"ratio and target of each row ({about})", fontsize=9)
    figure.savefig(path, metadata={"Software": None})
