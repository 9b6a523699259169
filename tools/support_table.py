"""Writes README's table of what works where, from the tests that show it.

    python tools/support_table.py           # prints the table
    python tools/support_table.py --write   # puts it into README.md

A test shows a case of a row with `@pytest.mark.row("row", "case")`; `verdict=` says what happens if it does not simply
work ("refused": a real start of vLLM is refused by name). A row without a test is an error, and so is a test of a row
that is not named here.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

PROJECT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- rows: written by tools/support_table.py -->\n", "<!-- rows: end -->\n"

# In the order of the table.
ROWS = (
    "Grouped-query attention",
    "TP larger than the number of KV heads",
    "Qwen3, Qwen3-MoE, Mistral (all sliding window)",
    "Sliding window + full attention (Gemma-3, GPT-OSS)",
    "KV shared between layers (Gemma-3n)",
    "MLA (DeepSeek-V2)",
    "Pipeline parallel",
    "Data parallel",
    "fp8 KV cache",
    "LoRA",
    "Cache salt",
    "Prompt embeddings",
    "Multimodal items",
    "Speculative decoding",
    "Block sizes and chunk sizes",
    "Chunked prefill and engine settings",
    "Asynchronous scheduling (vLLM's own Scheduler, without an engine: the CPU platform has none)",
    "Cache reset",
    "Sleep mode",
    "Weights updated in place",
    "Page layouts",
    "Recurrent hybrids (Falcon-H1, Qwen3-Next)",
    "Encoder-decoder, cross attention",
    "KV quantised per token and head",
    "KV dtype other than the compute dtype",
    "Context parallel (DCP, PCP)",
    "Several nodes an engine",
)


@dataclass(frozen=True)
class Case:
    """What one test shows. everyday: `make test` runs it, not only `make test-all`."""

    row: str
    text: str
    verdict: str
    file: str
    everyday: bool


class Collector:
    """A pytest plug-in that keeps the marked tests instead of running them."""

    def __init__(self) -> None:
        self.cases: list[Case] = []
        self.errors: list[str] = []

    def pytest_collectreport(self, report: Any) -> None:
        if report.failed:
            self.errors.append(f"{report.nodeid}: {report.longreprtext.splitlines()[-1]}")

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            for mark in item.iter_markers("row"):
                file = item.path.relative_to(PROJECT).as_posix()
                everyday = item.get_closest_marker("slow") is None
                row, text = mark.args
                self.cases.append(Case(row, text, mark.kwargs.get("verdict", "works"), file, everyday))


def collect() -> list[Case]:
    """All cases, in the order of the tests. Raises RuntimeError when tests cannot be collected."""
    collector = Collector()
    arguments = ["--collect-only", "-qq", "-p", "no:cacheprovider", "--rootdir", str(PROJECT), str(PROJECT / "tests")]
    with contextlib.redirect_stdout(io.StringIO()):
        status = pytest.main(arguments, plugins=[collector])
    if status or collector.errors:
        raise RuntimeError("; ".join(collector.errors) or f"pytest ended with {status}")
    return collector.cases


def table(cases: Iterable[Case], rows: Sequence[str] = ROWS) -> str:
    """The table in Markdown. Raises ValueError for a row without a test or a test without a row."""
    cases = list(cases)
    named = {case.row for case in cases}
    if unknown := sorted(named - set(rows)):
        raise ValueError(f"tests are marked with rows that the table does not have: {unknown}")
    if missing := [row for row in rows if row not in named]:
        raise ValueError(f"no test shows {missing}")
    lines = ["| what | | cases | shown by |", "| --- | --- | --- | --- |"]
    for row in rows:
        mine = [case for case in cases if case.row == row]
        for verdict in dict.fromkeys(case.verdict for case in mine):
            lines.append(_line(row, verdict, [case for case in mine if case.verdict == verdict]))
    return "\n".join(lines) + "\n"


def _line(row: str, verdict: str, cases: list[Case]) -> str:
    everyday = {case.text for case in cases if case.everyday}
    texts = dict.fromkeys(case.text if case.text in everyday else f"{case.text} *" for case in cases)
    files = dict.fromkeys(f"[{Path(case.file).stem}]({case.file})" for case in cases)
    return f"| {row} | {verdict} | {'<br>'.join(texts)} | {', '.join(files)} |"


def replaced(readme: str, rows: str) -> str:
    """README with the table in its place. Raises ValueError when the place is not there."""
    head, found, rest = readme.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not found or not end:
        raise ValueError(f"README.md has no {BEGIN.strip()} … {END.strip()}")
    return f"{head}{BEGIN}{rows}{END}{tail}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the table into README.md")
    options = parser.parse_args(arguments)
    try:
        rows = table(collect())
        if options.write:
            readme = PROJECT / "README.md"
            readme.write_text(replaced(readme.read_text(), rows))
        else:
            print(rows, end="")
    except (RuntimeError, ValueError) as error:
        print(f"support_table: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
