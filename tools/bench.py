"""Measures what the store, the formats and the copies cost, against what the machine and bare clients can do.

    tools/bench.py              one table, in about a minute; README.md shows it
    tools/bench.py --tiny       the same rows in seconds, of no meaning: whether they run

Every row is a ratio of both sides' times in the same run (see bench_measure.py), never a time, and one of bytes: 1.00
is as fast as the other side, less is faster. Copies and digests are compared by the CPU time of their one thread,
everything else by the clock on the wall.
"""

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from bench_measure import TINY, Row, Setting, table_head, table_line
from bench_pages import page_rows
from bench_store import digest_rows, local_rows, miss_rows, reshard_rows, s3_rows

ROOT = Path(__file__).resolve().parent.parent


def rows(setting: Setting, directory: Path) -> Iterator[Row]:
    """All rows, each as soon as it is measured. directory: empty, on the disk to measure."""
    yield from page_rows(setting)
    yield from digest_rows(setting)
    yield from local_rows(setting, directory)
    yield from s3_rows(setting)
    yield from reshard_rows(setting, directory)
    yield from miss_rows(setting, directory)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure copies, digests, stores and lookups, as ratios.")
    parser.add_argument("--tiny", action="store_true", help="tiny data, one run each: whether it works")
    parser.add_argument("--directory", type=Path, default=ROOT / ".bench", help="on the disk to measure (%(default)s)")
    args = parser.parse_args(argv)
    args.directory.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="run-", dir=args.directory))
    try:
        print(table_head(), flush=True)
        for row in rows(TINY if args.tiny else Setting(), directory):
            print(table_line(row), flush=True)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
