"""Which tokens have blocks: window layers give theirs back, and the null block is none."""

import pytest

from tplayout_vllm.blocks import Tables

# Canonical group 0 is held by KV-cache groups 1 and 2 (of equal window), group 1 by KV-cache group 0.
TABLES = Tables((8, 4, 4), ((1, 2), (0,)))
IDS = ([5, 6], [0, 7, 8, 9], [0, 3, 0, 4])


@pytest.mark.parametrize(
    ("group", "first", "last", "has"),
    [
        (1, 0, 16, True),
        (1, 0, 17, False),  # there is no third block
        (0, 4, 8, True),
        (0, 5, 7, True),
        (0, 3, 8, False),  # token 3 lies in a null block
        (0, 4, 9, False),  # token 8 does so in one of the two tables
        (0, 12, 16, True),
        (0, 4, 4, True),
    ],
)
def test_has(group: int, first: int, last: int, has: bool) -> None:
    assert TABLES.has(IDS, group, first, last) == has


@pytest.mark.parametrize(
    ("group", "first", "last", "held"),
    [(1, 3, 16, 3), (1, 3, 20, 20), (0, 0, 8, 4), (0, 5, 8, 5), (0, 4, 16, 12), (0, 0, 2, 2)],
)
def test_first_held(group: int, first: int, last: int, held: int) -> None:
    assert TABLES.first_held(IDS, group, first, last) == held


@pytest.mark.parametrize(("group", "token", "start"), [(1, 7, 0), (1, 8, 8), (0, 7, 4), (0, 0, 0)])
def test_block_start(group: int, token: int, start: int) -> None:
    assert TABLES.block_start(group, token) == start


def test_block_start_of_tables_with_different_blocks_is_the_earliest() -> None:
    assert Tables((8, 12), ((0, 1),)).block_start(0, 23) == 12


def test_groups_whose_blocks_end_at_a_token() -> None:
    tables = Tables((16, 32, 8), ((0,), (1,)))  # the third one is a draft's, which is not stored
    assert tables.filled(64) == (0, 1)
    assert tables.filled(48) == (0,)
    assert tables.filled(40) == ()
