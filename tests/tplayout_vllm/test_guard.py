"""An error in the scheduler's side costs a hit or a save; vLLM's scheduler never sees it."""

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from tplayout_vllm.guard import Guarded
from tplayout_vllm.metadata import StepMetadata, Transfer


class Broken:
    """A side whose every method fails, but for what the guard falls back on."""

    def __init__(self) -> None:
        self.failed: list[str] = []
        self.finished: list[str] = []

    def fail_load(self, request_id: str) -> None:
        self.failed.append(request_id)

    def planned(self) -> StepMetadata:
        return StepMetadata(loads=[Transfer("r", (), (), failed=True)])

    def finish(self, request_id: str) -> None:
        self.finished.append(request_id)
        raise KeyError(request_id)

    def __getattr__(self, name: str) -> Any:
        def broken(*_: object) -> None:
            raise RuntimeError(f"planted in {name}")

        return broken


REQUEST = SimpleNamespace(request_id="r")


@pytest.fixture
def guarded(caplog: pytest.LogCaptureFixture) -> tuple[Guarded, Broken]:
    caplog.set_level(logging.ERROR, "vllm.tplayout")
    side = Broken()
    return Guarded(side), side  # type: ignore[arg-type]


def test_a_request_is_served_without_the_cache(guarded: tuple[Guarded, Broken]) -> None:
    guard, side = guarded
    guard.add(REQUEST, lambda _: 0)
    assert guard.matched(REQUEST, 0) == 0
    assert guard.filled("r") == ()
    assert side.finished == ["r", "r"]


def test_a_load_that_cannot_be_made_is_reported_as_failed(guarded: tuple[Guarded, Broken]) -> None:
    guard, side = guarded
    guard.allocated(REQUEST, ([1],), 256)
    assert side.failed == ["r"]
    guard.allocated(REQUEST, ([1],), 0)
    assert side.failed == ["r"]


def test_a_step_keeps_its_loads(guarded: tuple[Guarded, Broken]) -> None:
    guard, _ = guarded
    assert [transfer.request for transfer in guard.step(SimpleNamespace()).loads] == ["r"]


def test_an_error_in_every_step_is_one_line_a_minute(
    guarded: tuple[Guarded, Broken], caplog: pytest.LogCaptureFixture
) -> None:
    for _ in range(100):
        guarded[0].step(SimpleNamespace())
    assert caplog.text.count("the engine goes on without it") == 1


def test_the_rest_is_logged_and_over(guarded: tuple[Guarded, Broken], caplog: pytest.LogCaptureFixture) -> None:
    guard, _ = guarded
    guard.step_ended({"r"}, set(), None)
    guard.finish("r")
    guard.close()
    assert guard.take_stats().is_empty()
    assert caplog.text.count("the engine goes on without it") == 4
    assert "planted in step_ended" in caplog.text


def test_reset_tells_its_caller(guarded: tuple[Guarded, Broken]) -> None:
    with pytest.raises(RuntimeError, match="planted in reset"):
        guarded[0].reset()
