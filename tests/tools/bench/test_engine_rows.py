"""Rows of real engines, without engines: what is proven, how steps and memory are counted, what a note says."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from bench import engines, first_token, memory, steps
from bench.engines import COMPUTED, ENGINE, HOST, STORE, NotMeasured, Source, ask, with_engines
from bench.measure import QUICK, TINY, Note, Result, Setting, row_of
from vllm_engine import EngineFailed

ROW = row_of("a", "b", [1.0], [1.0])


class FakeEngine:
    """Answers with a first token after so many seconds, from where it says."""

    def __init__(self, source: Source, seconds: float = 1.0) -> None:
        self.source, self.seconds = source, seconds
        self.counted = [0, 0, 0]

    def submit(self, tokens: list[int], max_tokens: int, **params: Any) -> Any:
        source = self.source
        self.counted = [a + b for a, b in zip(self.counted, (source.supplied, source.read, source.held), strict=True)]
        output = SimpleNamespace(cached=source.cached, first_token_s=self.seconds)
        return SimpleNamespace(result=lambda timeout: output)

    def metrics(self) -> dict[str, float]:
        names = ("external_prefix_cache_hits", "tplayout_loads", "tplayout_host_hits")
        return {f"vllm:{name}_total": float(count) for name, count in zip(names, self.counted, strict=True)}


@pytest.mark.parametrize("source", [COMPUTED, ENGINE, STORE, HOST])
def test_an_answer_counts_only_if_its_prompt_came_from_where_the_row_says(source: Source) -> None:
    running: Any = FakeEngine(source, 0.25)
    for _ in range(2):
        assert ask(running, [1], source).first_token_s == 0.25
    for other in {COMPUTED, ENGINE, STORE, HOST} - {source}:
        with pytest.raises(NotMeasured):
            ask(running, [1], other)


def test_prompts_differ_from_their_first_token_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "_text", lambda: [1, 2, 3])
    assert engines.prompt(0, 6) == [1000, 1, 2, 3, 1, 2]
    assert engines.prompt(7, 3) == [1007, 1, 2]


def test_too_many_chunks_are_as_wrong_as_too_few(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "STORED_S", 0.05)
    (tmp_path / "aa").mkdir()
    (tmp_path / "aa" / "1.safetensors").touch()
    engines.wait_until_stored(tmp_path, 1)
    for count in (0, 2):
        with pytest.raises(NotMeasured, match=f"1 chunks are stored, of {count}"):
            engines.wait_until_stored(tmp_path, count)


def failing(setting: Setting, directory: Path) -> Iterator[Result]:
    yield ROW
    raise EngineFailed(f"it did not start, see {directory}")


def notes(results: Iterator[Result]) -> list[str]:
    return [result.text for result in results if isinstance(result, Note)]


@pytest.mark.parametrize(("setting", "quick"), [(TINY, True), (TINY, False), (QUICK, False)])
def test_short_runs_start_no_engine_and_say_so(tmp_path: Path, setting: Setting, quick: bool) -> None:
    (note,) = notes(with_engines("busy", failing, quick=quick)(setting, tmp_path))
    assert note == "busy: not in this run, since it needs engines and time; measured by `make bench`"


def test_without_vllm_a_note_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: None)
    (note,) = notes(with_engines("busy", failing)(Setting(), tmp_path))
    assert "make setup" in note


def test_an_engine_that_fails_costs_its_rows_and_not_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "find_spec", lambda name: object())
    results = list(with_engines("busy", failing)(Setting(), tmp_path))
    assert results[0] == ROW
    (note,) = notes(iter(results))
    assert "EngineFailed" in note
    assert str(tmp_path) not in note  # it is kept
    assert str(tmp_path) in capsys.readouterr().err


def test_first_tokens_are_compared_with_what_ran_next_to_them() -> None:
    times = first_token.Times([2.0, 4.0], [1.0, 2.0], [3.0, 6.0], [2.0, 4.0], [20.0])
    disk, computed, host = first_token._rows(times, 1, 2)
    assert (disk.ratio, disk.bound) == (2, "≤ 1.5")
    assert (computed.ratio, computed.bound) == (10, None)
    assert (host.ratio, host.bound) == (1.5, "≤ 1.3")
    assert len(list(first_token._rows(times, 4, 2))) == 2
    assert next(first_token._rows(times, 2, 1)).bound == "≤ 1.35"


def step(ended: float, seconds: float, tokens: int = 0, copies: bool = False) -> steps.Step:
    return steps.Step(ended, {"a": seconds}, tokens, copies)


def test_a_step_is_its_part_in_the_scheduler_and_in_the_slowest_rank() -> None:
    scheduler = [step(10, 0.1, 4), step(20, 0.2, 4, copies=True), step(30, 0.3), step(40, 0.4, 4), step(50, 0.5, 4)]
    ranks = [
        [step(5, 9), step(11, 1), step(21, 9), step(31, 9), step(41, 3), step(51, 9)],
        [step(5, 9), step(12, 2), step(22, 9), step(32, 9), step(42, 1)],  # it has not written its last one yet
    ]
    quiet = steps.quiet_steps(scheduler, ranks)
    assert [(planned.seconds, rank.seconds) for planned, rank in quiet] == [(0.1, 2), (0.4, 3)]
    assert steps.profile(quiet) == "rank's a 2500000 µs, scheduler's a 250000 µs"


def test_calls_within_calls_count_once() -> None:
    clock = steps.Clock()
    for _ in range(2):
        with clock.of("a"), clock.of("b"):
            time.sleep(0.005)
    first, second = clock.step(3, copies=True), clock.step()
    assert list(first.calls) == ["a"]
    assert first.seconds >= 0.01
    assert (first.tokens, first.copies, second.seconds, second.tokens) == (3, True, 0, 0)
    assert first.ended <= second.ended


def test_a_line_that_is_cut_off_is_left_out(tmp_path: Path) -> None:
    line = '{"ended": 1, "calls": {"a": 2}, "tokens": 3, "copies": false}\n'
    (tmp_path / "worker-1.jsonl").write_text(line + line[:20])
    (tmp_path / "scheduler-2.jsonl").write_text(line)
    assert steps.read_steps(tmp_path, "worker") == [[step(1, 2, 3)]]


def test_the_peak_of_a_process_is_seen_though_it_passes() -> None:
    pid = os.getpid()
    rest = memory.anonymous(pid)
    with memory.Peaks({"we": pid}) as peaks:
        block = b"\1" * (64 << 20)
        time.sleep(0.1)
        del block
        time.sleep(0.02)
    assert peaks.most["we"] - rest > 32 << 20
    assert memory.anonymous(pid) - rest < 32 << 20
