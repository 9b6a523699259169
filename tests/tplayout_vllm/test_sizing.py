"""The staging pool is sized from the machine, and refused where it cannot be had."""

import pytest

from tplayout.errors import ConfigError
from tplayout_vllm.sizing import Engines, io_processes, staging_slots

MIB = 2**20


ALONE = Engines(1, 1)


def test_default_is_a_share_of_what_is_free_and_allowed() -> None:
    assert staging_slots(None, MIB, ALONE, limit=2**60, available=400 * MIB) == 100
    assert staging_slots(None, MIB, ALONE, limit=200 * MIB, available=400 * MIB) == 50
    assert staging_slots(None, MIB, Engines(2, 1), limit=200 * MIB, available=400 * MIB) == 25


def test_default_holds_two_chunks_even_when_memory_is_short() -> None:
    assert staging_slots(None, 100 * MIB, ALONE, limit=2**60, available=200 * MIB) == 2


def test_chunks_that_do_not_fit_are_not_called_a_wrong_size() -> None:
    """Nobody has said one."""
    with pytest.raises(ConfigError, match=r"2 chunks of this model take 2097152 bytes.*lower 'chunk_tokens'") as raised:
        staging_slots(None, MIB, ALONE, limit=MIB, available=MIB)
    assert "staging_bytes" not in str(raised.value)


def test_stated_size_is_kept() -> None:
    assert staging_slots(10 * MIB, MIB, ALONE, limit=2**60, available=1) == 10


@pytest.mark.parametrize(
    ("wanted", "limit", "said"),
    [(MIB, 2**60, "2 chunks of this model take"), (10 * MIB, 5 * MIB, "has no more than 5242880; lower it")],
)
def test_impossible_sizes_are_refused(wanted: int, limit: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        staging_slots(wanted, MIB, ALONE, limit=limit, available=2**40)


@pytest.mark.parametrize(("wanted", "cpus", "count"), [(None, 2, 1), (None, 16, 2), (None, 256, 4), (3, 2, 3)])
def test_io_processes(wanted: int | None, cpus: int, count: int) -> None:
    assert io_processes(wanted, cpus) == count


def test_engines_of_a_server_share_the_memory() -> None:
    """vLLM's own configuration, as its engines make it of the server's."""
    from vllm.config import ParallelConfig

    assert Engines.of(ParallelConfig()) == ALONE
    server = ParallelConfig(data_parallel_size=4, data_parallel_size_local=2)
    assert Engines.of(server) == Engines(2, 2)
    server.data_parallel_rank_local = 1
    server.reconfigure_for_independent_dp_rank()
    assert Engines.of(server) == Engines(4, 2)


def test_the_pools_that_are_known_must_fit() -> None:
    assert staging_slots(10 * MIB, MIB, Engines(4, 2), limit=20 * MIB) == 10
    with pytest.raises(ConfigError, match="asks for 31457280 bytes"):
        staging_slots(10 * MIB, MIB, Engines(4, 3), limit=20 * MIB)
