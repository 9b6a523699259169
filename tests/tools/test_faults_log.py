"""The verdict over a log of requests: what is wrong, what failed, what is excused."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from faults_log import TOLERANCE, Answer, Entry, RequestLog, decided, judge

COLD = {"p": Answer([1, 2], [{"1": -0.5, "9": -3.0}, {"2": -0.25, "8": -2.0}])}
SLOWEST_S = 10.0


def entry(answer: Answer | None, **more: object) -> Entry:
    return Entry("stage", "tp1", "p", answer, **more)  # type: ignore[arg-type]


def test_a_log_gives_back_what_was_added(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log")
    entries = [entry(COLD["p"], cached=64, seconds=0.5), entry(None, error="the engine\nis gone", excused=True)]
    for each in entries:
        log.add(each)
    assert log.read() == entries


def test_the_cold_answer_passes() -> None:
    verdict = judge([entry(COLD["p"], cached=64), entry(COLD["p"])], COLD, SLOWEST_S)
    assert (verdict.requests, verdict.cached_tokens, verdict.wrong, verdict.failed) == (2, 64, (), ())


@pytest.mark.parametrize(
    "answer",
    [
        Answer([1, 3], COLD["p"].logprobs),
        Answer([1], COLD["p"].logprobs[:1]),
        Answer([1, 2], []),
        Answer([1, 2], [{"1": -0.5 - 2 * TOLERANCE, "9": -3.0}, {"2": -0.25}]),
        Answer([1, 2], [{"1": float("nan"), "9": -3.0}, {"2": -0.25}]),
    ],
    ids=["another token", "too short", "no log-probabilities", "another log-probability", "not a number"],
)
def test_other_answers_are_wrong(answer: Answer) -> None:
    assert judge([entry(answer)], COLD, SLOWEST_S).wrong == (entry(answer),)


def test_an_answer_is_decided_where_every_token_leads_by_more_than_rounding() -> None:
    assert decided(COLD["p"])
    assert not decided(Answer([1, 2], [{"1": -0.5, "9": -3.0}, {"2": -0.25, "7": -0.25 - TOLERANCE}]))


def test_no_answer_is_a_failure_unless_its_server_was_killed() -> None:
    verdict = judge([entry(None, error="a"), entry(None, error="b", excused=True)], COLD, SLOWEST_S)
    assert [each.error for each in verdict.failed] == ["a"]


def test_a_request_that_hung_has_failed() -> None:
    assert len(judge([entry(COLD["p"], seconds=SLOWEST_S + 1)], COLD, SLOWEST_S).failed) == 1


def test_a_prompt_without_a_cold_answer_is_not_passed_over() -> None:
    with pytest.raises(KeyError):
        judge([Entry("stage", "tp1", "unknown", COLD["p"])], COLD, SLOWEST_S)
