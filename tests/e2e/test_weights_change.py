"""Weights that are replaced while the server runs: KV of the new ones never meets KV of the old."""

import shutil
from pathlib import Path

import demo_models
import pytest
from e2e_cases import CHUNK, assert_same, cold_answer, engine_args, external_hits, noise, offload
from e2e_store import objects, verified, wait_until_stored
from safetensors.torch import load_file, save_file
from vllm_engine import engine

FULL = 2 * CHUNK


def tuned(directory: Path) -> Path:
    """The tiny Llama with other K and V projections in one layer, as a training step might leave it."""
    shutil.copytree(demo_models.ensure("llama"), directory)
    weights = load_file(directory / "model.safetensors")
    for name, tensor in weights.items():
        if "layers.1.self_attn.k_proj" in name or "layers.1.self_attn.v_proj" in name:
            weights[name] = -tensor
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


@pytest.mark.row(
    "Weights updated in place",
    "reload_weights at TP=2: noticed, nothing is saved or loaded any more",
    verdict="cache off",
)
def test_weights_reloaded_in_place(tmp_path: Path, logs: Path) -> None:
    root, other = tmp_path / "store", tuned(tmp_path / "tuned")
    old, new = noise(FULL + 9, 51), noise(FULL + 9, 52)
    with engine(engine_args("llama", 2, **offload(f"file://{root}")), logs / "weights.log") as running:
        before = running.generate(old)
        wait_until_stored(root, old, FULL)
        assert running.call("reset_prefix_cache", connector=True)
        assert running.generate(old).cached == FULL  # while nothing has changed the store serves it
        running.call("reload_weights", path=str(other))
        for _ in range(2):  # the first load finds out; with the second the scheduler knows
            assert running.call("reset_prefix_cache", connector=True)
            hits = external_hits(running)
            after = running.generate(old)
        assert after.cached == 0
        assert external_hits(running) == hits
        assert_same(after, cold_answer(running, old))
        assert after.tokens != before.tokens
        stored = objects(root)
        running.generate(new)
        running.generate(noise(5, 0), 1)  # metrics are reported with a step
        skips = [count for name, count in running.metrics().items() if 'reason="request-weights-changed"' in name]
        assert sum(skips) >= 2
        log = running.text()
    assert objects(root) == stored
    assert len(verified(root)) == FULL // CHUNK
    assert "the weights have changed while the server runs" in log
