"""Which chunks go first: least recently used, tails before heads, what is behind a gap before everything."""

import random

from tplayout.cache.pruning import Chunk, link, victims
from tplayout.format.keys import ROOT


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def chunk(number: int, parent: int | None, used: float = 0.0, stays: bool = False) -> Chunk:
    """parent: 0 for the first of a prefix."""
    made = Chunk(key(number), parent=None if parent is None else key(parent) if parent else ROOT, stays=stays)
    made.add(f"object {number}", 1, used, used)
    return made


def order(*chunks: Chunk, **options: float) -> list[int]:
    link(chunks)
    return [int.from_bytes(each.key, "big") for each in victims(chunks, **options)]


def test_a_tail_goes_before_its_head_although_heads_are_touched_first() -> None:
    assert order(chunk(1, 0, 1.0), chunk(2, 1, 1.1), chunk(3, 2, 1.2)) == [3, 2, 1]


def test_of_two_prefixes_the_one_that_was_used_earlier_goes_first() -> None:
    assert order(chunk(1, 0, 1.0), chunk(2, 1, 5.0), chunk(3, 1, 4.0), chunk(4, 0, 3.0)) == [4, 3, 2, 1]


def test_what_is_behind_a_gap_goes_first_and_so_does_what_nobody_can_place() -> None:
    assert order(chunk(1, 0, 1.0), chunk(3, 2, 9.0), chunk(4, 3, 9.0), chunk(5, None, 8.0)) == [5, 4, 3, 1]


def test_a_gap_that_may_be_filled_in_a_moment_does_not_count() -> None:
    assert order(chunk(1, 0, 1.0), chunk(3, 2, 9.0), young=8.0) == [1, 3]
    assert order(chunk(1, 0, 1.0), chunk(3, 2, 9.0), young=10.0) == [3, 1]


def test_what_stays_keeps_all_that_comes_before_it() -> None:
    assert order(chunk(1, 0), chunk(2, 1), chunk(3, 2, stays=True), chunk(4, 3), chunk(5, 2)) == [4, 5]


def test_a_damaged_store_in_which_chunks_follow_each_other_in_a_circle_ends() -> None:
    assert sorted(order(chunk(1, 2), chunk(2, 1), chunk(3, 3))) == [1, 2, 3]


def test_no_order_of_going_ever_leaves_a_gap() -> None:
    draw = random.Random(3)
    for _ in range(50):
        numbers = range(1, 30)
        chunks = [chunk(number, draw.randrange(number), draw.random()) for number in numbers]
        parents = {int.from_bytes(each.key, "big"): int.from_bytes(each.parent or b"", "big") for each in chunks}
        draw.shuffle(chunks)
        left = set(numbers)
        for victim in order(*chunks):
            left.remove(victim)
            assert all(parents[number] in left or not parents[number] for number in left)
