"""Memory is what the machine and the cgroups say, of both versions and however deep."""

from pathlib import Path

from tplayout.memory import allowed_memory, available_memory

MIB = 2**20
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
