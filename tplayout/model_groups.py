"""What the KV cache of a model looks like, from its own configuration: layers in groups of equal kind and shape.

What cannot be told from there is refused by name: a group that is described wrongly could only miss.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tplayout.errors import ConfigError
from tplayout.format.geometry import Group, Kind, Part

_TEXT_CONFIGS = ("text_config", "llm_config", "language_config")
_LAYERS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers")
_HEADS = ("num_attention_heads", "n_head", "n_heads")
_KV_HEADS = ("n_head_kv", "num_kv_heads", "num_key_value_heads", "multi_query_group_num", "n_kv_heads")
_WIDTH = ("hidden_size", "n_embd", "d_model", "dim")

# Model types whose latent vLLM caches instead of keys and values. Others with the same fields keep full heads.
_LATENT = {"deepseek_v2", "deepseek_v3", "kimi_k2", "glm4_moe_lite", "pangu_ultra_moe"}
# What a configuration of these types means when it does not list its layers' types: (every n-th layer is full,
# default window). 0: none is.
_WINDOW_PATTERNS = {
    "cohere2": (4, 4096),
    "gemma2": (2, 4096),
    "gemma3_text": (6, 4096),
    "gpt_oss": (2, 128),
    "mistral": (0, 4096),
}
_RECURRENT = ("mamba_", "ssm_", "rwkv", "linear_num_", "conv_L_cache", "lru_width", "time_step_")
_UNDESCRIBED = {
    "is_encoder_decoder": "an encoder and cross-attention",
    "num_kv_shared_layers": "layers that share KV with others",
    "cross_attention_layers": "cross-attention",
    "block_configs": "layers of several shapes",
    "per_layer_config": "layers of several shapes",
    "index_topk": "an indexer with a cache of its own",
    "hybrid_layer_pattern": "layers of several shapes",
    "hybrid_override_pattern": "layers with recurrent state",
    "layers_block_type": "layers with recurrent state",
    "attn_layer_period": "layers with recurrent state",
    "attention_chunk_size": "chunked attention",
    "use_bidirectional_attention": "attention to later tokens",
    "global_head_dim": "heads of several sizes",
}


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of a configuration that describes the language model; all of it where there are no others."""
    for name in _TEXT_CONFIGS:
        if isinstance(config.get(name), dict):
            return {"model_type": config.get("model_type"), **config[name]}
    return config


def describe_groups(config: Mapping[str, Any], dtype: str) -> tuple[Group, ...]:
    """The groups of layers, in the order of their first layers. dtype: safetensors' name of the KV dtype."""
    text = text_config(config)
    _refuse_undescribed(config)
    _refuse_undescribed(text)
    layers = _integer(text, _LAYERS)
    if text.get("kv_lora_rank"):
        return (_latent_group(text, layers, dtype),)
    heads, dim = _heads_and_dim(text)
    members: dict[int | None, list[int]] = {}
    for layer, window in enumerate(_windows(text, layers)):
        members.setdefault(window, []).append(layer)
    return tuple(
        _group(
            "full" if window is None else f"window-{window}",
            "full" if window is None else "window",
            numbers,
            heads,
            (Part("k", dim), Part("v", dim)),
            dtype,
            window,
        )
        for window, numbers in members.items()
    )


def _latent_group(text: Mapping[str, Any], layers: int, dtype: str) -> Group:
    if text.get("model_type") not in _LATENT:
        _undescribed(text, "kv_lora_rank", "a latent that engines cache in different ways")
    parts = (Part("latent", _integer(text, ("kv_lora_rank",))), Part("rope", _integer(text, ("qk_rope_head_dim",))))
    return _group("latent", "latent", range(layers), 1, parts, dtype, None)


def _group(
    name: str,
    kind: Kind,
    layers: Sequence[int],
    heads: int,
    parts: tuple[Part, ...],
    dtype: str,
    window: int | None,
) -> Group:
    # An fp8 cache of weights that bring no scales has scale 1 everywhere.
    scales = ((1.0,) * len(parts),) * len(layers) if dtype.startswith("F8") else None
    return Group(name, kind, tuple(layers), heads, parts, dtype, window, scales)


def _heads_and_dim(text: Mapping[str, Any]) -> tuple[int, int]:
    """KV heads of the whole model, and the size of one. Without a number of KV heads each query head has its own."""
    query_heads = _integer(text, _HEADS)
    multi_query = text.get("multi_query") and not text.get("new_decoder_architecture")  # Falcon
    heads = 1 if multi_query else _integer(text, _KV_HEADS, query_heads)
    width = _integer(text, _WIDTH, 0)
    dim = _integer(text, ("head_dim",), width // query_heads)
    if dim < 1:
        raise ConfigError("the model's configuration states neither head_dim nor hidden_size")
    if text.get("v_head_dim") not in (None, dim):
        _undescribed(text, "v_head_dim", "keys and values of different sizes")
    return heads, dim


def _windows(text: Mapping[str, Any], layers: int) -> list[int | None]:
    """For each layer the tokens of its sliding window, or None for full attention."""
    model_type = text.get("model_type")
    pattern, default = _WINDOW_PATTERNS.get(str(model_type), (0, None))
    window = text.get("sliding_window", default) or None  # some checkpoints write 0 for none
    if text.get("use_sliding_window") is False:
        window = None
    if window is not None:
        window = _integer({"sliding_window": window}, ("sliding_window",))
    types = text.get("layer_types")
    if types is None:
        return [_pattern_window(text, layer, window, pattern) for layer in range(layers)]
    if not isinstance(types, list) or len(types) < layers:
        raise ConfigError(f"layer_types of the model's configuration is no list of {layers} layers' types")
    windows = []
    for kind in types[:layers]:
        if kind not in ("full_attention", "sliding_attention"):
            _undescribed(text, "layer_types", f"layers of type {kind}")
        if kind == "sliding_attention" and window is None:
            raise ConfigError("layer_types of the model's configuration has sliding_attention, but no sliding_window")
        windows.append(window if kind == "sliding_attention" else None)
    return windows


def _pattern_window(text: Mapping[str, Any], layer: int, window: int | None, pattern: int) -> int | None:
    first = text.get("max_window_layers", 0)  # Qwen2: the layers before it see everything
    if type(first) is not int or layer < first:
        return None
    every = text.get("sliding_window_pattern", text.get("_sliding_window_pattern", pattern))
    if type(every) is not int or every < 0:
        _undescribed(text, "sliding_window_pattern", "a pattern of its own")
    return None if every and (layer + 1) % every == 0 else window


def _refuse_undescribed(config: Mapping[str, Any]) -> None:
    for name, what in _UNDESCRIBED.items():
        if config.get(name):
            _undescribed(config, name, what)
    for name in config:
        if name.startswith(_RECURRENT):
            _undescribed(config, name, "layers with recurrent state")


def _undescribed(config: Mapping[str, Any], field: str, what: str) -> NoReturn:
    raise ConfigError(
        f"model type {config.get('model_type')!r} has {what} ({field}), which only an engine can describe: "
        "take the identity that a server writes into namespace.json"
    )


def _integer(config: Mapping[str, Any], names: Sequence[str], default: int | None = None) -> int:
    """The first of these fields that is set. Raises ConfigError if none is and there is no default."""
    for name in names:
        value = config.get(name)
        if value is None:
            continue
        if type(value) is not int or value < 1:
            raise ConfigError(f"{name} of the model's configuration is {value!r}, must be a whole number above 0")
        return value
    if default is None:
        raise ConfigError(f"the model's configuration does not state {names[0]}")
    return default
