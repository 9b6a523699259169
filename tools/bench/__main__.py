"""Measures what the store, the formats and the copies cost, against what the machine and bare clients can do.

    make bench                  everything, in half an hour; writes tools/bench/results/latest.json and latest.png
    make bench-quick            the same with fewer rounds and smaller stores, in five minutes
    PYTHONPATH=tools python -m bench --only disk    some rows, which are printed and not kept
    PYTHONPATH=tools python -m bench --tiny         the same rows in seconds, of no meaning: whether they run

Every row compares two sides that ran in turn (measure.py), and has a target where one was set. Copies and digests on
one thread are compared by its CPU time, everything else by the clock on the wall. A missed target is no error.

A theme is a module with a function of rows. Those of ENGINE_THEMES start real vLLM engines (engines.py).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bench import plot, report
from bench.busy import busy_rows
from bench.digests import digest_rows
from bench.disk import disk_rows
from bench.engines import Rows, with_engines
from bench.first_token import first_token_rows
from bench.growth import growth_rows
from bench.lookups import lookup_rows
from bench.measure import QUICK, TINY, Note, Result, Row, Setting
from bench.memory import memory_rows
from bench.pages import page_rows
from bench.reshard import reshard_rows
from bench.s3 import s3_rows
from bench.steps import step_rows

ROOT = Path(__file__).resolve().parents[2]
RESULTS = Path(__file__).resolve().parent / "results"

ENGINE_THEMES = {
    "first-token": with_engines("first-token", first_token_rows, quick=True),
    "busy": with_engines("busy", busy_rows),
    "steps": with_engines("steps", step_rows),
    "memory": with_engines("memory", memory_rows),
}
THEMES: dict[str, Rows] = {
    "pages": lambda setting, _: page_rows(setting),
    "digests": digest_rows,
    "disk": disk_rows,
    "s3": lambda setting, _: s3_rows(setting),
    "lookups": lookup_rows,
    "reshard": reshard_rows,
    "growth": growth_rows,
    **ENGINE_THEMES,
}


def measured(themes: Sequence[str], setting: Setting, place: Path) -> Iterator[Result]:
    """All rows of these themes, each as soon as it is measured. place: where a directory on the disk is made."""
    place.mkdir(parents=True, exist_ok=True)
    for theme in themes:
        directory = Path(tempfile.mkdtemp(prefix=f"{theme}-", dir=place))
        try:
            yield from THEMES[theme](setting, directory)
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def show(results: Iterator[Result]) -> tuple[list[Row], list[str]]:
    """Print rows and notes; return both."""
    rows: list[Row] = []
    notes: list[str] = []
    print(report.table_head(), flush=True)
    for result in results:
        if isinstance(result, Note):
            notes.append(result.text)
        else:
            rows.append(result)
            print(report.table_line(result), flush=True)
    print("\n".join(("", report.summary(rows), *notes)), flush=True)
    return rows, notes


def keep(rows: Sequence[Row], notes: Sequence[str], mode: str, machine: report.Machine, directory: Path) -> None:
    """Write latest.json, and latest.png where it can be drawn; a picture of another run goes."""
    results = report.document(rows, notes, mode, machine)
    report.write(directory / "latest.json", results)
    picture = directory / "latest.png"
    picture.unlink(missing_ok=True)
    try:
        plot.draw(results, picture)
    except ImportError:
        print(plot.MISSING, flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench", description="Measure what caching costs, as ratios.")
    size = parser.add_mutually_exclusive_group()
    size.add_argument("--quick", action="store_true", help="fewer rounds, smaller stores: five minutes at most")
    size.add_argument("--tiny", action="store_true", help="tiny data, one round each: whether it works")
    parser.add_argument("--only", choices=THEMES, action="append", help="this theme only, without keeping results")
    parser.add_argument("--directory", type=Path, default=ROOT / ".bench", help="on the disk to measure (%(default)s)")
    parser.add_argument("--results", type=Path, default=RESULTS, help="where latest.json is kept (%(default)s)")
    args = parser.parse_args(argv)
    setting, mode = (TINY, "tiny") if args.tiny else (QUICK, "quick") if args.quick else (Setting(), "all")
    machine = report.Machine.this()
    rows, notes = show(measured(args.only or list(THEMES), setting, args.directory))
    if not args.only and (not args.tiny or args.results != RESULTS):
        keep(rows, notes, mode, machine, args.results)
    return 0


if __name__ == "__main__":
    sys.exit(main())
