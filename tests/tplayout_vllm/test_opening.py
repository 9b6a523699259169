"""Set-ups that cannot be served are refused before the model is loaded; what changes KV is in the identity."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tplayout.errors import ConfigError
from tplayout_vllm.opening import _engine_settings, check_setup


def config(weight_transfer_config: Any = None, encoder: bool = False, **parallel: int) -> SimpleNamespace:
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "nnodes": 1, **parallel}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes),
        model_config=SimpleNamespace(is_encoder_decoder=encoder),
        weight_transfer_config=weight_transfer_config,
    )


def test_what_can_be_served_is() -> None:
    check_setup(config())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"prefill_context_parallel_size": 2}, "context parallelism"),
        ({"nnodes": 2}, "nnodes is 2"),
        ({"encoder": True}, "encoder-decoder"),
        ({"weight_transfer_config": object()}, "--weight-transfer-config"),
    ],
)
def test_what_cannot_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_setup(config(**wrong))


@dataclass
class Scheme:
    """Like vLLM's --quantization-config."""

    linear: Any
    ignore: list[str]


def settings(lora: Any = None, **model: Any) -> dict[str, Any]:
    return _engine_settings(SimpleNamespace(model_config=SimpleNamespace(**model), lora_config=lora))


def test_an_engine_as_usual_adds_nothing_to_the_identity() -> None:
    assert settings() == {}
    assert settings(SimpleNamespace(target_modules=None), model_class_overrides={}, quantization_config=None) == {}


def test_settings_that_change_kv_are_in_the_identity() -> None:
    lora = SimpleNamespace(target_modules=["v_proj", "q_proj"])
    assert settings(lora) == {"engine": {"lora_target_modules": ["q_proj", "v_proj"]}}
    scheme = Scheme(torch.float8_e4m3fn, ["re:.*x"])
    stated = {"linear": "torch.float8_e4m3fn", "ignore": ["re:.*x"]}
    assert settings(quantization_config=scheme) == {"engine": {"quantization_config": stated}}
    assert settings(model_class_overrides={"A": "m:B"}) == {"engine": {"model_class_overrides": {"A": "m:B"}}}
