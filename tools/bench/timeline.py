"""Where the time of one reload goes: a table and a picture of what each process does, from a run of a real engine.

    make bench-timeline     tools/bench/results/timeline.png: TP=1 wrote, TP=2 reads from local disk

The connector and its I/O processes are those of the product, with notes around their calls (traced_connector.py,
traced_io.py). The front end's row is the whole request, from its submission to its first token.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from vllm_engine import Engine, engine

from bench.engines import (
    CHUNK,
    COMPUTED,
    PREFIX,
    PROMPT,
    WARM_UP,
    NotMeasured,
    ask,
    engine_args,
    forget,
    importable,
    offload,
    prompt,
    wait_until_stored,
    warm_up,
)
from bench.plot import MISSING

ROOT = Path(__file__).resolve().parents[2]
PICTURE = Path(__file__).resolve().parent / "results" / "timeline.png"
SPANS = "BENCH_SPANS"  # environment: the directory where processes note what they do
WROTE, READS = 1, 2
RELOADS = 5  # the last one is shown
SHORTEST_S = 0.0002  # a step without a forward pass
COLOURS = {
    "reload": "0.6",
    "lookup": "C3",
    "wait": "C7",
    "load step": "C4",
    "fetch": "C0",
    "verify": "C1",
    "permute": "C2",
    "compute": "C5",
}


@dataclass(frozen=True)
class Span:
    """What a thread of a process did, from when to when by the monotonic clock."""

    who: str
    pid: int
    thread: int
    what: str
    begin: float
    end: float


class Trace:
    """Notes of this process, in a file of its own: a line at a time, since engines are killed."""

    def __init__(self, who: str) -> None:
        self._who = who
        self._file = (Path(os.environ[SPANS]) / f"{who.replace('/', '')}-{os.getpid()}.jsonl").open("a", buffering=1)

    def note(self, what: str, begin: float) -> None:
        """It ends now."""
        span = Span(self._who, os.getpid(), threading.get_native_id(), what, begin, time.monotonic())
        self._file.write(json.dumps(asdict(span)) + "\n")

    @contextlib.contextmanager
    def span(self, what: str) -> Iterator[None]:
        """It takes as long as the block."""
        begin = time.monotonic()
        try:
            yield
        finally:
            self.note(what, begin)


def trace_reload(directory: Path) -> list[Span]:
    """The spans of one reload, in the order of their begins."""
    store, spans = directory / "store", directory / "spans"
    spans.mkdir()
    with engine(engine_args(WROTE, **offload(store)), directory / "wrote.log") as running:
        ask(running, prompt(1), COMPUTED)
        wait_until_stored(store, PREFIX // CHUNK)
    args = engine_args(READS, **offload(store, "TracedConnector", "bench.traced_connector"))
    with engine(args, directory / "reads.log", env={SPANS: str(spans), **importable()}) as running:
        warm_up(running)
        wait_until_stored(store, (PREFIX + WARM_UP) // CHUNK)
        reload = [_reload(running) for _ in range(RELOADS)][-1]
    found = read_spans(spans, reload.begin, reload.end)
    fetched = sum(span.what == "fetch" for span in found)
    if fetched != PREFIX // CHUNK:
        raise NotMeasured(f"{fetched} chunks were fetched, not {PREFIX // CHUNK}")
    return [reload, *found]


def _reload(running: Engine) -> Span:
    forget(running, host=True)
    begin = time.monotonic()
    output = running.submit(prompt(1), 1, logprobs=None).result()
    if output.cached != PREFIX:
        raise NotMeasured(f"{output.cached} tokens were reloaded, not {PREFIX}")
    return Span("front end", 0, 0, "reload", begin, begin + output.first_token_s)


def read_spans(directory: Path, begin: float, end: float) -> list[Span]:
    """What was noted within that time."""
    lines = [line for path in directory.glob("*.jsonl") for line in path.read_text().splitlines(keepends=True)]
    spans = [Span(**json.loads(line)) for line in lines if line.endswith("\n")]
    shown = [span for span in spans if begin <= span.begin < end and span.end - span.begin > SHORTEST_S]
    return sorted(shown, key=lambda span: span.begin)


def rows_of(spans: Sequence[Span]) -> dict[tuple[str, int, int], str]:
    """A name for each thread that has spans, in the order in which they are drawn: ("rank 0", "I/O, thread 2")."""
    order = ["front end", "scheduler", "I/O", "rank"]
    threads = sorted({(order.index(span.who), span.pid, span.thread) for span in spans})
    names, counts = {}, dict.fromkeys(order, 0)
    for index, pid, thread in threads:
        who = order[index]
        numbered = sum(other[0] == index for other in threads) > 1
        names[who, pid, thread] = f"{who} {counts[who]}" if numbered else who
        counts[who] += 1
    return names


def table(spans: Sequence[Span]) -> str:
    """By thread and kind: how often, when the first begins and the last ends, and how long all are together, in ms."""
    zero = spans[0].begin
    lines = [f"{'':14}{'':12}{'times':>6}{'from ms':>10}{'to ms':>10}{'sum ms':>10}"]
    for key, name in rows_of(spans).items():
        own = [span for span in spans if (span.who, span.pid, span.thread) == key]
        for what in dict.fromkeys(span.what for span in own):
            these = [span for span in own if span.what == what]
            begin, end = these[0].begin - zero, max(span.end for span in these) - zero
            total = sum(span.end - span.begin for span in these)
            numbers = "".join(f"{1000 * value:10.1f}" for value in (begin, end, total))
            lines.append(f"{name:14}{what:12}{len(these):6}{numbers}")
    return "\n".join(lines)


def draw(spans: Sequence[Span], path: Path) -> None:
    """A row a thread. Raises ImportError without matplotlib."""
    from matplotlib.figure import Figure

    names = rows_of(spans)
    places = {key: place for place, key in enumerate(names)}
    zero = spans[0].begin
    figure = Figure(figsize=(11, 1.2 + 0.35 * len(names)), dpi=100, facecolor="white", layout="constrained")
    axis = figure.subplots()
    for what, colour in COLOURS.items():
        these = [span for span in spans if span.what == what]
        axis.barh(
            [places[span.who, span.pid, span.thread] for span in these],
            [1000 * (span.end - span.begin) for span in these],
            left=[1000 * (span.begin - zero) for span in these],
            height=0.7,
            color=colour,
            edgecolor="white",
            linewidth=0.4,
            label=what,
        )
    axis.set_yticks(range(len(names)), list(names.values()), fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("ms since the request", fontsize=8)
    axis.tick_params(axis="x", labelsize=8)
    axis.grid(axis="x", color="0.9", lw=0.6)
    axis.set_axisbelow(True)
    axis.legend(ncols=len(COLOURS), fontsize=8, loc="lower center", bbox_to_anchor=(0.5, 1), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Software": None})


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench-timeline", description="Show where the time of a reload goes.")
    parser.add_argument("--directory", type=Path, default=ROOT / ".bench", help="on the disk to measure (%(default)s)")
    parser.add_argument("--picture", type=Path, default=PICTURE, help="what is drawn (%(default)s)")
    args = parser.parse_args(argv)
    args.directory.mkdir(parents=True, exist_ok=True)
    directory = Path(tempfile.mkdtemp(prefix="timeline-", dir=args.directory))
    try:
        spans = trace_reload(directory)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    print(f"reload of {PREFIX:,} of {PROMPT:,} tokens from local disk, TP={WROTE} to {READS}")
    print(table(spans))
    try:
        draw(spans, args.picture)
    except ImportError:
        print(MISSING)
    return 0


if __name__ == "__main__":
    sys.exit(main())
