"""What a model directory says about its KV cache, and what of its configuration belongs to the identity."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tplayout.errors import ConfigError
from tplayout.format.geometry import Part
from tplayout.format.identity import Identity
from tplayout.model import (
    IRRELEVANT,
    describe_groups,
    describe_model,
    model_config,
    read_config,
    resolve_compute_dtype,
    resolve_kv_dtype,
    weight_quantization,
)

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "dtype": "bfloat16",
    "hidden_size": 256,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "rope_theta": 10000.0,
}
MLA = {
    "model_type": "deepseek_v3",
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}


def write(directory: Path, config: Any, name: str = "config.json") -> Path:
    directory.mkdir(exist_ok=True)
    (directory / name).write_text(json.dumps(config))
    save_file({"w": np.ones(10, np.float32)}, directory / "model.safetensors")
    return directory


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write(tmp_path / "model", LLAMA)


def test_llama(model):
    identity = describe_model(model, chunk_tokens=64)
    (group,) = identity.geometry.groups
    assert (group.name, group.kind, group.layers, group.heads) == ("full", "full", (0, 1, 2, 3), 2)
    assert group.parts == (Part("k", 32), Part("v", 32))
    assert (group.dtype, group.window, group.scales) == ("BF16", None, None)
    assert (identity.compute_dtype, identity.quantization, identity.geometry.chunk_tokens) == ("bfloat16", None, 64)
    assert identity.weights.startswith("files:")
    assert identity.config["rope_theta"] == 10000.0


def test_equal_settings_give_one_namespace_and_others_another(model, tmp_path):
    same = describe_model(model)
    assert describe_model(write(tmp_path / "copy", LLAMA)).namespace == same.namespace
    others = [
        describe_model(model, kv_dtype="fp8"),
        describe_model(model, kv_dtype="fp8_e5m2"),
        describe_model(model, compute_dtype="float16"),
        describe_model(model, chunk_tokens=128),
        describe_model(model, weights_label="mine"),
        describe_model(model, overrides={"rope_theta": 500000.0}),
        describe_model(write(tmp_path / "theta", {**LLAMA, "rope_theta": 10001.0})),
        describe_model(write(tmp_path / "window", {**LLAMA, "sliding_window": 128})),
    ]
    namespaces = {other.namespace for other in [same, *others]}
    assert len(namespaces) == len(others) + 1
    assert [field for field, _, _ in same.diff(others[5])] == ["config.overrides"]
    assert [field for field, _, _ in same.diff(others[6])] == ["config.rope_theta"]


# --- the configuration -------------------------------------------------------------------------------------


def test_irrelevant_fields_are_left_out_and_unknown_ones_kept(tmp_path):
    config = {**LLAMA, "a_new_attention_trick": True, "transformers_version": "5.0", "use_cache": True}
    kept = model_config(write(tmp_path, {**config, "eos_token_id": 2}))
    assert kept == {**{k: v for k, v in LLAMA.items() if k != "dtype"}, "a_new_attention_trick": True}


@pytest.mark.parametrize(
    "name",
    ["rope_scaling", "rope_parameters", "rms_norm_eps", "max_position_embeddings", "architectures", "sliding_window"],
)
def test_what_changes_kv_stays(name):
    assert name not in IRRELEVANT


def test_nested_configurations_are_cleaned_but_quantization_is_not(tmp_path):
    config = {
        "text_config": {**LLAMA, "use_cache": True},
        "vision_config": {"dtype": "float16", "depth": 3},
        "quantization_config": {"quant_method": "x", "dtype": "int4"},
    }
    kept = model_config(write(tmp_path, config))
    assert kept["text_config"] == {k: v for k, v in LLAMA.items() if k != "dtype"}
    assert kept["vision_config"] == {"depth": 3}
    assert kept["quantization_config"] == {"quant_method": "x", "dtype": "int4"}


def test_overrides_are_a_member_of_their_own(model):
    assert "overrides" not in model_config(model, {})
    assert "overrides" not in model_config(model, {"rope_theta": 10000.0, "use_cache": False})
    assert model_config(model, {"rope_theta": 5, "dtype": "float16"})["overrides"] == {"rope_theta": 5}
    assert model_config(model, {"rope_scaling": None})["overrides"] == {"rope_scaling": None}


LONGROPE = {
    **LLAMA,
    "max_position_embeddings": 131072,
    "original_max_position_embeddings": 4096,
    "rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]},
}


def test_the_length_of_a_server_is_part_of_a_longrope_models_identity(tmp_path: Path) -> None:
    """vLLM rotates every key by the long factors once --max-model-len is beyond the original length."""
    model = write(tmp_path, LONGROPE)
    default, short, long, longer = (describe_model(model, max_model_len=n) for n in (None, 4096, 4097, 131072))
    assert default == short
    assert long == longer
    assert short != long
    assert short.diff(long) == [("config.rope_factors", "short", "long")]


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
def test_longrope_is_found_wherever_it_is_stated(tmp_path: Path, name: str) -> None:
    rope = {"rope_type": "longrope", "long_factor": [2.0], "original_max_position_embeddings": 4096}
    for where in ({name: rope}, {name: {"full_attention": rope}}, {"text_config": {name: rope}}):
        assert model_config(write(tmp_path, where), {}, 8192)["rope_factors"] == "long"
        assert model_config(write(tmp_path, where), {}, 4096)["rope_factors"] == "short"
    assert model_config(write(tmp_path, LLAMA), {name: rope}, 8192)["rope_factors"] == "long"
    unknown = {name: {"long_factor": [2.0]}}
    assert model_config(write(tmp_path, unknown), {}, 8192)["rope_factors"] == "of length 8192"
    assert "rope_factors" not in model_config(write(tmp_path, LLAMA), {}, 8192)


def test_numbers_that_canonical_json_lacks(tmp_path):
    (tmp_path / "config.json").write_text('{"a": [Infinity, -Infinity, NaN], "b": 9007199254740993, "c": 1.5}')
    kept = model_config(tmp_path)
    assert kept == {"a": ["inf", "-inf", "nan"], "b": "9007199254740993", "c": 1.5}
    (tmp_path / "config.json").write_text(r'{"a": ["x\ud800"], "b": {"\udc00": "\ud83d\ude00"}}')
    assert model_config(tmp_path) == {"a": [r"x\ud800"], "b": {r"\udc00": "\U0001f600"}}
    identity = describe_model(write(tmp_path / "m", LLAMA))
    Identity("w", kept, "bfloat16", None, identity.geometry).digest()


def test_mistral_configuration_file(tmp_path):
    params = {"dim": 256, "n_layers": 2, "n_heads": 8, "n_kv_heads": 4, "head_dim": 64}
    directory = write(tmp_path, params, "params.json")
    (group,) = describe_model(directory, compute_dtype="bfloat16").geometry.groups
    assert (group.heads, group.parts[0].dim, len(group.layers)) == (4, 64, 2)


@pytest.mark.parametrize("content", ["", "[]", "{", '"x"', "\udcff", "[" * 100_000])
def test_unreadable_configuration_is_named(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(ConfigError, match=r"config\.json"):
        read_config(tmp_path)


def test_no_model_directory(tmp_path):
    with pytest.raises(ConfigError, match="no model directory"):
        read_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("path", 5),
        ("kv_dtype", ["auto"]),
        ("compute_dtype", None),
        ("weights_label", 5),
        ("overrides", "x"),
        ("load_format", None),
        ("max_model_len", "4096"),
    ],
)
def test_arguments_of_another_type_are_named(model, name, value):
    with pytest.raises(ConfigError, match=f"^{name} must be "):
        describe_model(**{"path": model, name: value})


def test_huge_configuration_is_refused(tmp_path):
    (tmp_path / "config.json").write_text('{"a": "' + "x" * 17 * 2**20 + '"}')
    with pytest.raises(ConfigError, match="at most"):
        read_config(tmp_path)


# --- groups ------------------------------------------------------------------------------------------------


def shape(config: dict[str, Any]) -> list[tuple[str, tuple[int, ...], int]]:
    return [(group.name, group.layers, group.heads) for group in describe_groups(config, "BF16")]


def test_defaults_of_heads():
    without = {k: v for k, v in LLAMA.items() if k != "num_key_value_heads"}
    assert shape(without) == [("full", (0, 1, 2, 3), 8)]
    assert describe_groups({**LLAMA, "head_dim": 80}, "F16")[0].parts == (Part("k", 80), Part("v", 80))
    gpt2 = {"model_type": "gpt2", "n_embd": 64, "n_layer": 2, "n_head": 4}
    assert shape(gpt2) == [("full", (0, 1), 4)]


@pytest.mark.parametrize(("new", "heads"), [(False, 1), (True, 2)])
def test_falcon_multi_query(new, heads):
    config = {**LLAMA, "model_type": "falcon", "multi_query": True, "new_decoder_architecture": new}
    config["num_kv_heads"] = config.pop("num_key_value_heads")
    assert shape(config) == [("full", (0, 1, 2, 3), heads)]


def test_listed_layer_types():
    types = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = {**LLAMA, "sliding_window": 128, "layer_types": types}
    assert shape(config) == [("window-128", (0, 1, 3), 2), ("full", (2,), 2)]
    window, full = describe_groups(config, "BF16")
    assert (window.kind, window.window, full.kind, full.window) == ("window", 128, "full", None)
    assert shape({**config, "layer_types": ["full_attention"] * 4}) == [("full", (0, 1, 2, 3), 2)]


@pytest.mark.parametrize(
    ("model_type", "more", "full_layers"),
    [
        ("gemma2", {}, (1, 3)),
        ("gemma3_text", {"num_hidden_layers": 7}, (5,)),
        ("gemma3_text", {"sliding_window_pattern": 3}, (2,)),
        ("gpt_oss", {}, (1, 3)),
        ("cohere2", {}, (3,)),
        ("mistral", {}, ()),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 2}, (0, 1)),
        ("qwen2", {"use_sliding_window": False, "max_window_layers": 2}, (0, 1, 2, 3)),
        ("phi3", {}, ()),
        ("llama", {"sliding_window": None}, (0, 1, 2, 3)),
        ("mistral", {"sliding_window": None}, (0, 1, 2, 3)),
        ("mistral", {"sliding_window": 0}, (0, 1, 2, 3)),
    ],
)
def test_unlisted_layer_types(model_type, more, full_layers):
    config = {**LLAMA, "model_type": model_type, "sliding_window": 512, **more}
    groups = {group.name: group.layers for group in describe_groups(config, "BF16")}
    everything = tuple(range(config["num_hidden_layers"]))
    assert groups.get("full", ()) == full_layers
    assert groups.get("window-512", ()) == tuple(i for i in everything if i not in full_layers)


def test_window_that_the_file_leaves_to_the_model_type():
    assert shape({**LLAMA, "model_type": "mistral"}) == [("window-4096", (0, 1, 2, 3), 2)]


def test_latent():
    (group,) = describe_groups(MLA, "BF16")
    assert (group.name, group.kind, group.heads, group.layers) == ("latent", "latent", 1, (0, 1, 2))
    assert group.parts == (Part("latent", 512), Part("rope", 64))
    assert group.cell_shape(16) == (16, 576)


def test_text_model_in_a_multimodal_one():
    config = {"model_type": "llava", "vision_config": {"num_hidden_layers": 24}, "text_config": LLAMA}
    assert shape(config) == shape(LLAMA)
    assert resolve_compute_dtype(config) == "bfloat16"


@pytest.mark.parametrize(
    ("more", "field"),
    [
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "layer_types"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["sliding_attention"] * 4}, "sliding_window"),
        ({"mamba_d_state": 16}, "mamba_d_state"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder"),
        ({"num_kv_shared_layers": 2}, "num_kv_shared_layers"),
        ({"cross_attention_layers": [3]}, "cross_attention_layers"),
        ({"attention_chunk_size": 8192}, "attention_chunk_size"),
        ({"v_head_dim": 64}, "v_head_dim"),
        ({"kv_lora_rank": 256}, "kv_lora_rank"),
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers"),
        ({"num_key_value_heads": 0}, "num_key_value_heads"),
        ({"sliding_window": -1}, "sliding_window"),
        ({"hidden_size": None}, "hidden_size"),
        ({"sliding_window_pattern": "LLG", "sliding_window": 3}, "sliding_window_pattern"),
    ],
)
def test_what_only_an_engine_can_tell_is_refused_by_name(more, field):
    with pytest.raises(ConfigError, match=field):
        describe_groups({**LLAMA, **more}, "BF16")
    with pytest.raises(ConfigError, match=field):
        describe_groups({"model_type": "outer", "text_config": {**LLAMA, **more}}, "BF16")


def test_sparse_attention_with_an_indexer_is_refused():
    with pytest.raises(ConfigError, match=r"indexer.*index_topk"):
        describe_groups({**MLA, "index_topk": 2048}, "BF16")


# --- dtypes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stated", "asked", "resolved"),
    [
        ({"dtype": "bfloat16"}, "auto", "bfloat16"),
        ({"torch_dtype": "float16"}, "auto", "float16"),
        ({"torch_dtype": "torch.float16"}, "auto", "float16"),
        ({"dtype": "float32"}, "auto", "bfloat16"),
        ({"dtype": "bfloat16"}, "float32", "float32"),
        ({}, "half", "float16"),
        ({}, "torch.bfloat16", "bfloat16"),
    ],
)
def test_compute_dtype(stated, asked, resolved):
    assert resolve_compute_dtype(stated, asked) == resolved


@pytest.mark.parametrize(("stated", "asked"), [({}, "auto"), ({"dtype": "int8"}, "auto"), ({}, "int8")])
def test_unknown_compute_dtype(stated, asked):
    with pytest.raises(ConfigError, match="dtype"):
        resolve_compute_dtype(stated, asked)


@pytest.mark.parametrize(
    ("kv_dtype", "compute", "resolved"),
    [
        ("auto", "bfloat16", "BF16"),
        ("auto", "float32", "F32"),
        ("bfloat16", "float16", "BF16"),
        ("fp8", "bfloat16", "F8_E4M3"),
        ("fp8_e4m3", "float16", "F8_E4M3"),
        ("fp8_e5m2", "float16", "F8_E5M2"),
    ],
)
def test_kv_dtype(kv_dtype, compute, resolved):
    assert resolve_kv_dtype({}, kv_dtype, compute) == resolved


def test_fp8_has_scale_one_for_every_layer_and_part(model):
    (group,) = describe_model(model, kv_dtype="fp8").geometry.groups
    assert (group.dtype, group.scales) == ("F8_E4M3", ((1.0, 1.0),) * 4)


def test_scales_of_a_checkpoint_are_not_guessed():
    scheme = {"quantization_config": {"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8}}}
    with pytest.raises(ConfigError, match="kv_cache_scheme"):
        resolve_kv_dtype(scheme, "auto", "bfloat16")
    with pytest.raises(ConfigError, match="scales"):
        resolve_kv_dtype({"quantization_config": {"quant_method": "fp8"}}, "fp8", "bfloat16")
    with pytest.raises(ConfigError, match="int4"):
        resolve_kv_dtype({}, "int4", "bfloat16")


def test_quantization_of_weights():
    assert weight_quantization(LLAMA) is None
    assert weight_quantization(LLAMA, "fp8") == "fp8"
    stated = {"quantization_config": {"quant_method": "awq"}}
    assert weight_quantization(stated, "awq_marlin") == "awq"
    assert weight_quantization({"text_config": stated}) == "awq"
