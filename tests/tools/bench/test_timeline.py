"""The timeline shows what each thread did, from notes that processes leave in files."""

from __future__ import annotations

import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from bench import timeline
from bench.timeline import Span, Trace, draw, read_spans, rows_of, table

SPANS = [
    Span("front end", 0, 0, "reload", 10.0, 10.2),
    Span("scheduler", 5, 5, "lookup", 10.01, 10.02),
    Span("I/O", 9, 91, "fetch", 10.02, 10.05),
    Span("I/O", 9, 92, "fetch", 10.02, 10.04),
    Span("I/O", 9, 91, "fetch", 10.06, 10.07),
    Span("rank", 7, 7, "permute", 10.1, 10.12),
    Span("rank", 6, 6, "permute", 10.1, 10.13),
]


def test_threads_have_names_in_the_order_of_a_reload() -> None:
    assert list(rows_of(SPANS).values()) == ["front end", "scheduler", "I/O 0", "I/O 1", "rank 0", "rank 1"]
    assert rows_of(SPANS)["rank", 7, 7] == "rank 1"


def test_the_table_sums_by_thread_and_kind() -> None:
    lines = [line.split() for line in table(SPANS).splitlines()]
    assert ["I/O", "0", "fetch", "2", "20.0", "70.0", "40.0"] in lines
    assert ["rank", "0", "permute", "1", "100.0", "130.0", "30.0"] in lines


def test_notes_of_other_times_and_empty_ones_are_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(timeline.SPANS, str(tmp_path))
    trace = Trace("I/O")
    trace.note("fetch", time.monotonic() - 1)
    begin = time.monotonic()
    with trace.span("verify"):
        time.sleep(0.01)
    with trace.span("fetch"):
        pass
    (found,) = read_spans(tmp_path, begin, time.monotonic())
    assert (found.who, found.what) == ("I/O", "verify")
    assert found.end - found.begin >= 0.01


@pytest.mark.skipif(find_spec("matplotlib") is None, reason="NOT TESTED: the picture, as matplotlib is missing")
def test_the_picture_is_drawn(tmp_path: Path) -> None:
    draw(SPANS, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
