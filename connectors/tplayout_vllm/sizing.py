"""How much host memory staging may take: what the user says, else a share of what is free and allowed.

Layer: scheduler side; reads /proc and the cgroup, imports neither vLLM nor torch.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tplayout.errors import ConfigError

# A quarter: the engine allocates more after its start (activations, caches of its own), and staging is only a
# buffer in front of the store.
SHARE = 0.25
LARGEST_DEFAULT = 64 * 2**30
FEWEST_SLOTS = 2  # one to save from, one to load into


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
    raise ConfigError(f"/proc/meminfo has no {name}, so that staging memory cannot be sized on this system")


@dataclass(frozen=True)
class Engines:
    """Engines of one data-parallel server on this machine, each with a pool of its own: at most, and known to be."""

    most: int
    known: int

    @classmethod
    def of(cls, parallel: Any) -> Engines:
        """From vLLM's parallel configuration, as an engine sees it.

        Engines of a dense model share nothing, and vLLM tells each that it is alone: what is left of the truth is its
        number on this machine, and the number of all engines on all machines as a limit of something else.
        """
        if parallel.data_parallel_size > 1:
            return cls(parallel.data_parallel_size_local, parallel.data_parallel_size_local)
        known = max(0, parallel.data_parallel_rank_local or 0) + 1
        return cls(max(known, getattr(parallel, "elastic_ep_max_dp_size", None) or 1), known)


def staging_slots(
    wanted: int | None, slot_bytes: int, engines: Engines, limit: int | None = None, available: int | None = None
) -> int:
    """Slots of the staging pool.

    wanted: bytes from the options. engines: those of this server that each have a pool. Raises ConfigError when a
    chunk does not fit twice, or when the pools of the engines that are known are larger than the memory allowed.
    """
    limit = allowed_memory() if limit is None else limit
    if wanted is None:
        free = min(limit, available_memory() if available is None else available)
        wanted = max(FEWEST_SLOTS * slot_bytes, int(min(free * SHARE, LARGEST_DEFAULT) / engines.most))
    elif wanted < FEWEST_SLOTS * slot_bytes:
        raise ConfigError(
            f"kv_connector_extra_config: 'staging_bytes' is {wanted}, but {FEWEST_SLOTS} chunks of this model take "
            f"{FEWEST_SLOTS * slot_bytes} bytes; raise it or lower 'chunk_tokens'"
        )
    if FEWEST_SLOTS * slot_bytes * engines.known > limit:
        raise ConfigError(
            f"kv_connector_extra_config: {FEWEST_SLOTS} chunks of this model take {FEWEST_SLOTS * slot_bytes} bytes of "
            f"host memory for each engine, and this machine or its cgroup has no more than {limit}; "
            "lower 'chunk_tokens' or raise the limit"
        )
    if wanted * engines.known > limit:
        raise ConfigError(
            f"kv_connector_extra_config: 'staging_bytes' asks for {wanted * engines.known} bytes of host memory, but "
            f"this machine or its cgroup has no more than {limit}; lower it or raise the limit"
        )
    return wanted // slot_bytes


def io_processes(wanted: int | None, cpus: int | None = None) -> int:
    """Processes for store traffic: one for each 8 CPUs, at most 4; digesting and copying share them."""
    cpus = (os.cpu_count() or 1) if cpus is None else cpus
    return wanted or max(1, min(4, cpus // 8))
