"""How fast the engine computes prompts, from its steps."""

import pytest

from tplayout_vllm.prefill_speed import PrefillSpeed


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


def step(speed: PrefillSpeed, clock: Clock, tokens: int, seconds: float, decodes: int = 0) -> None:
    number = speed.began([tokens, *[1] * decodes])
    clock.now += seconds
    speed.ended(number)


def test_nothing_is_known_before_a_step_that_computes_a_prompt(clock: Clock) -> None:
    speed = PrefillSpeed(clock)
    assert speed.seconds(256) is None
    step(speed, clock, 8, 0.1)  # decodes
    assert speed.seconds(256) is None
    step(speed, clock, 512, 1.0)
    assert speed.seconds(256) == pytest.approx(0.5)


def test_steps_that_decode_many_requests_do_not_count(clock: Clock) -> None:
    speed = PrefillSpeed(clock)
    step(speed, clock, 40, 1.0, decodes=100)
    assert speed.seconds(256) is None
    step(speed, clock, 40, 1.0, decodes=10)
    assert speed.seconds(40) == pytest.approx(1.0)


def test_the_time_between_steps_does_not_count(clock: Clock) -> None:
    speed = PrefillSpeed(clock)
    for _ in range(3):
        clock.now += 60.0
        step(speed, clock, 100, 1.0)
    assert speed.seconds(100) == pytest.approx(1.0)


def test_of_two_steps_in_flight_each_counts_for_its_own_time(clock: Clock) -> None:
    speed = PrefillSpeed(clock)
    first = speed.began([100])
    for _ in range(5):
        second = speed.began([100])
        clock.now += 1.0
        speed.ended(first)
        first = second
    assert speed.seconds(100) == pytest.approx(1.0)


def test_the_results_of_an_empty_step_are_not_those_of_the_prompt_behind_it(clock: Clock) -> None:
    speed = PrefillSpeed(clock)
    assert speed.began([]) is None  # a request waits for the store
    number = speed.began([100])
    speed.ended()
    clock.now += 1.0
    speed.ended(number)
    assert speed.seconds(100) == pytest.approx(1.0)


def test_a_step_that_began_behind_decodes_counts_from_their_end(clock: Clock) -> None:
    speed = PrefillSpeed(clock)
    assert speed.began([1] * 8) is None
    number = speed.began([100])
    clock.now += 5.0
    speed.ended()
    clock.now += 1.0
    speed.ended(number)
    assert speed.seconds(100) == pytest.approx(1.0)


def test_it_follows_an_engine_that_becomes_slower(clock: Clock) -> None:
    speed = PrefillSpeed(clock)
    step(speed, clock, 100, 1.0)
    for _ in range(20):
        step(speed, clock, 100, 3.0)
    assert speed.seconds(100) == pytest.approx(3.0, rel=0.01)


def test_results_that_never_come_are_forgotten(clock: Clock) -> None:
    speed = PrefillSpeed(clock)
    for _ in range(100):
        speed.began([100])
    clock.now += 60.0
    speed.ended()
    step(speed, clock, 100, 1.0)
    assert speed.seconds(100) == pytest.approx(1.0)
    assert not speed._running
