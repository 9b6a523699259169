"""Requests and adapters that cannot be named are left out; nothing that a client sends raises."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tplayout_vllm.adapters import Adapters
from tplayout_vllm.keying import Keying


def request(**fields: Any) -> SimpleNamespace:
    usual = {
        "prompt_token_ids": [1, 2, 3], "prompt_embeds": None, "mm_features": [], "pooling_params": None,
        "resumable": False, "cache_salt": None, "lora_request": None,
    }  # fmt: skip
    return SimpleNamespace(**{**usual, **fields})


def test_a_plain_request_is_keyed() -> None:
    extras = Keying(16).extras(request())
    assert callable(extras)
    assert list(extras(0)) == []
    assert callable(Keying(16).extras(request(prompt_token_ids=[])))


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"prompt_token_ids": [1, -1]}, "tokens"),
        ({"prompt_token_ids": [2**31]}, "tokens"),
        ({"prompt_token_ids": None, "prompt_embeds": object()}, "prompt-embeds"),
        ({"mm_features": [object()]}, "multimodal"),
        ({"pooling_params": object()}, "pooling"),
        ({"resumable": True}, "streaming-input"),
        ({"cache_salt": "\ud800"}, "salt"),
        ({"lora_request": SimpleNamespace(lora_int_id=1, lora_path="/nonexistent")}, "lora"),
    ],
)
def test_reasons(fields: dict[str, Any], reason: str) -> None:
    assert Keying(16).extras(request(**fields)) == reason


def adapter(directory: Path, config: str) -> SimpleNamespace:
    directory.mkdir(exist_ok=True)
    (directory / "adapter_config.json").write_text(config)
    (directory / "adapter_model.safetensors").write_bytes(b"weights")
    return SimpleNamespace(lora_int_id=1, lora_path=str(directory))


def test_an_adapter_is_named_by_its_content(tmp_path: Path) -> None:
    one = Adapters().digest(adapter(tmp_path / "a", '{"r": 8, "peft_version": "1"}'))
    assert one == Adapters().digest(adapter(tmp_path / "b", '{"peft_version": "2", "r": 8}'))
    assert one != Adapters().digest(adapter(tmp_path / "c", '{"r": 16}'))


def test_an_adapter_that_changes_is_not_named_any_more(tmp_path: Path) -> None:
    adapters, lora = Adapters(), adapter(tmp_path, '{"r": 8}')
    assert adapters.digest(lora) is not None
    (tmp_path / "adapter_model.safetensors").write_bytes(b"other weights")
    assert adapters.digest(lora) is None


@pytest.mark.parametrize(
    "config", ["[1]", "null", "", "\udcff", "[" * 100_000], ids=["list", "null", "empty", "?", "deep"]
)
def test_a_damaged_adapter_has_no_name(tmp_path: Path, config: str) -> None:
    lora = adapter(tmp_path, "")
    (tmp_path / "adapter_config.json").write_bytes(config.encode("utf-8", "surrogateescape"))
    assert Adapters().digest(lora) is None


def test_a_home_of_nobody(tmp_path: Path) -> None:
    assert Adapters().digest(SimpleNamespace(lora_int_id=1, lora_path="~nobody-of-that-name/x")) is None
