"""How much host memory staging may take: what the user says, else a share of what is free and allowed.

Layer: scheduler side; reads /proc and the cgroup, knows neither vLLM nor torch.
"""

from __future__ import annotations

import os
from pathlib import Path

from tplayout.errors import ConfigError

# A quarter: the engine allocates more after its start (activations, caches of its own), and staging is only a
# buffer in front of the store.
SHARE = 0.25
LARGEST_DEFAULT = 64 * 2**30
FEWEST_SLOTS = 2  # one to save from, one to load into


def allowed_memory(root: Path = Path("/sys/fs/cgroup"), meminfo: str | None = None) -> int:
    """Bytes that this process may use: what its cgroup allows, at most what the machine has."""
    return min(filter(None, [memory_limit(root), _meminfo("MemTotal", meminfo)]))


def memory_limit(root: Path = Path("/sys/fs/cgroup")) -> int | None:
    """Bytes that this process's cgroup (v2 or v1) may use, None without a limit."""
    limits = []
    for path in (root / "memory.max", root / "memory" / "memory.limit_in_bytes", *_own_cgroup(root)):
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit() and int(text) < 2**60:  # v1 says "no limit" with a huge number
            limits.append(int(text))
    return min(limits, default=None)


def _own_cgroup(root: Path) -> list[Path]:
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    own = [root / line.split("::", 1)[1].lstrip("/") for line in lines if line.startswith("0::")]
    return [parent / "memory.max" for path in own for parent in (path, *path.parents) if parent.is_relative_to(root)]


def available_memory(meminfo: str | None = None) -> int:
    """Bytes the kernel says can be had without swapping."""
    return _meminfo("MemAvailable", meminfo)


def _meminfo(name: str, text: str | None) -> int:
    for line in (Path("/proc/meminfo").read_text() if text is None else text).splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ConfigError(f"/proc/meminfo has no {name}, so that staging memory cannot be sized on this system")


def staging_slots(
    wanted: int | None, slot_bytes: int, servers: int, limit: int | None = None, available: int | None = None
) -> int:
    """Slots of the staging pool.

    wanted: bytes from the options. servers: engines of this server that each have a pool (data parallel).
    Raises ConfigError when a chunk does not fit twice, or when the pool is larger than the memory allowed.
    """
    limit = allowed_memory() if limit is None else limit
    if wanted is None:
        free = min(limit, available_memory() if available is None else available)
        wanted = max(FEWEST_SLOTS * slot_bytes, int(min(free * SHARE, LARGEST_DEFAULT) / servers))
    elif wanted < FEWEST_SLOTS * slot_bytes:
        raise ConfigError(
            f"kv_connector_extra_config: 'staging_bytes' is {wanted}, but {FEWEST_SLOTS} chunks of this model take "
            f"{FEWEST_SLOTS * slot_bytes} bytes; raise it or lower 'chunk_tokens'"
        )
    if wanted * servers > limit:
        raise ConfigError(
            f"kv_connector_extra_config: 'staging_bytes' asks for {wanted * servers} bytes of host memory, but this "
            f"machine or its cgroup has no more than {limit}; lower it or raise the limit"
        )
    return wanted // slot_bytes


def io_processes(wanted: int | None, cpus: int | None = None) -> int:
    """Processes for store traffic: one for each 8 CPUs, at most 4; digesting and copying share them."""
    cpus = (os.cpu_count() or 1) if cpus is None else cpus
    return wanted or max(1, min(4, cpus // 8))
