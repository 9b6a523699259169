"""How much host memory staging may take: what the user says, else a share of what is free and allowed.

Layer: scheduler side; imports neither vLLM nor torch.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any

from tplayout.errors import ConfigError
from tplayout.memory import allowed_memory, available_memory

# A quarter: the engine allocates more after its start (activations, caches of its own), and staging is only a
# buffer in front of the store.
SHARE = 0.25
LARGEST_DEFAULT = 64 * 2**30
FEWEST_SLOTS = 2  # one to save from, one to load into


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
