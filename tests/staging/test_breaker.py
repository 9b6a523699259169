"""The circuit breaker on a clock that the test turns."""

import logging

import pytest

from tplayout.staging.breaker import Breaker


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def opened(clock):
    breaker = Breaker("loads", clock)
    for _ in range(3):
        breaker.failed("timeout", "slow")
    return breaker


def test_it_opens_after_three_failures_in_a_row_only(clock):
    breaker = Breaker("loads", clock)
    for _ in range(2):
        breaker.failed("timeout", "")
    breaker.succeeded()
    for _ in range(2):
        breaker.failed("timeout", "")
    assert breaker.closed
    assert not breaker.trial()
    breaker.failed("timeout", "")
    assert not breaker.closed
    assert breaker.kind == "timeout"


def test_trials_come_one_at_a_time_and_ever_more_rarely(opened, clock):
    pauses = []
    for _ in range(8):
        asked = clock.now
        while not opened.trial():
            clock.now += 0.5
        assert not opened.trial()
        pauses.append(clock.now - asked)
        opened.failed("unavailable", "")
    assert pauses == [1, 2, 4, 8, 16, 30, 30, 30]


def test_success_closes_it_and_the_next_time_it_starts_anew(opened, clock):
    clock.now = 1.0
    assert opened.trial()
    opened.succeeded()
    assert opened.state == "ok"
    clock.now = 61.0
    for _ in range(3):
        opened.failed("full", "")
    assert opened.state == "suspended (full), next try in 1 s"


def test_a_store_that_comes_and_goes_is_left_alone_for_ever_longer(opened, clock):
    """As one that answers the probe, but none of the objects: it must not be a log line a second."""
    pauses = []
    for _ in range(7):
        asked = clock.now
        while not opened.trial():
            clock.now += 0.5
        pauses.append(clock.now - asked)
        opened.succeeded()
        for _ in range(3):
            opened.failed("forbidden", "")
    assert pauses == [1, 2, 4, 8, 16, 30, 30]


def test_the_kind_is_said_once(clock, caplog):
    for detail in ("full: no space", "no space"):
        Breaker("saves", clock).failed("full", detail, lasting=True)
    assert [record.getMessage().count("full") for record in caplog.records] == [1, 1]


def test_a_trial_without_an_answer_is_repeated(opened, clock):
    clock.now = 1.0
    assert opened.trial()
    assert opened.state == "suspended (timeout), being tried"
    opened.undecided()
    assert opened.trial()


def test_late_failures_of_older_work_do_not_prolong_it(opened, clock):
    clock.now = 0.5
    opened.failed("timeout", "")
    clock.now = 1.0
    assert opened.trial()


def test_what_lasts_opens_it_at_once_until_a_trial_says_otherwise(clock, caplog):
    breaker = Breaker("loads", clock)
    breaker.failed("namespace-differs", "another digest", lasting=True)
    assert breaker.kind == "namespace-differs"
    assert "another digest" in caplog.text
    breaker.succeeded()  # a miss that was asked for before
    assert not breaker.closed
    clock.now = 1.0
    assert breaker.trial()
    breaker.failed("namespace-differs", "another digest", lasting=True)
    clock.now = 3.0
    assert breaker.trial()
    breaker.succeeded()
    assert breaker.closed
    assert len(caplog.records) == 2
    breaker.failed("timeout", "")
    assert breaker.closed  # and that is forgotten


def test_what_lasts_is_said_where_it_is_open_already(opened, caplog):
    opened.failed("namespace-differs", "another digest", lasting=True)
    assert opened.kind == "namespace-differs"
    assert len(caplog.records) == 1


def test_each_change_is_one_line(opened, clock, caplog):
    caplog.set_level(logging.INFO)
    for _ in range(5):
        opened.failed("timeout", "")
    clock.now = 1.0
    opened.trial()
    opened.failed("timeout", "")
    opened.succeeded()
    opened.succeeded()
    assert [record.getMessage() for record in caplog.records] == ["tplayout: the store works again, loads are resumed"]
