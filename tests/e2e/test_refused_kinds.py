"""Kinds of models and settings that are not supported: a real start of each is refused with one line that says why.

Most refusals are ours. Where vLLM refuses before it asks a connector, the test shows vLLM's line.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import demo_models
import pytest
import vllm_server
from e2e_cases import LATENTS, engine_args, offload
from s3_server import free_port
from vllm_engine import EngineFailed, engine

NODE = Path(__file__).with_name("node_driver.py")


def refusal(directory: Path, model: str, tp: int = 1, **args: Any) -> list[str]:
    """Start an engine that must refuse; the lines of its log. Nothing may have been stored."""
    store = directory / "store"
    full = engine_args(model, tp, **{**args, **offload(f"file://{store}")})
    with pytest.raises(EngineFailed), engine(full, directory / "log", start_timeout=150):
        pass
    assert not store.exists()
    return (directory / "log").read_text(errors="replace").splitlines()


def assert_refused(lines: list[str], *words: str, error: str = "tplayout.errors.ConfigError") -> None:
    """One line, which each process repeats, names the error and holds all the words."""
    named = {line.partition(error)[2] for line in lines if error in line}
    assert any(all(word in text for word in words) for text in named), named or lines[-40:]


@pytest.mark.row("Recurrent hybrids (Falcon-H1, Qwen3-Next)", "Falcon-H1", verdict="refused")
def test_falcon_h1(tmp_path: Path) -> None:
    # vLLM 0.31's CPU build cannot run it in float32.
    lines = refusal(tmp_path, "falcon-h1", enable_prefix_caching=False, dtype="bfloat16")
    assert_refused(lines, "layer model.", ".mixer (recurrent state)", "not supported")


@pytest.mark.slow
@pytest.mark.row("Recurrent hybrids (Falcon-H1, Qwen3-Next)", "Qwen3-Next", verdict="refused")
def test_qwen3_next(tmp_path: Path) -> None:
    lines = refusal(tmp_path, "qwen3-next")
    assert_refused(lines, "layer model.layers.0.linear_attn (recurrent state)", "not supported")


@pytest.mark.slow
@pytest.mark.row("Encoder-decoder, cross attention", "Whisper", verdict="refused")
def test_whisper(tmp_path: Path) -> None:
    lines = refusal(tmp_path, demo_models.ENCODER_DECODER, skip_tokenizer_init=False, max_model_len=400)
    assert_refused(lines, "encoder-decoder", "not supported")


@pytest.mark.row("KV quantised per token and head", "int8_per_token_head, fp8_per_token_head", verdict="refused")
@pytest.mark.parametrize("dtype", ["int8_per_token_head", pytest.param("fp8_per_token_head", marks=pytest.mark.slow)])
def test_scales_of_every_token(tmp_path: Path, dtype: str) -> None:
    lines = refusal(tmp_path, "llama", kv_cache_dtype=dtype)
    assert_refused(lines, "layer model.layers.0.self_attn.attn", f"KV dtype {dtype}", "not supported")


@pytest.mark.slow
@pytest.mark.row("Context parallel (DCP, PCP)", "decode context parallel", verdict="refused")
def test_decode_context_parallel(tmp_path: Path) -> None:
    """Two ranks hold every other token of the latent, which is what makes it possible at TP=2."""
    lines = refusal(tmp_path, "deepseek-v2", tp=2, decode_context_parallel_size=2, **LATENTS)
    assert_refused(lines, "context parallelism splits tokens over ranks", "not support")


@pytest.mark.row("Context parallel (DCP, PCP)", "prefill context parallel, by vLLM's CPU build", verdict="refused")
def test_prefill_context_parallel(tmp_path: Path) -> None:
    lines = refusal(tmp_path, "llama", prefill_context_parallel_size=2)
    assert_refused(lines, "does not support: prefill context parallel", error="Value error")


@pytest.mark.slow
@pytest.mark.row("Several nodes an engine", "nnodes=2", verdict="refused")
def test_two_nodes(tmp_path: Path) -> None:
    """Both nodes are on this machine, which vLLM does not mind: each runs one of two ranks."""
    nodes = {
        "nnodes": 2,
        "distributed_executor_backend": "mp",
        "master_addr": "127.0.0.1",
        "master_port": free_port(),
    }
    second = engine_args("llama", 2, **nodes, node_rank=1, **offload(f"file://{tmp_path}/store"))
    mark = f"second-node-of-{tmp_path}"
    process = subprocess.Popen(
        [sys.executable, str(NODE), json.dumps(second)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **vllm_server.cpu_environment(), vllm_server.RUN_MARK: mark},
        start_new_session=True,
    )
    try:
        lines = refusal(tmp_path, "llama", tp=2, **nodes)
    finally:
        for pid in vllm_server.processes_of(mark, process.pid):
            os.kill(pid, 9)
        process.wait()
    assert_refused(lines, "nnodes is 2", "all ranks of an engine on one machine")
