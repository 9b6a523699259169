"""How long loads will take, from those that were made."""

import pytest

from tplayout.staging.speed import LoadSpeed


def learnt(seconds_of, ks, parallel=8, rounds=30):
    speed = LoadSpeed(parallel)
    for _ in range(rounds):
        for k in ks:
            speed.add(seconds_of(k), k)
    return speed


def test_nothing_is_known_at_first():
    speed = LoadSpeed(8)
    assert speed.seconds(3) is None
    assert speed.seconds(0) == 0


def test_a_narrow_store_takes_the_longer_the_more_is_loaded():
    speed = learnt(lambda k: 0.1 * k, (1, 3, 8))
    assert speed.seconds(1) == pytest.approx(0.1)
    assert speed.seconds(8) == pytest.approx(0.8)
    assert speed.seconds(32) == pytest.approx(3.2)


def test_a_store_far_away_serves_many_in_the_time_of_one():
    speed = learnt(lambda k: 0.1, (1, 3, 8))
    assert speed.seconds(1) == pytest.approx(0.1)
    assert speed.seconds(8) == pytest.approx(0.1)
    assert speed.seconds(32) == pytest.approx(0.4)


def test_always_as_many_at_a_time_is_taken_for_a_narrow_store():
    speed = learnt(lambda k: 0.8, (8,))
    assert speed.seconds(8) == pytest.approx(0.8)
    assert speed.seconds(1) == pytest.approx(0.1)


def test_loads_that_wait_for_a_thread_count_as_the_threads_there_are():
    assert learnt(lambda k: 0.8, (100,)).seconds(8) == pytest.approx(0.8)


def test_it_follows_a_store_that_changes():
    speed = learnt(lambda k: 0.1, (1, 8))
    for _ in range(50):
        speed.add(2.0, 8)
    assert speed.seconds(8) > 1.5


def test_a_load_that_does_not_end_counts_only_if_it_takes_longer_than_expected():
    speed = learnt(lambda k: 1.0, (4,), parallel=4)
    speed.late(0.5, 4)
    assert speed.seconds(4) == pytest.approx(1.0)
    speed.late(11.0, 4)
    assert speed.seconds(4) == pytest.approx(3.0)


def test_of_many_loads_that_do_not_end_most_only_wait_for_a_thread():
    speed = learnt(lambda k: 0.1, (4,), parallel=4)
    assert speed.seconds(128) == pytest.approx(3.2)
    speed.late(3.5, 128)
    assert speed.seconds(128) == pytest.approx(3.2, rel=0.1)


def test_noise_never_gives_a_negative_time():
    speed = LoadSpeed(8)
    for seconds, k in ((5.0, 1), (0.01, 8), (4.0, 2), (0.02, 7)):
        speed.add(seconds, k)
        assert all(speed.seconds(count) > 0 for count in (1, 8, 100))
