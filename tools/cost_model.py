"""Computes docs/cost-model.md: what a reload costs on GPUs and on S3. On paper, since no GPU is at hand.

    python tools/cost_model.py           # prints the tables
    python tools/cost_model.py --write   # puts them into docs/cost-model.md and draws docs/cost-model-*.png

This module is the arithmetic; cost_model_report.py makes tables and plots of it. Bytes are those of the format's own
layout. Copies and kernels are those of `tplayout_vllm`'s device.py and pages.py, which tests/tools/test_cost_model.py
counts while they run. Seconds, bytes and dollars are floats in SI units unless a name says otherwise.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from tplayout.format.digest import XXH3
from tplayout.format.geometry import DEFAULT_CHUNK_TOKENS, Geometry, Group, Part
from tplayout.format.layout import ChunkLayout, chunk_layout
from tplayout.format.sharding import Shard, shard_of, writes
from tplayout.staging.plan import StagingPlan
from tplayout.storage.s3 import PART
from tplayout_vllm.sizing import io_processes


@dataclass(frozen=True)
class Assumptions:
    """Speeds, prices and the set-up. Their sources are in the document's table (cost_model_report.py).

    pcie: bytes a second of one GPU's link, one direction. hbm: bytes a second that a strided copy moves.
    call: the launching thread's seconds for one kernel or copy. flops, busy: of one GPU, and prefill's share of it.
    network: bytes a second of the server. stream: of one GET. first_byte: seconds to its first byte.
    fetch: bytes a second that one I/O process takes from sockets. digest: bytes a second that it verifies.
    """

    pcie: float = 55e9
    hbm: float = 1.9e12
    call: float = 10e-6
    flops: float = 989e12
    busy: float = 0.5
    gpu_bytes: float = 141e9
    network: float = 11e9
    stream: float = 87.5e6
    first_byte: float = 0.15
    fetch: float = 2.2e9
    digest: float = 50e9
    io_processes: int = io_processes(None, cpus=192)
    load_threads: int = StagingPlan.load_threads
    load_deadline: float = StagingPlan.load_deadline_s
    gets_a_partition: float = 5500.0
    puts_a_partition: float = 3500.0
    dollars_get: float = 0.0004 / 1000
    dollars_put: float = 0.005 / 1000
    dollars_byte_month: float = 0.023 / 1e9
    dollars_gpu_second: float = 63.296 / 8 / 3600


DEFAULT = Assumptions()
TUNED = replace(DEFAULT, io_processes=32)  # the connector's option; see "What limits" in the document
BLAKE3_BYTES_PER_S = 4.8e9  # instead of `digest`, where a secret is set


@dataclass(frozen=True)
class Model:
    """A model's KV, and what computing it costs.

    active: parameters that one token uses. weights: bytes of all weights. block_tokens: of vLLM's page.
    attention: query heads x (dim of a query + dim of a value), what a token and an earlier token are multiplied by.
    """

    name: str
    group: Group
    active: float
    weights: float
    attention: int
    block_tokens: int

    @property
    def layout(self) -> ChunkLayout:
        """Of one chunk's object."""
        return chunk_layout(Geometry(DEFAULT_CHUNK_TOKENS, (self.group,)), 0, XXH3)


def _full(layers: int, heads: int, dim: int) -> Group:
    return Group("full", "full", tuple(range(layers)), heads, (Part("k", dim), Part("v", dim)), "BF16")


def _latent(layers: int, rank: int, rope: int) -> Group:
    return Group("latent", "latent", tuple(range(layers)), 1, (Part("latent", rank), Part("rope", rope)), "BF16")


MODELS = (
    Model("Llama-3.1-8B", _full(32, 8, 128), 8.03e9, 16.1e9, 32 * (128 + 128), 16),
    Model("Llama-3.1-70B", _full(80, 8, 128), 70.6e9, 141e9, 64 * (128 + 128), 16),
    Model("DeepSeek-V3 (MLA)", _latent(61, 512, 64), 37e9, 671e9, 128 * (192 + 128), 64),
)
TP_SIZES = (1, 2, 4, 8)
PREFIXES = (4096, 16384, 32768, 131072)
SERVERS = (1, 10, 100, 1000)


# -- one chunk, one rank ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RankWork:
    """What one rank does to load one whole chunk; saving does the same the other way round, on the ranks that write.

    copies: across the bus, each contiguous, of copy_bytes. kernels: that permute. events: recorded in the step. calls:
    all that the launching thread asks of the driver. part_copies: instead of `copies` where only a part of the chunk's
    tokens moves.
    """

    nbytes: int
    copies: int
    copy_bytes: int
    kernels: int
    events: int
    part_copies: int

    @property
    def calls(self) -> int:
        """Each event is recorded and waited for."""
        return self.copies + self.kernels + 2 * self.events


def rank_work(model: Model, tp: int, block_tokens: int | None = None) -> RankWork:
    """What a rank of TP size `tp` does for one chunk, as StreamCopies does it.

    Digests lie between the heads of an object, so a rank's heads are one copy each. A kernel moves one part (K or V) of
    one block, all heads and layers of it.
    """
    group, layout = model.group, model.layout
    shard: Shard = shard_of(group, tp, 0)
    nbytes = shard.cells * layout.cell_bytes
    heads, blocks = len(shard.heads), -(-layout.chunk_tokens // (block_tokens or model.block_tokens))
    # Equally wide parts are stored one behind the other, so a range of tokens is a piece of each.
    pieces = len(group.parts) if len({part.dim for part in group.parts}) == 1 else 1
    return RankWork(
        nbytes=nbytes,
        copies=heads,
        copy_bytes=nbytes // heads,
        kernels=blocks * len(group.parts),
        events=2,  # our stream goes behind the engine's, and the next user of the buffer behind this copy
        part_copies=shard.cells * pieces,
    )


def savers(model: Model, tp: int) -> int:
    """Ranks that write a chunk: of replicas only the first does."""
    return sum(writes(model.group.heads, tp, rank) for rank in range(tp))


def bus_seconds(work: RankWork, chunks: int, a: Assumptions) -> float:
    """What crossing PCIe takes one rank."""
    return chunks * work.nbytes / a.pcie


def launch_seconds(work: RankWork, chunks: int, a: Assumptions) -> float:
    """How long a rank's own thread is busy in the step that starts the load: other requests wait meanwhile."""
    return (chunks * work.calls + 1) * a.call


def permute_seconds(work: RankWork, chunks: int, a: Assumptions) -> float:
    """What the kernels take: every byte is read and written once more in the GPU's memory."""
    return chunks * 2 * work.nbytes / a.hbm


def device_seconds(work: RankWork, chunks: int, a: Assumptions) -> float:
    """From slots to pages. Launches, bus and kernels overlap; ranks have a link each."""
    return max(f(work, chunks, a) for f in (bus_seconds, launch_seconds, permute_seconds))


# -- from S3 to host memory ------------------------------------------------------------------------------------------


def gets(nbytes: int) -> int:
    """GET requests for one object: one for up to two parts, else one a part (S3Store.get_into)."""
    return 1 if nbytes <= 2 * PART else -(-nbytes // PART)


def staging_seconds(model: Model, tokens: int, a: Assumptions) -> float:
    """From S3 to verified slots, once a server, whatever its TP size."""
    return max(_staging_limits(model, tokens, a).values())


def staging_limit(model: Model, tokens: int, a: Assumptions) -> str:
    """What staging waits for: a key of `_staging_limits`."""
    limits = _staging_limits(model, tokens, a)
    return max(limits, key=limits.__getitem__)


def _staging_limits(model: Model, tokens: int, a: Assumptions) -> dict[str, float]:
    """Seconds by what may limit. A thread reads an object, all its parts at once, then verifies it; all threads share
    the network, those of a process its CPU."""
    chunks, nbytes = tokens // DEFAULT_CHUNK_TOKENS, model.layout.nbytes
    part = nbytes if gets(nbytes) == 1 else PART
    one = a.first_byte + part / a.stream + nbytes / a.digest
    return {
        "streams": -(-chunks // (a.io_processes * a.load_threads)) * one,
        "network": chunks * nbytes / a.network,
        "I/O processes": -(-chunks // a.io_processes) * nbytes * (1 / a.fetch + 1 / a.digest),
    }


def tokens_in_time(model: Model, a: Assumptions) -> int:
    """Tokens that are staged when `load_deadline_ms` ends; the request computes the rest."""
    chunks = 0
    while staging_seconds(model, (chunks + 1) * DEFAULT_CHUNK_TOKENS, a) <= a.load_deadline:
        chunks += 1
    return chunks * DEFAULT_CHUNK_TOKENS


def load_seconds(model: Model, tokens: int, tp: int, a: Assumptions) -> float:
    """A request's whole reload. It is claimed, and copied to the GPUs, once its last chunk is verified."""
    chunks = tokens // DEFAULT_CHUNK_TOKENS
    return staging_seconds(model, tokens, a) + device_seconds(rank_work(model, tp), chunks, a)


# -- instead: computing it -------------------------------------------------------------------------------------------


def prefill_flops(model: Model, tokens: int) -> float:
    """Multiplications and additions of a causal prefill: 2 a parameter and token, and attention, which is quadratic."""
    return 2 * model.active * tokens + tokens**2 * model.attention * len(model.group.layers)


def prefill_seconds(model: Model, tokens: int, tp: int, a: Assumptions) -> float:
    """Of one request that has the server to itself; communication between ranks costs nothing here."""
    return prefill_flops(model, tokens) / (tp * a.flops * a.busy)


def pays_from(model: Model, tp: int, a: Assumptions) -> int | None:
    """Tokens from which on reloading is faster than computing; None if it is not at the longest prefix."""
    for chunks in range(PREFIXES[-1] // DEFAULT_CHUNK_TOKENS, 0, -1):
        tokens = chunks * DEFAULT_CHUNK_TOKENS
        if load_seconds(model, tokens, tp, a) >= prefill_seconds(model, tokens, tp, a):
            return None if tokens == PREFIXES[-1] else tokens + DEFAULT_CHUNK_TOKENS
    return DEFAULT_CHUNK_TOKENS


def fits(model: Model, tp: int, a: Assumptions) -> bool:
    """Whether the weights leave a tenth of the GPUs' memory."""
    return model.weights / tp <= 0.9 * a.gpu_bytes


def break_even(model: Model, tokens: int, tp: int, a: Assumptions) -> float | None:
    """Bits a second from the store above which reloading is faster than computing; None: no bandwidth is enough."""
    chunks = tokens // DEFAULT_CHUNK_TOKENS
    left = prefill_seconds(model, tokens, tp, a) - device_seconds(rank_work(model, tp), chunks, a) - a.first_byte
    return 8 * chunks * model.layout.nbytes / left if left > 0 else None


# -- many servers ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Traffic:
    """What each server does: `requests` a second, each reloads so many tokens from S3 and stores so many new ones."""

    requests: float = 1.0
    reloaded: int = 16384
    stored: int = 1024


TRAFFIC = Traffic()


@dataclass(frozen=True)
class FleetLoad:
    """Requests and bytes a second on one bucket; partitions: that S3 must have split its keys into."""

    gets: float
    puts: float
    nbytes: float
    partitions: int


def fleet_load(model: Model, servers: int, traffic: Traffic, a: Assumptions) -> FleetLoad:
    """Before each PUT there is a HEAD, which counts as a GET."""
    nbytes = model.layout.nbytes
    rate = servers * traffic.requests / DEFAULT_CHUNK_TOKENS
    reads, puts = rate * traffic.reloaded * gets(nbytes), rate * traffic.stored
    partitions = max((reads + puts) / a.gets_a_partition, puts / a.puts_a_partition)
    return FleetLoad(reads + puts, puts, rate * (traffic.reloaded + traffic.stored) * nbytes, math.ceil(partitions))


@dataclass(frozen=True)
class TokenCost:
    """Dollars for a million tokens: to reload them once, to store them once, to keep them a month, to compute them."""

    reload: float
    store: float
    month: float
    compute: float

    @property
    def reloads_a_month(self) -> float:
        """How often a stored token must be reloaded in a month to pay for being kept."""
        return self.month / (self.compute - self.reload)


def token_cost(model: Model, tokens: int, a: Assumptions) -> TokenCost:
    """tokens: of the prefix, on which the price of computing one depends."""
    nbytes, chunks = model.layout.nbytes, 1e6 / DEFAULT_CHUNK_TOKENS
    return TokenCost(
        reload=chunks * gets(nbytes) * a.dollars_get,
        store=chunks * (a.dollars_put + a.dollars_get),
        month=chunks * nbytes * a.dollars_byte_month,
        compute=1e6 / tokens * prefill_seconds(model, tokens, 1, a) * a.dollars_gpu_second,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    import cost_model_report as report  # which imports this module

    parser = argparse.ArgumentParser(description="What a reload costs on GPUs and on S3, on paper.")
    parser.add_argument("--write", action="store_true", help="rewrite docs/cost-model.md's tables and plots")
    options = parser.parse_args(arguments)
    if not options.write:
        print("\n".join(f"{name}\n\n{table}" for name, table in report.tables().items()), end="")
        return 0
    try:
        report.write()
    except ImportError as error:
        print(f"cost_model: {error}; plots need the development tools: pip install -e '.[dev]'", file=sys.stderr)
        return 1
    except (OSError, ValueError) as error:
        print(f"cost_model: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
