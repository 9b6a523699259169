"""Reads a model directory: its identity, and what its KV cache looks like, for people and tools without an engine.

An engine knows better what it allocates, and the connectors ask it. Where both describe a model the results are
equal; where this module cannot tell, it refuses by name. A wrong description could only miss: the geometry is
part of the identity.
"""

import json
import math
from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from types import NoneType
from typing import Any

from tplayout.arguments import check_type
from tplayout.errors import ConfigError
from tplayout.format.geometry import Geometry, default_chunk_tokens
from tplayout.format.identity import Identity
from tplayout.model_groups import describe_groups, text_config
from tplayout.weights import describe_weights, weights_fingerprint

__all__ = [
    "describe_groups",
    "describe_model",
    "describe_weights",
    "model_config",
    "read_config",
    "resolve_compute_dtype",
    "resolve_kv_dtype",
    "weight_quantization",
    "weights_fingerprint",
]

CONFIG_FILES = ("config.json", "params.json")
_MAX_CONFIG_BYTES = 16 * 2**20

# Fields that no KV value depends on. Everything else stays in the identity, known or not: a field too many costs a
# miss, a field too few wrong text.
_PROVENANCE = {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "_attn_implementation"}
_RESOLVED_ELSEWHERE = {"dtype", "torch_dtype"}  # the identity holds the compute dtype that is really used
_TRAINING = {
    "attention_dropout",
    "attn_pdrop",
    "embd_pdrop",
    "resid_pdrop",
    "hidden_dropout",
    "initializer_range",
    "output_router_logits",
    "pretraining_tp",
    "router_aux_loss_coef",
    "use_cache",
}
_AFTER_THE_LAST_LAYER = {"final_logit_softcapping", "tie_word_embeddings", "logits_scaling"}
_TEXT_ENDS = {"bos_token_id", "eos_token_id", "pad_token_id"}  # which token ids end a text, not what they mean
_CLASSIFICATION = {"id2label", "label2id", "num_labels", "problem_type"}
_OUTPUT = {"output_attentions", "output_hidden_states", "return_dict"}
IRRELEVANT = frozenset(
    _PROVENANCE | _RESOLVED_ELSEWHERE | _TRAINING | _AFTER_THE_LAST_LAYER | _TEXT_ENDS | _CLASSIFICATION | _OUTPUT
)

_DTYPES = {"float32": "F32", "float": "F32", "float16": "F16", "half": "F16", "bfloat16": "BF16"}
FP8_DTYPES = {"fp8": "F8_E4M3", "fp8_e4m3": "F8_E4M3", "fp8_e5m2": "F8_E5M2"}
# vLLM's names of KV dtypes -> those of safetensors, and back.
KV_DTYPES = {**_DTYPES, **FP8_DTYPES}
VLLM_DTYPES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F8_E4M3": "fp8_e4m3", "F8_E5M2": "fp8_e5m2"}


def describe_model(
    path: str | Path,
    *,
    kv_dtype: str = "auto",
    compute_dtype: str = "auto",
    chunk_tokens: int | None = None,
    weights_label: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    load_format: str = "auto",
    max_model_len: int | None = None,
) -> Identity:
    """The identity that a vLLM server of this model directory has, if it is started with the same settings.

    kv_dtype, compute_dtype, load_format, max_model_len: vLLM's names (--kv-cache-dtype, --dtype, --load-format,
    --max-model-len). overrides: as in --hf-overrides. chunk_tokens: None for the servers' default
    (`default_chunk_tokens`). weights_label: names the weights instead of a fingerprint of their files. Raises
    ConfigError for what only an engine can tell, naming the field, and for an argument of another type.
    """
    check_type("path", path, (str, PathLike), "the path of a model's directory")
    for name, text in (("kv_dtype", kv_dtype), ("compute_dtype", compute_dtype), ("load_format", load_format)):
        check_type(name, text, str, "text, one of vLLM's names")
    check_type("weights_label", weights_label, (str, NoneType), "text that names the weights, or None")
    check_type("overrides", overrides, (Mapping, NoneType), "a mapping of the configuration's fields, or None")
    check_type("max_model_len", max_model_len, (int, NoneType), "a whole number of tokens, or None")
    config = _overridden(read_config(path), overrides or {})
    compute = resolve_compute_dtype(config, compute_dtype)
    groups = describe_groups(config, resolve_kv_dtype(config, kv_dtype, compute))
    if chunk_tokens is None:
        chunk_tokens = default_chunk_tokens(group.window for group in groups)
    return Identity(
        weights=describe_weights(path, weights_label, load_format),
        config=model_config(path, overrides, max_model_len),
        compute_dtype=compute,
        quantization=weight_quantization(config),
        geometry=Geometry(chunk_tokens, groups),
    )


def read_config(path: str | Path) -> dict[str, Any]:
    """The model's own configuration as its file has it. Raises ConfigError if there is none, or no JSON object."""
    for name in CONFIG_FILES:
        file = Path(path) / name
        if not file.is_file():
            continue
        try:
            with file.open("rb") as stream:
                data = stream.read(_MAX_CONFIG_BYTES + 1)
            config = json.loads(data) if len(data) <= _MAX_CONFIG_BYTES else None
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{file} cannot be read: {error}") from None
        if not isinstance(config, dict):
            raise ConfigError(f"{file} is not a JSON object of at most {_MAX_CONFIG_BYTES} bytes")
        return config
    raise ConfigError(f"{path} is no model directory: it has no {' or '.join(CONFIG_FILES)}")


def model_config(
    path: str | Path, overrides: Mapping[str, Any] | None = None, max_model_len: int | None = None
) -> dict[str, Any]:
    """The `config` of an identity: the model's own configuration without the fields that no KV value depends on.

    Spellings are kept as they are (rope_theta, rope_parameters): what two of them have in common is the engine's
    business, and taking them for different only costs a miss. Overrides that change something are a member
    "overrides" of their own, since how an engine merges them is its business too.

    max_model_len: of the engine, None for its default. It rotates the same key differently in models with short and
    long factors (LongRoPE, such as Phi-3): which of them are used is a member "rope_factors" then.
    """
    config = read_config(path)
    identity = _relevant(config)
    changes = {name: value for name, value in _relevant(dict(overrides or {})).items() if _changes(config, name, value)}
    if changes:
        identity["overrides"] = changes
    factors = _rope_factors(_overridden(config, overrides or {}), max_model_len)
    if factors is not None:
        identity["rope_factors"] = factors
    return identity


def _rope_factors(config: Mapping[str, Any], max_model_len: int | None) -> str | None:
    """ "short" or "long" for a model that has both; the length that decides where it cannot be told; else None."""
    for holder in (config, text_config(config)):
        for rope in _ropes(holder):
            if "long_factor" not in rope:
                continue
            stated = holder.get("original_max_position_embeddings")
            trained = rope.get("original_max_position_embeddings", stated)
            # Without a length vLLM takes the one that the model was first trained for, if it is stated there.
            length = max_model_len or stated or holder.get("max_position_embeddings")
            if type(trained) is not int or type(length) is not int:
                return f"of length {length}"
            return "long" if length > trained else "short"
    return None


def _ropes(config: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """The rotary settings of a configuration: one for all layers, or one a type of layer."""
    found = [config[name] for name in ("rope_scaling", "rope_parameters") if isinstance(config.get(name), dict)]
    return [*found, *(item for rope in found for item in rope.values() if isinstance(item, dict))]


def _changes(config: dict[str, Any], name: str, value: Any) -> bool:
    return name not in config or _plain(config[name]) != value


def _relevant(config: dict[str, Any]) -> dict[str, Any]:
    """Without irrelevant fields, in nested model configurations too, as values that JSON has."""
    kept = {}
    for name, value in config.items():
        if name in IRRELEVANT:
            continue
        nested = isinstance(value, dict) and name.endswith("_config") and name != "quantization_config"
        kept[name] = _relevant(value) if nested else _plain(value)
    return kept


def _plain(value: Any) -> Any:
    """What canonical JSON does not have, as text that it has: infinities, NaN, integers beyond a double's precision,
    halves of surrogate pairs."""
    if isinstance(value, dict):
        return {_plain(str(name)): _plain(item) for name, item in value.items()}
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return repr(value)
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 2**53:
        return str(value)
    return value


def _overridden(config: dict[str, Any], overrides: Mapping[str, Any]) -> dict[str, Any]:
    """The configuration as vLLM uses it: nested configurations are updated, everything else replaced."""
    merged = dict(config)
    for name, value in overrides.items():
        if name.endswith("_config") and isinstance(value, Mapping) and isinstance(merged.get(name), dict):
            merged[name] = _overridden(merged[name], value)
        else:
            merged[name] = value
    return merged


def weight_quantization(config: Mapping[str, Any], requested: str | None = None) -> str | None:
    """How the weights are quantised: the checkpoint's own method, else the one that an engine was asked for.

    Not the engine's name for its kernel (awq and awq_marlin are the same values), which depends on the GPU.
    """
    for holder in (config, text_config(config)):
        for name in ("quantization_config", "compression_config"):
            stated = holder.get(name)
            if isinstance(stated, dict) and isinstance(stated.get("quant_method"), str):
                return str(stated["quant_method"])
    return requested


def resolve_compute_dtype(config: Mapping[str, Any], dtype: str = "auto") -> str:
    """The forward pass's dtype: "float32", "float16" or "bfloat16".

    "auto" is what vLLM makes of it: the checkpoint's dtype, but bfloat16 for a float32 checkpoint.
    """
    if dtype != "auto":
        if dtype.removeprefix("torch.") not in _DTYPES:
            raise ConfigError(f"compute dtype {dtype!r} is unknown: use auto, {', '.join(_DTYPES)}")
        return VLLM_DTYPES[_DTYPES[dtype.removeprefix("torch.")]]
    text = text_config(config)
    stated = next((c[n] for c in (text, config) for n in ("dtype", "torch_dtype") if c.get(n)), None)
    if not isinstance(stated, str) or stated.removeprefix("torch.") not in _DTYPES:
        raise ConfigError(f"the model's configuration states dtype {stated!r}: give the compute dtype that is used")
    resolved = VLLM_DTYPES[_DTYPES[stated.removeprefix("torch.")]]
    return "bfloat16" if resolved == "float32" else resolved


def resolve_kv_dtype(config: Mapping[str, Any], kv_dtype: str, compute_dtype: str) -> str:
    """The KV cache's dtype as safetensors names it. "auto" is the compute dtype."""
    if kv_dtype == "auto":
        if _brings_kv_scales(config):
            raise ConfigError(
                "the checkpoint states a quantised KV cache (kv_cache_scheme), whose scales only an engine knows: "
                "give the KV dtype that is used"
            )
        return _DTYPES[compute_dtype]
    if kv_dtype in FP8_DTYPES and weight_quantization(config) is not None:
        raise ConfigError(f"KV dtype {kv_dtype} of a quantised checkpoint has scales that only an engine knows")
    if kv_dtype not in KV_DTYPES:
        raise ConfigError(f"KV dtype {kv_dtype!r} is unknown: use auto, {', '.join(KV_DTYPES)}")
    return KV_DTYPES[kv_dtype]


def _brings_kv_scales(config: Mapping[str, Any]) -> bool:
    for holder in (config, text_config(config)):
        stated = holder.get("quantization_config")
        if isinstance(stated, dict) and (stated.get("kv_cache_scheme") or stated.get("kv_cache_quant_algo")):
            return True
    return False
