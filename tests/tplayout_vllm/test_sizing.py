"""The staging pool is sized from the machine, and refused where it cannot be had."""

from pathlib import Path

import pytest

from tplayout.errors import ConfigError
from tplayout_vllm.sizing import Engines, allowed_memory, available_memory, io_processes, staging_slots

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


MEMINFO = "MemTotal: 1048576 kB\nMemAvailable: 524288 kB\n"  # 1024 and 512 MiB


def cgroup(directory: Path, **files: object) -> Path:
    """A cgroup's directory. files: their content, with "_" for "."."""
    directory.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (directory / name.replace("_", ".", 1)).write_text(f"{content}\n")
    return directory


def sizes(root: Path, own: str = "") -> tuple[int, int]:
    """MiB (allowed, available)."""
    return allowed_memory(root, MEMINFO, own) // MIB, available_memory(root, MEMINFO, own) // MIB


def test_without_a_limit_the_machine_counts(tmp_path: Path) -> None:
    assert sizes(tmp_path / "nowhere") == (1024, 512)
    cgroup(tmp_path, memory_max="max", memory_current=7)
    cgroup(tmp_path / "memory", memory_limit_in_bytes=9223372036854771712, memory_usage_in_bytes=7)
    assert sizes(tmp_path) == (1024, 512)


def test_of_a_limit_counts_what_is_left(tmp_path: Path) -> None:
    """A model's weights are in the same cgroup. Cache that the kernel drops when it must is not used."""
    stat = f"anon {300 * MIB}\nfile {250 * MIB}\ninactive_file {200 * MIB}\nworkingset_refault_anon 5"
    cgroup(tmp_path, memory_max=600 * MIB, memory_current=550 * MIB, memory_stat=stat)
    assert sizes(tmp_path) == (600, 600 - (550 - 200))
    cgroup(tmp_path, memory_max=1200 * MIB, memory_current=100 * MIB)
    assert sizes(tmp_path) == (1024, 512)  # the machine has less
    cgroup(tmp_path, memory_max=50 * MIB, memory_current=300 * MIB)  # less than is used: set while we run
    assert sizes(tmp_path) == (50, 0)


def test_every_cgroup_above_counts(tmp_path: Path) -> None:
    cgroup(tmp_path / "pods", memory_max=300 * MIB, memory_current=250 * MIB)
    cgroup(tmp_path / "pods/ours", memory_max=200 * MIB, memory_current=20 * MIB)
    cgroup(tmp_path / "other", memory_max=MIB)
    assert sizes(tmp_path, "0::/pods/ours\n") == (200, 50)
    assert sizes(tmp_path, "0::/pods\n") == (300, 50)
    assert sizes(tmp_path, "0::/../other\n") == (1024, 512)  # that of another namespace
    # In a container: its cgroup is the root that it sees, and /proc shows the path outside.
    assert sizes(tmp_path / "pods/ours", "0::/pods/ours\n") == (200, 180)


def test_version_1_is_read_nested_too(tmp_path: Path) -> None:
    stat = f"cache 9\nhierarchical_memory_limit {{}}\ntotal_inactive_file {30 * MIB}"
    top = cgroup(tmp_path / "memory", memory_limit_in_bytes=9223372036854771712)
    ours = cgroup(
        top / "docker/ours",
        memory_limit_in_bytes=400 * MIB,
        memory_usage_in_bytes=100 * MIB,
        memory_stat=stat.format(9223372036854771712),
    )
    own = "12:cpuset:/\n5:cpu,cpuacct:/docker\n3:memory:/docker/ours\n1:name=systemd:/x\n"
    assert sizes(tmp_path, own) == (400, 330)
    cgroup(ours, memory_stat=stat.format(150 * MIB))  # a parent that is not mounted here allows less
    assert sizes(tmp_path, own) == (150, 80)
    assert sizes(tmp_path, "3:memory:/docker\n") == (1024, 512)


def test_strange_files_do_no_harm(tmp_path: Path) -> None:
    cgroup(tmp_path, memory_max="-5", memory_stat="inactive_file\nx y z\n\n")
    assert sizes(tmp_path, "nonsense\n0:\n::\n") == (1024, 512)


def test_this_machine_can_be_read() -> None:
    assert 0 < available_memory() <= allowed_memory()


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
