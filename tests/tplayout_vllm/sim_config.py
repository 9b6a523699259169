"""How a simulated engine is set up: a real vLLM configuration, KV-cache groups, and what its workers report."""

import copy
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from sim_model import Rank, SimModel, layer_name
from vllm.config import KVTransferConfig, SpeculativeConfig, VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec

from tplayout_vllm.metadata import LayerReport, WorkerReport

MAX_LEN = 4096


@dataclass(frozen=True, kw_only=True)
class Setup:
    """One engine. blocks: of the KV cache, the null block included. budget: tokens a step. delayed: copies end later.

    reserve: a request starts only if all of its prompt fits. Without, chunked prefills push each other out.
    """

    model: SimModel = field(default_factory=SimModel)
    tp: int = 1
    block: int = 32
    kernel: int | None = None
    chunk: int = 64
    blocks: int = 100
    budget: int = 100
    seqs: int = 8
    caching: bool = True
    asynchronous: bool = False
    drafts: int = 0
    role: str = "kv_both"
    order: str = "column"
    delayed: bool = False
    policy: str = "fcfs"
    reserve: bool = True
    options: Mapping[str, Any] = field(default_factory=dict)


def make_model_directory(directory: Path) -> Path:
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "head_dim": 16,
        "vocab_size": 1000,
        "max_position_embeddings": MAX_LEN,
        "torch_dtype": "float32",
    }
    (directory / "config.json").write_text(json.dumps(config))
    return directory


@lru_cache
def _base_config(directory: str) -> VllmConfig:
    init_none_hash(sha256)
    environ = dict(os.environ)
    config = EngineArgs(
        model=directory, skip_tokenizer_init=True, max_model_len=MAX_LEN, dtype="float32", block_size=32
    ).create_engine_config()
    # vLLM's CPU platform preloads libraries into all processes to come, those of other tests too.
    os.environ.clear()
    os.environ.update(environ)
    return config


def vllm_config(directory: Path, setup: Setup, url: str) -> VllmConfig:
    config = copy.deepcopy(_base_config(str(directory)))
    config.scheduler_config.max_num_batched_tokens = setup.budget
    config.scheduler_config.max_num_seqs = setup.seqs
    config.scheduler_config.policy = setup.policy
    config.scheduler_config.scheduler_reserve_full_isl = setup.reserve
    config.scheduler_config.async_scheduling = setup.asynchronous
    config.cache_config.block_size = setup.block
    config.cache_config.num_gpu_blocks = setup.blocks
    config.cache_config.enable_prefix_caching = setup.caching
    config.parallel_config.tensor_parallel_size = setup.tp
    options = {
        "url": url,
        "chunk_tokens": setup.chunk,
        "staging_bytes": "8MiB",
        "io_processes": 1,
        "weights_label": "sim",
        "load_deadline_ms": 30_000,
        "never_slower": False,  # nothing is computed, which no store is faster than
        **setup.options,
    }
    config.kv_transfer_config = KVTransferConfig(
        kv_connector="TPLayoutConnector", kv_role=setup.role, kv_connector_extra_config=options
    )
    if setup.drafts:
        config.speculative_config = SpeculativeConfig(
            method="ngram",
            num_speculative_tokens=setup.drafts,
            prompt_lookup_max=2,
            target_model_config=config.model_config,
            target_parallel_config=config.parallel_config,
        )
    return config


def kv_cache_config(setup: Setup) -> KVCacheConfig:
    model = setup.model
    heads = max(1, model.heads // setup.tp)
    shape = {"block_size": setup.block, "num_kv_heads": heads, "head_size": model.dim, "dtype": torch.float32}
    groups = []
    for layers in model.tables:
        windows = {model.windows[layer] for layer in layers}
        spec = (
            SlidingWindowSpec(**shape, sliding_window=windows.pop())
            if model.hybrid and None not in windows
            else FullAttentionSpec(**shape, sliding_window=max((w for w in windows if w is not None), default=None))
        )
        groups.append(KVCacheGroupSpec([layer_name(layer) for layer in layers], spec))
    return KVCacheConfig(num_blocks=setup.blocks, kv_cache_tensors=[], kv_cache_groups=groups)


def report(setup: Setup, rank: Rank) -> WorkerReport:
    model = setup.model
    return WorkerReport(
        tuple(
            LayerReport(
                name=layer_name(layer),
                index=layer,
                table=model.table_of(layer),
                heads=len(rank.heads),
                parts=(("k", model.dim), ("v", model.dim)),
                dtype="F32",
                window=window,
                latent=False,
                scales=None,
                layout="simulated",
            )
            for layer, window in enumerate(model.windows)
        )
    )
