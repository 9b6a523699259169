"""What a worker says about its attention layers: kind, heads, dtype, scales and page layout, or a refusal.

Layer: below connector.py, worker side. The only module that reads vLLM's layers and KV-cache specs. Whatever it
does not know to be right it refuses, with one line that names layer, kind and reason.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.v1.kv_cache_interface import (
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaSpec,
    MLAAttentionSpec,
    SinkFullAttentionSpec,
    SlidingWindowSpec,
)

from tplayout.errors import ConfigError
from tplayout.model import FP8_DTYPES
from tplayout_vllm.adapter_watch import AdapterWatch, adapter_watch
from tplayout_vllm.blocks import Tables
from tplayout_vllm.metadata import LayerReport, WorkerReport, this_machine
from tplayout_vllm.probe import LayoutUnknown, PageLayout, discover_layer
from tplayout_vllm.weight_watch import WeightWatch, find_model
from tplayout_vllm.worker import FoundLayer

logger = logging.getLogger("vllm.tplayout")

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}
_REFUSED = {
    MambaSpec: "recurrent state",
    CrossAttentionSpec: "cross attention",
    EncoderOnlyAttentionSpec: "encoder-only attention",
    ChunkedLocalAttentionSpec: "chunked local attention",
    SinkFullAttentionSpec: "attention with sink tokens",
}


def discover_worker(
    vllm_config: Any, kv_cache_config: Any, caches: Mapping[str, torch.Tensor]
) -> tuple[WorkerReport, list[FoundLayer]]:
    """Report every layer of this rank and where its elements lie. Raises ConfigError naming the layer refused."""
    modules = vllm_config.compilation_config.static_forward_context
    tables = {name: i for i, group in enumerate(kv_cache_config.kv_cache_groups) for name in group.layer_names}
    layouts: dict[Any, PageLayout] = {}
    reports, found = [], []
    for name, cache in caches.items():
        layer = modules[name]
        if getattr(layer, "kv_sharing_target_layer_name", None):
            continue  # its keys and values are those of another layer, which is stored
        if is_draft(name, vllm_config):
            continue  # a draft proposes, the model decides: its KV is not part of the model's identity
        table = tables[name]
        group = kv_cache_config.kv_cache_groups[table]
        spec = getattr(group.kv_cache_spec, "kv_cache_specs", {}).get(name, group.kv_cache_spec)
        report, layout = _discover(vllm_config, name, layer, spec, table, layouts)
        reports.append(report)
        found.append(FoundLayer(name, table, layer.kv_cache, layout, _ratio(name, cache, layer.kv_cache, spec)))
    return WorkerReport(tuple(reports), this_machine()), found


def watches(vllm_config: Any, found: Sequence[FoundLayer]) -> tuple[WeightWatch | None, AdapterWatch | None]:
    """Watches over what makes these layers' KV: the weights (None for a rank without layers) and LoRA adapters."""
    modules = vllm_config.compilation_config.static_forward_context
    model = find_model([modules[layer.name] for layer in found]) if found else None
    if model is None:
        if found:
            logger.warning("tplayout: this model's weights cannot be found: do not change them while the server runs")
        return None, None
    config, eplb = vllm_config.model_config, getattr(vllm_config.parallel_config, "enable_eplb", False)
    weights = WeightWatch(model, lambda: (config.model, config.revision), experts_move=eplb)
    return weights, adapter_watch(model)


def block_tables(kv_cache_config: Any, of_group: tuple[tuple[int, ...], ...]) -> Tables:
    """The engine's block tables. of_group: the KV-cache groups that hold each canonical group."""
    specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
    # A group of layers that differ but for their blocks holds a spec a layer.
    kinds = [next(iter(getattr(spec, "kv_cache_specs", {"": spec}).values())) for spec in specs]
    kept = frozenset(table for table, kind in enumerate(kinds) if not isinstance(kind, SlidingWindowSpec))
    return Tables(tuple(spec.block_size for spec in specs), of_group, kept)


def is_draft(name: str, vllm_config: Any) -> bool:
    """Whether a layer belongs to a speculative draft: by its prefix, or numbered behind the model's own layers."""
    if vllm_config.speculative_config is None:
        return False
    layers = vllm_config.model_config.get_total_num_hidden_layers()
    return name.startswith("draft_model.") or layer_number(name) >= layers


def layer_number(name: str) -> int:
    """The model's layer number in a layer's name ("model.layers.7.self_attn.attn" -> 7)."""
    numbers = [int(part) for part in name.split(".") if part.isdigit()]
    if len(numbers) != 1:
        raise ConfigError(f"layer {name}: cannot tell its number from its name, tplayout cannot serve this model")
    return numbers[0]


def _discover(
    vllm_config: Any, name: str, layer: Any, spec: Any, table: int, layouts: dict[Any, PageLayout]
) -> tuple[LayerReport, PageLayout]:
    _check_kind(name, layer, spec)
    dtype = _dtype(name, layer, spec)
    latent, compute = isinstance(spec, MLAAttentionSpec), vllm_config.model_config.dtype
    try:
        # Layers of one shape have one layout; probing each of 80 layers would only cost time.
        key = _layout_key(layer)
        if key not in layouts:
            layouts[key] = discover_layer(layer, compute)
        layout = layouts[key]
    except (LayoutUnknown, RuntimeError, ValueError, TypeError, AttributeError, NotImplementedError) as error:
        other = "" if dtype.startswith("F8") or spec.dtype == compute else f" of a KV dtype other than {compute}"
        raise ConfigError(
            f"layer {name} ({type(layer.impl).__name__}): its page layout{other} cannot be discovered: {error}; "
            "run without TPLayoutConnector or with another --attention-backend or --kv-cache-dtype"
        ) from error
    names = ("latent", "rope") if latent else ("k", "v")
    parts = tuple((n, part.shape[2]) for n, part in zip(names, layout.parts, strict=True))
    report = LayerReport(
        name=name,
        index=layer_number(name),
        table=table,
        heads=layout.parts[0].shape[1],
        parts=parts,
        dtype=dtype,
        window=_window(layer, spec),
        latent=latent,
        scales=_scales(name, layer, latent) if dtype.startswith("F8") else None,
        layout=", ".join(part.describe() for part in layout.parts),
    )
    return report, layout


def _check_kind(name: str, layer: Any, spec: Any) -> None:
    for kind, text in _REFUSED.items():
        if isinstance(spec, kind):
            raise ConfigError(f"layer {name} ({text}) is not supported by TPLayoutConnector; run without it")
    # Not their subclasses: each stores something else, or drops tokens in a way of its own.
    if type(spec) not in (FullAttentionSpec, MLAAttentionSpec, SlidingWindowSpec):
        raise ConfigError(f"layer {name} ({type(spec).__name__}) is of a kind that TPLayoutConnector does not know")
    if getattr(spec, "non_causal", False):
        raise ConfigError(f"layer {name} attends non-causally: its KV depends on later tokens and cannot be shared")
    if getattr(spec, "rswa_window", None) or getattr(spec, "attention_chunk_size", None):
        raise ConfigError(f"layer {name} ({type(spec).__name__}) drops tokens in a way TPLayoutConnector does not know")
    if getattr(spec, "tokens_per_state", 1) != 1:
        raise ConfigError(f"layer {name} stores {spec.tokens_per_state} tokens a state, TPLayoutConnector only 1")


def _window(layer: Any, spec: Any) -> int | None:
    """Tokens of a layer's sliding window. One table of full-attention blocks may serve layers with and without."""
    window = getattr(spec, "sliding_window", None)
    if window is not None and not isinstance(spec, SlidingWindowSpec):
        window = layer.sliding_window
    return None if window is None else int(window)


def _dtype(name: str, layer: Any, spec: Any) -> str:
    """The resolved KV dtype: fp8 pages are uint8 to torch, "auto" is the model's dtype."""
    stated = str(getattr(layer, "kv_cache_dtype", "auto"))
    if spec.dtype in _DTYPES:
        return _DTYPES[spec.dtype]
    if stated in FP8_DTYPES and layer.kv_cache.element_size() == 1:
        from vllm.platforms import current_platform

        if FP8_DTYPES[stated] == "F8_E4M3" and current_platform.is_fp8_fnuz():
            raise ConfigError(f"layer {name}: this GPU's fp8 (fnuz) is not the fp8 that others read; use another dtype")
        return FP8_DTYPES[stated]
    raise ConfigError(
        f"layer {name}: KV dtype {stated} ({spec.dtype}) is not supported by TPLayoutConnector; "
        "use --kv-cache-dtype auto, bfloat16, fp8_e4m3 or fp8_e5m2"
    )


def _scales(name: str, layer: Any, latent: bool) -> tuple[float, ...]:
    """A factor a part. vLLM's float of a scale that differs by head is only their maximum."""
    for scale in ("_k_scale", "_v_scale"):
        stated = getattr(layer, scale, None)
        if isinstance(stated, torch.Tensor) and stated.numel() > 1:
            raise ConfigError(
                f"layer {name}: its KV scales differ by head, which TPLayoutConnector does not support yet; "
                "use --kv-cache-dtype auto or a checkpoint with a scale a layer"
            )
    k_scale, v_scale = float(layer._k_scale_float), float(layer._v_scale_float)
    return (k_scale, k_scale) if latent else (k_scale, v_scale)


def _layout_key(layer: Any) -> Any:
    cache = layer.kv_cache
    if not isinstance(cache, torch.Tensor):
        return id(layer)
    scales = (getattr(layer, "_k_scale_float", None), getattr(layer, "_v_scale_float", None))
    return (
        type(layer.impl),
        tuple(cache.shape[1:]),
        cache.stride(),
        cache.dtype,
        getattr(layer, "isa", None),
        scales,
    )


def _ratio(name: str, registered: torch.Tensor, bound: torch.Tensor, spec: Any) -> int:
    """Kernel blocks in one block of the scheduler's table."""
    tokens = int(bound.shape[-2])
    if spec.block_size % tokens or bound.data_ptr() != registered.data_ptr():
        raise ConfigError(f"layer {name}: blocks of {spec.block_size} tokens are not made of kernel blocks of {tokens}")
    return int(spec.block_size) // tokens
