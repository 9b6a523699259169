"""Kinds of models: what a server of one TP size writes, a server of another reads.

Each test starts real vLLM servers of different shapes on one store; `e2e_pairs.Relay` says what a read has to show.
"""

from pathlib import Path

import pytest
from e2e_cases import LATENTS
from e2e_pairs import Leg, Relay, Server
from e2e_plain import PlainEngines

GROUPED = "Grouped-query attention"
FEW_HEADS = "TP larger than the number of KV heads"
DENSE = "Qwen3, Qwen3-MoE, Mistral (all sliding window)"
MIXED = "Sliding window + full attention (Gemma-3, GPT-OSS)"
SHARING = "KV shared between layers (Gemma-3n)"
LATENT = "MLA (DeepSeek-V2)"

F32 = 4
WINDOW = 128

KV2 = Relay("llama-kv2")
MIXTURE = Relay("gemma3", chunk=WINDOW, chunks=4)  # the default chunk for this window
# MLA's own rotary op is wrong on vLLM's CPU build.
MLA = Relay("deepseek-v2", more=LATENTS)


@pytest.mark.slow
@pytest.mark.row(GROUPED, "4 KV heads, TP 1 → 2; 3 KV heads, TP 1 → 3")
@pytest.mark.parametrize(("model", "tp"), [("smollm2", 2), ("smollm2-9x3", 3)])
def test_from_one_rank_to_several(tmp_path: Path, plain: PlainEngines, model: str, tp: int) -> None:
    Relay(model).run(tmp_path, plain, [Server(1, block=128), Server(tp, block=32)])


def check_replicas(legs: list[Leg]) -> None:
    """Two KV heads over more ranks: what is stored and read does not grow, and every replica is filled."""
    (size,) = {size for leg in legs for size in leg.sizes()}
    cells = 2 * 4 * 2 * 64 * F32  # heads × layers × K and V × dim, a token
    for earlier, leg in enumerate(legs):
        assert leg.sizes() == [size] * KV2.chunks
        assert leg.loaded("bytes") == earlier * KV2.chunks * size
        assert leg.loaded("copy_bytes") == earlier * KV2.full * cells * max(1, leg.server.tp // 2)


@pytest.mark.row(FEW_HEADS, "2 KV heads, TP 4 → 1")
def test_more_ranks_than_heads(tmp_path: Path, plain: PlainEngines) -> None:
    check_replicas(KV2.run(tmp_path, plain, [Server(4), Server(1, block=128)]))


@pytest.mark.slow
@pytest.mark.row(FEW_HEADS, "2 KV heads, TP 4 → 2, 1 → 4, 2 → 4")
def test_more_ranks_than_heads_all_ways(tmp_path: Path, plain: PlainEngines) -> None:
    check_replicas(KV2.run(tmp_path, plain, [Server(4), Server(2, block=32), Server(1, block=128), Server(4)]))


@pytest.mark.row(DENSE, "Qwen3, TP 2 → 1")
def test_qwen3(tmp_path: Path, plain: PlainEngines) -> None:
    Relay("qwen3").run(tmp_path, plain, [Server(2), Server(1, block=128)])


@pytest.mark.slow
@pytest.mark.row(DENSE, "Qwen3, TP 1 → 2")
def test_qwen3_to_two_ranks(tmp_path: Path, plain: PlainEngines) -> None:
    Relay("qwen3").run(tmp_path, plain, [Server(1), Server(2, block=32)])


@pytest.mark.slow
@pytest.mark.row(DENSE, "Qwen3-MoE, TP 1 → 2, 2 → 1")
def test_qwen3_moe(tmp_path: Path, plain: PlainEngines) -> None:
    Relay("qwen3-moe").run(tmp_path, plain, [Server(2), Server(1, block=128), Server(2, block=32)])


@pytest.mark.slow
@pytest.mark.row(DENSE, "Mistral, TP 1 → 2, 2 → 1")
def test_windows_only(tmp_path: Path, plain: PlainEngines) -> None:
    relay = Relay("mistral", chunk=WINDOW, chunks=4)
    legs = relay.run(tmp_path, plain, [Server(2), Server(1, block=128), Server(2, block=32)])
    check_windows(relay, legs, full_layers=0, window_layers=4)


def check_windows(relay: Relay, legs: list[Leg], full_layers: int, window_layers: int) -> None:
    """Of a hit, full layers are read and filled from the start, window layers only where the window reaches."""
    cells = 4 * 2 * 64 * F32  # heads × K and V × dim, a token and layer
    for earlier, leg in enumerate(legs):
        filled = relay.full * full_layers + WINDOW * window_layers
        assert leg.loaded("copy_bytes") == earlier * filled * cells
        if full_layers:
            (full,), (window,) = set(leg.sizes("full")), set(leg.sizes(f"window-{WINDOW}"))
            assert leg.loaded("bytes") == earlier * (relay.chunks * full + window)


@pytest.mark.row(MIXED, "Gemma-3, TP 2 → 1, a chunk of more than a window")
def test_windows_and_full_attention(tmp_path: Path, plain: PlainEngines) -> None:
    """The writer's steps of 200 tokens let go of the first chunk's window before it is whole."""
    relay = Relay("gemma3", chunk=256, chunks=3, more={"max_num_batched_tokens": 200}, gone=1)
    legs = relay.run(tmp_path, plain, [Server(2, block=32), Server(1, block=128)])
    check_windows(relay, legs, full_layers=2, window_layers=4)
    wrote = legs[0]
    assert (len(wrote.sizes("full")), len(wrote.sizes(f"window-{WINDOW}"))) == (3, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("relay", "full", "windows"),
    [
        pytest.param(MIXTURE, 2, 4, marks=pytest.mark.row(MIXED, "Gemma-3, TP 1 → 2, 2 → 1"), id="gemma3"),
        pytest.param(
            Relay("gpt-oss", chunk=WINDOW, chunks=4),
            2,
            2,
            marks=pytest.mark.row(MIXED, "GPT-OSS, TP 1 → 2, 2 → 1"),
            id="gpt-oss",
        ),
        # The last three of six layers read the KV of the first three, which alone is stored; two of them have windows.
        pytest.param(
            Relay("gemma3n", chunk=WINDOW, chunks=4),
            1,
            2,
            marks=pytest.mark.row(SHARING, "TP 1 → 2, 2 → 1"),
            id="gemma3n",
        ),
    ],
)
def test_windows_and_full_attention_both_ways(
    tmp_path: Path, plain: PlainEngines, relay: Relay, full: int, windows: int
) -> None:
    legs = relay.run(tmp_path, plain, [Server(1), Server(2, block=32), Server(1, block=128)])
    check_windows(relay, legs, full_layers=full, window_layers=windows)


def check_latents(legs: list[Leg]) -> None:
    """Every rank holds the whole latent: it is stored once, read once a node, and copied to each rank."""
    (size,) = {size for leg in legs for size in leg.sizes("latent")}
    cells = 4 * (512 + 64) * F32  # layers × latent and rope part, a token
    assert size < MLA.chunk * cells * 1.05
    for earlier, leg in enumerate(legs):
        assert leg.loaded("bytes") == earlier * MLA.chunks * size
        assert leg.loaded("copy_bytes") == earlier * MLA.full * cells * leg.server.tp


@pytest.mark.row(LATENT, "TP 2 → 1")
def test_latents(tmp_path: Path, plain: PlainEngines) -> None:
    check_latents(MLA.run(tmp_path, plain, [Server(2, block=16), Server(1, block=16)]))


@pytest.mark.slow
@pytest.mark.row(LATENT, "TP 1 → 2")
def test_latents_for_two_ranks(tmp_path: Path, plain: PlainEngines) -> None:
    check_latents(MLA.run(tmp_path, plain, [Server(1, block=16), Server(2, block=16)]))
