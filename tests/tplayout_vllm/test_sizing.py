"""The staging pool is sized from the machine, and refused where it cannot be had."""

from pathlib import Path

import pytest

from tplayout.errors import ConfigError
from tplayout_vllm.sizing import allowed_memory, available_memory, io_processes, memory_limit, staging_slots

MIB = 2**20


def test_default_is_a_share_of_what_is_free_and_allowed() -> None:
    assert staging_slots(None, MIB, 1, limit=None or 2**60, available=400 * MIB) == 100
    assert staging_slots(None, MIB, 1, limit=200 * MIB, available=400 * MIB) == 50
    assert staging_slots(None, MIB, 2, limit=200 * MIB, available=400 * MIB) == 25


def test_default_holds_two_chunks_even_when_memory_is_short() -> None:
    assert staging_slots(None, 100 * MIB, 1, limit=2**60, available=200 * MIB) == 2


def test_stated_size_is_kept() -> None:
    assert staging_slots(10 * MIB, MIB, 1, limit=2**60, available=1) == 10


@pytest.mark.parametrize(
    ("wanted", "limit", "said"),
    [(MIB, 2**60, "2 chunks of this model take"), (10 * MIB, 5 * MIB, "has no more than 5242880; lower it")],
)
def test_impossible_sizes_are_refused(wanted: int, limit: int, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        staging_slots(wanted, MIB, 1, limit=limit, available=2**40)


def test_cgroup_limits(tmp_path: Path) -> None:
    assert memory_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path) is None
    (tmp_path / "memory.max").write_text("1048576\n")
    assert memory_limit(tmp_path) == MIB


def test_cgroup_v1_without_a_limit_is_no_limit(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    assert memory_limit(tmp_path) is None


def test_allowed_is_the_smaller_of_cgroup_and_machine(tmp_path: Path) -> None:
    meminfo = "MemTotal: 2048 kB\nMemAvailable: 9 kB\n"
    assert allowed_memory(tmp_path, meminfo) == 2 * MIB
    (tmp_path / "memory.max").write_text("1048576\n")
    assert allowed_memory(tmp_path, meminfo) == MIB
    (tmp_path / "memory.max").write_text("9000000\n")
    assert allowed_memory(tmp_path, meminfo) == 2 * MIB


def test_available_memory() -> None:
    assert available_memory("MemTotal: 9 kB\nMemAvailable:   1024 kB\n") == MIB
    assert available_memory() > 0


@pytest.mark.parametrize(("wanted", "cpus", "count"), [(None, 2, 1), (None, 16, 2), (None, 256, 4), (3, 2, 3)])
def test_io_processes(wanted: int | None, cpus: int, count: int) -> None:
    assert io_processes(wanted, cpus) == count
