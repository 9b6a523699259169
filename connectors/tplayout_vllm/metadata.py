"""What travels between the scheduler's and the workers' side of the connector, every step.

Plain data; vLLM moves it between its own processes. Nothing here is stored, and nothing secret is in it.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorWorkerMetadata,
)

from tplayout.format.geometry import Geometry
from tplayout.staging.region import RegionRef


@dataclass(frozen=True)
class LayerReport:
    """What a worker found out about one attention layer.

    index:   the model's layer number.
    table:   the vLLM KV-cache group whose block table it uses.
    parts:   (name, dim) of each part; heads: KV heads on this rank; dtype: safetensors name of the KV dtype.
    window:  tokens of a sliding window, None for full attention; latent: one latent for all heads (MLA).
    scales:  factor a part of a quantised cache, None otherwise.
    """

    name: str
    index: int
    table: int
    heads: int
    parts: tuple[tuple[str, int], ...]
    dtype: str
    window: int | None
    latent: bool
    scales: tuple[float, ...] | None
    layout: str


@dataclass(frozen=True)
class WorkerReport(KVConnectorHandshakeMetadata):
    """A worker's layers, sent once after its caches are registered. machine: where it runs, see `this_machine`."""

    layers: tuple[LayerReport, ...]
    machine: str = ""


def this_machine() -> str:
    """The same text in processes that reach each other through /proc; empty where the kernel does not say."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


@dataclass(frozen=True)
class StagingRef:
    """All that a worker needs to find its bytes in the region.

    places:  layer name -> (canonical group, position in it).
    writers: a group, the (pp_rank, tp_rank) that must mark its objects, in the order of their marks.
    """

    region: RegionRef
    geometry: Geometry
    digest: str
    key_id: str | None
    places: dict[str, tuple[int, int]]
    writers: tuple[tuple[tuple[int, int], ...], ...]

    def marks_of(self, rank: tuple[int, int]) -> list[int]:
        """The groups whose objects this (pp_rank, tp_rank) marks."""
        return [group for group, ranks in enumerate(self.writers) if rank in ranks]


@dataclass(frozen=True)
class ChunkCopy:
    """Tokens [first, last) of a request that lie in the chunk starting at token `base`, held in one slot.

    groups: the canonical groups to copy.
    """

    slot: int
    generation: int
    base: int
    first: int
    last: int
    groups: tuple[int, ...]


@dataclass(frozen=True)
class AdapterRef:
    """A LoRA adapter: vLLM's number for it, and the digest of its files by which requests are keyed."""

    number: int
    digest: bytes


@dataclass(frozen=True)
class Transfer:
    """Copies of one request and its block tables (one list of block ids a vLLM KV-cache group).

    adapter: with which it is computed. failed: a load that cannot be made, to be reported as such: the engine waits
    for its end.
    """

    request: str
    tables: tuple[list[int], ...]
    copies: tuple[ChunkCopy, ...]
    adapter: AdapterRef | None = None
    failed: bool = False


@dataclass
class StepMetadata(KVConnectorMetadata):
    """The work of one engine step. `staging` is set whenever there is work.

    adapters: those of the requests that the step computes. timed: to be told back with the step's results, since how
    long it takes is of interest.
    """

    staging: StagingRef | None = None
    saves: list[Transfer] = field(default_factory=list)
    loads: list[Transfer] = field(default_factory=list)
    adapters: tuple[AdapterRef, ...] = ()
    timed: int | None = None


@dataclass(frozen=True)
class WorkerNews(KVConnectorWorkerMetadata):
    """What workers tell the scheduler's side behind a step.

    weights_changed: the weights are no longer those that the namespace is of.
    given_up: (pp_rank, tp_rank) -> saves that it neither made nor could mark so, since it cannot reach the region.
    timed: that of the step.
    """

    weights_changed: bool = False
    given_up: Mapping[tuple[int, int], tuple[ChunkCopy, ...]] = field(default_factory=dict)
    timed: int | None = None

    def aggregate(self, other: KVConnectorWorkerMetadata) -> WorkerNews:
        """The news of two workers, or of one worker twice."""
        assert isinstance(other, WorkerNews)
        mine, theirs = self.given_up, other.given_up
        return WorkerNews(
            self.weights_changed or other.weights_changed,
            {rank: mine.get(rank, ()) + theirs.get(rank, ()) for rank in sorted({*mine, *theirs})},
            other.timed if self.timed is None else self.timed,
        )
