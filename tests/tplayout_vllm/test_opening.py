"""Set-ups that cannot be served are refused before the model is loaded."""

from types import SimpleNamespace
from typing import Any

import pytest

from tplayout.errors import ConfigError
from tplayout_vllm.opening import check_setup


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
