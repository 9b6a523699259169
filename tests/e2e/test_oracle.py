"""An oracle that is not ours: what vLLM stored at TP=2 is what transformers computes as KV cache of the same tokens.

The objects are read with the `safetensors` library alone, found by the token ids in them.
"""

from pathlib import Path

import demo_models
import pytest
import torch
from e2e_cases import CHUNK, engine_args, noise, offload, story
from e2e_engine import engine
from e2e_store import wait_until_stored
from e2e_tp_runs import FULL, Run
from safetensors import safe_open


def stored_kv(root: Path, tokens: list[int]) -> torch.Tensor:
    """[layer, head, K and V, token, dim] of all full chunks of a prompt, in float32."""
    by_tokens = {}
    for path in root.rglob("*.safetensors"):
        with safe_open(path, "pt") as chunk:
            by_tokens[tuple(chunk.get_tensor("tokens").tolist())] = path
    pieces = []
    for start in range(0, len(tokens) // CHUNK * CHUNK, CHUNK):
        with safe_open(by_tokens[tuple(tokens[start : start + CHUNK])], "pt") as chunk:
            heads = sum(name.endswith(".kv") for name in chunk.keys())  # noqa: SIM118, it is no dict
            pieces.append(torch.stack([chunk.get_tensor(f"h{head}.kv") for head in range(heads)], dim=1).float())
    return torch.cat(pieces, dim=3)


def transformers_kv(model: str, tokens: list[int], dtype: torch.dtype) -> torch.Tensor:
    """The same shape, from a forward pass of transformers."""
    from transformers import AutoModelForCausalLM, DynamicCache

    network = AutoModelForCausalLM.from_pretrained(model, dtype=dtype).eval()
    cache = DynamicCache()
    with torch.no_grad():
        network(torch.tensor([tokens]), past_key_values=cache, use_cache=True)
    return torch.stack([torch.stack([layer.keys[0], layer.values[0]], dim=1) for layer in cache.layers]).float()


def worst_error(got: torch.Tensor, wanted: torch.Tensor) -> float:
    """Largest error of K or V of a layer, relative to the largest value that layer has there."""
    assert got.shape == wanted.shape
    error = (got - wanted).abs().amax(dim=(1, 3, 4))
    scale = wanted.abs().amax(dim=(1, 3, 4))
    return float((error / scale).max())


def write(root: Path, log: Path, model: str, tokens: list[int], dtype: str) -> str:
    """Let an engine at TP=2 store a prompt; returns the model's directory."""
    args = engine_args(model, 2, dtype=dtype, **offload(f"file://{root}"))
    with engine(args, log) as running:
        running.generate(tokens, 1)
        wait_until_stored(root, tokens, len(tokens) // CHUNK * CHUNK)
    return str(args["model"])


def test_float32(tp_root: Path, tp2: Run) -> None:
    assert tp2.wrote["b"].cached == 0
    model = str(demo_models.ensure("smollm2", "float32"))
    wanted = transformers_kv(model, story("b")[:FULL], torch.float32)
    assert worst_error(stored_kv(tp_root, story("b")), wanted) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("model", ["smollm2", "llama"])
def test_bfloat16(tmp_path: Path, model: str) -> None:
    tokens = story("b") if model == "smollm2" else noise(FULL, 1)
    directory = write(tmp_path / "store", tmp_path / "log", model, tokens, "bfloat16")
    wanted = transformers_kv(directory, tokens[:FULL], torch.bfloat16)
    assert worst_error(stored_kv(tmp_path / "store", tokens), wanted) < 2e-2
