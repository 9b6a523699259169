"""The scheduler's side reports increases, each once, and looks at all slots once a second."""

from types import SimpleNamespace
from typing import Any

import pytest

from tplayout_vllm import report
from tplayout_vllm.report import Report


class FakeStager:
    """Counts what it is told to, and how often all slots are looked at."""

    def __init__(self) -> None:
        self.now: dict[str, Any] = {"loads": 0, "save_skips": {}, "save_errors": {}, "load_errors": {}, "lookups": {}}
        self.plan = SimpleNamespace(slots=10)
        self.health = {"loads": "ok", "saves": "ok", "io": "ok"}
        self.looks = 0

    def counters(self) -> dict[str, Any]:
        return {**self.now}

    def snapshot(self) -> dict[str, Any]:
        self.looks += 1
        slots = {"filling": 1, "loading": 2, "publishing": 0, "limbo": 1, "clean": 5, "pinned": 3, "used": 4}
        return {**self.now, "slots": slots}


def test_increases_are_reported_once() -> None:
    stager = FakeStager()
    given = Report(stager)
    assert given.take({}, {}).data["counters"] == {}
    stager.now.update(loads=3, save_skips={"no-slot": 2}, load_errors={"timeout": 1})
    stats = given.take({"idle_steps": 7}, {"lora": 1})
    assert stats.data["counters"] == {"loads": 3, "idle_steps": 7}
    assert stats.data["skips"] == {"save-no-slot": 2, "load-error-timeout": 1, "request-lora": 1}
    stager.now["loads"] = 4
    again = given.take({"idle_steps": 7}, {"lora": 1})
    assert (again.data["counters"], again.data["skips"]) == ({"loads": 1}, {})


def test_gauges_come_once_a_second(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(report.time, "monotonic", lambda: clock.now)
    stager = FakeStager()
    given = Report(stager)
    wanted = {"staging_slots": 10, "staging_used": 4, "staging_clean": 5, "store_healthy": 1.0}
    assert given.take({}, {}).data["gauges"] == wanted
    clock.now += 0.9
    assert given.take({}, {}).is_empty()
    clock.now += 0.2
    stager.health["saves"] = "suspended (full), next try in 3 s"
    assert given.take({}, {}).data["gauges"] == {**wanted, "store_healthy": 0.0}
    assert stager.looks == 2
