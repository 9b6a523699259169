"""tools/bench: every row is measured and kept, README names rows that there are, and nothing tells the machine."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]


def bench(*arguments: str, path: Path | None = None) -> subprocess.CompletedProcess[str]:
    """Run it as the Makefile does, with a folder of modules in front."""
    places = [*([path] if path else []), ROOT / "tools", ROOT, ROOT / "connectors"]
    return subprocess.run(
        [sys.executable, "-m", "bench", *arguments],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )


@pytest.fixture(scope="module")
def kept(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The results of a tiny run of everything."""
    results, work = tmp_path_factory.mktemp("results"), tmp_path_factory.mktemp("work")
    run = bench("--tiny", "--directory", str(work), "--results", str(results))
    assert run.returncode == 0, run.stderr
    assert list(work.iterdir()) == []
    assert "targets met" in run.stdout
    return results


@pytest.fixture(scope="module")
def rows(kept: Path) -> list[dict[str, Any]]:
    return json.loads((kept / "latest.json").read_text())["rows"]  # type: ignore[no-any-return]


@pytest.mark.s3
def test_every_row_has_both_sides_a_ratio_and_a_verdict(rows: list[dict[str, Any]]) -> None:
    assert len({row["name"] for row in rows}) == len(rows) > 80
    for row in rows:
        assert {"name", "ours", "other", "ratio", "target", "met"} <= row.keys()
        assert row["ours"] > 0
        assert row["other"] > 0
        assert (row["target"] is None) == (row["met"] is None)
        assert row["target"] is None or re.fullmatch(r"[≤≥] [\d.]+", row["target"])


@pytest.mark.s3
def test_every_theme_of_the_benchmark_is_there(rows: list[dict[str, Any]]) -> None:
    names = "\n".join(row["name"] for row in rows)
    both, found = ("publish", "fetch"), ("hit", "half", "miss")
    for words in (
        *(f"{verb} pages: vec {part}, blocks of 256, 1 thread" for verb in ("save", "load") for part in "KV"),
        *(f"pages: {kind}, blocks of 16, 2 threads" for kind in ("NHD", "HND")),
        "share of digests in a warm local load, without a secret",
        "share of digests in a warm local load, with a secret",
        *(f"{verb} 0.062 MiB chunks, {where}" for verb in both for where in ("local disk", "S3 (rclone)")),
        *(f"longest_prefix, {what}, 4 chunks, S3 with 20 ms latency" for what in found),
        *(f"staging lookup, {what}, 4 chunks, local disk" for what in found),
        "TP=4 to 2: save on 4 ranks",
        "TP=4 to 2: load on 2 ranks, verified",
        *(f"{what}, store of 8 chunks" for what in ("publish", "ls by chunk", "gc (plan) by chunk", "verify by chunk")),
    ):
        assert words in names


@pytest.mark.s3
def test_a_shard_is_read_without_the_rest(rows: list[dict[str, Any]]) -> None:
    (share,) = [row["ratio"] for row in rows if "bytes read" in row["name"]]
    assert share <= 0.5


@pytest.mark.s3
def test_what_is_kept_says_what_machine_but_not_which(kept: Path) -> None:
    text = (kept / "latest.json").read_text()
    document = json.loads(text)
    assert document["machine"]["cores"] >= 1
    assert document["machine"]["memory_gib"] > 0
    assert document["versions"].keys() >= {"python", "tplayout", "torch", "s3fs"}
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", document["date"])
    assert socket.gethostname() not in text
    assert str(ROOT) not in text


@pytest.mark.s3
def test_readme_shows_rows_that_are_measured_with_their_targets(rows: list[dict[str, Any]]) -> None:
    section = re.search(r"\n## Measured\n(.*?)\n## ", (ROOT / "README.md").read_text(), re.DOTALL)
    assert section
    table = [line.split("|")[1:-1] for line in section[1].splitlines() if line.startswith("| ")][2:]
    shown = {_plain(name.strip()): target.strip() for name, _, _, target in table}
    assert shown
    latest = ROOT / "tools" / "bench" / "results" / "latest.json"  # has rows of engines too, which a tiny run has not
    known = rows + (json.loads(latest.read_text())["rows"] if latest.exists() else [])
    assert shown.items() <= {(_plain(row["name"]), row["target"] or "") for row in known}


def _plain(name: str) -> str:
    """A row's name without the number and the size of chunks, which depend on the setting."""
    return re.sub(r"[\d.,]+ (MiB )?chunks", "chunks", name)


def test_without_matplotlib_the_results_are_kept_and_a_line_says_why_there_is_no_plot(tmp_path: Path) -> None:
    (tmp_path / "matplotlib.py").write_text("raise ImportError('not installed')\n")
    code = (
        "from pathlib import Path; from bench.__main__ import keep; from bench.measure import row_of; "
        "from bench.report import Machine; "
        f"keep([row_of('a', 'b', [1.0], [2.0], target=0.9)], [], 'quick', Machine.this(), Path({str(tmp_path)!r}))"
    )
    (tmp_path / "latest.png").write_bytes(b"of an older run")
    places = [tmp_path, ROOT / "tools", ROOT, ROOT / "connectors"]
    run = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, places))},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout == "no plot was drawn: matplotlib is not installed (pip install -e '.[dev]')\n"
    assert json.loads((tmp_path / "latest.json").read_text())["rows"][0]["met"] is True
    assert not (tmp_path / "latest.png").exists()


def test_an_unknown_theme_is_refused_in_one_line() -> None:
    run = bench("--only", "nothing")
    assert run.returncode == 2
    assert "invalid choice: 'nothing'" in run.stderr
    assert "Traceback" not in run.stderr
