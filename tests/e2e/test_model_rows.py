"""Kinds of models and of shardings: what a server of one shape writes, a server of another reads.

Each test starts real vLLM servers of different shapes on one store; `e2e_pairs.Relay` says what a read has to show.
"""

from pathlib import Path

import pytest
from e2e_pairs import Leg, Relay, Server
from e2e_plain import PlainEngines

KV2 = Relay("llama-kv2")


def check_replicas(legs: list[Leg]) -> None:
    """Two KV heads over more ranks: what is stored and read does not grow, and every replica is filled."""
    (size,) = {size for leg in legs for size in leg.sizes()}
    for number, leg in enumerate(legs):
        assert leg.sizes() == [size] * KV2.chunks
        assert leg.loaded("bytes") == number * KV2.chunks * size
    cells = 2 * 4 * 2 * 64 * 4  # heads × layers × K and V × dim × float32, a token
    for number, leg in enumerate(legs):
        copies = max(1, leg.server.tp // 2)
        assert leg.loaded("copy_bytes") == number * KV2.full * cells * copies


@pytest.mark.row("TP larger than the number of KV heads", "2 KV heads, TP 4 -> 1")
def test_more_ranks_than_heads(tmp_path: Path, plain: PlainEngines) -> None:
    check_replicas(KV2.run(tmp_path, plain, [Server(4), Server(1, block=128)]))


@pytest.mark.slow
@pytest.mark.row("TP larger than the number of KV heads", "2 KV heads, TP 4 -> 2, 1 -> 4, 2 -> 4")
def test_more_ranks_than_heads_all_ways(tmp_path: Path, plain: PlainEngines) -> None:
    check_replicas(KV2.run(tmp_path, plain, [Server(4), Server(2, block=32), Server(1, block=128), Server(4)]))
