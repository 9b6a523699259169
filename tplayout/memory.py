"""How much memory this process may use, and what of it is left: the machine's, and that of its cgroups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tplayout.errors import ConfigError

CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 2**60  # v1 says "no limit" with a huge number


def allowed_memory(root: Path = CGROUPS, meminfo: str | None = None, own: str | None = None) -> int:
    """Bytes that this process may use: what its cgroups allow, at most what the machine has."""
    limits = [limit for limit, _ in _cgroups(root, own)]
    return min([*limits, _meminfo("MemTotal", meminfo)])


def available_memory(root: Path = CGROUPS, meminfo: str | None = None, own: str | None = None) -> int:
    """Bytes that can be had now without swapping, as the kernel says of the machine and of our cgroups."""
    left = [max(0, limit - used) for limit, used in _cgroups(root, own)]
    return min([*left, _meminfo("MemAvailable", meminfo)])


def _cgroups(root: Path, own: str | None) -> list[tuple[int, int]]:
    """(bytes allowed, bytes used) of each limited cgroup, v1 or v2, that this process is in.

    root: where they are mounted. own: the text of /proc/self/cgroup. What the kernel can drop is not used: file pages
    that have not been looked at lately.
    """
    found = []
    for directory in _own_directories(root, own):
        stat = _numbers(directory / "memory.stat")
        for limit_file, usage_file, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            limit = _number(directory / limit_file)
            if limit_file == "memory.limit_in_bytes" and limit is not None:
                limit = min(limit, stat.get("hierarchical_memory_limit", limit))  # of those above, seen or not
            if limit is not None and limit < _UNLIMITED:
                found.append((limit, max(0, (_number(directory / usage_file) or 0) - stat.get(cache, 0))))
    return found


def _own_directories(root: Path, own: str | None) -> Iterator[Path]:
    """Of the cgroups that this process is in and of all above them, as far as they are mounted here.

    A container may see its own cgroup as the root, whatever path /proc shows.
    """
    try:
        lines = (Path("/proc/self/cgroup").read_text() if own is None else own).splitlines()
    except OSError:
        lines = []
    for line in [*lines, "0::/", "0:memory:/"]:
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "memory" if controllers else root
        directory = top / path.lstrip("/")
        if ".." not in directory.parts:
            yield from (level for level in (directory, *directory.parents) if level.is_relative_to(top))


def _number(file: Path) -> int | None:
    """What a file of one number says; None if it says "max", or is not there."""
    try:
        text = file.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _numbers(file: Path) -> dict[str, int]:
    """A file of names and numbers; empty if it is not there."""
    try:
        rows = [line.split() for line in file.read_text().splitlines()]
    except OSError:
        return {}
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdigit()}


def _meminfo(name: str, text: str | None) -> int:
    for line in (Path("/proc/meminfo").read_text() if text is None else text).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"/proc/meminfo has no {name}, so that memory cannot be sized on this system")
