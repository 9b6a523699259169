"""What is loaded for an adapter's digest stays one to one with it, whatever replaces adapters and however."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tplayout_vllm.adapter_watch import AdapterWatch, adapter_watch
from tplayout_vllm.metadata import AdapterRef

V1, V2 = AdapterRef(1, b"v1" * 16), AdapterRef(1, b"v2" * 16)


class Adapter:
    """As vLLM's LoRAModel: layers with tensors, lists of them, and gaps."""

    def __init__(self, seed: int) -> None:
        made = torch.Generator().manual_seed(seed)
        self.loras = {
            "layers.0.qkv": SimpleNamespace(
                lora_a=[torch.randn(8, 64, generator=made), None],
                lora_b=[torch.randn(64, 8, generator=made).bfloat16(), None],
                rank=8,
            ),
            "layers.0.o": SimpleNamespace(
                lora_a=torch.randn(8, 64, generator=made), lora_b=torch.randn(64, 8, generator=made), rank=8
            ),
        }


class Manager:
    def __init__(self) -> None:
        self.adapters: dict[int, Any] = {}

    def get_adapter(self, number: int) -> Any:
        return self.adapters.get(number)


@pytest.fixture
def manager() -> Manager:
    return Manager()


def test_what_is_not_loaded_agrees_with_nothing(manager: Manager) -> None:
    watch = AdapterWatch(manager)
    assert not watch.loaded(V1)
    assert not watch.agrees(V1)


def test_the_same_content_agrees_also_when_it_was_loaded_again_under_another_number(manager: Manager) -> None:
    watch = AdapterWatch(manager)
    manager.adapters[1] = Adapter(1)
    assert watch.loaded(V1)
    assert watch.agrees(V1)
    manager.adapters[1] = Adapter(1)
    assert watch.agrees(V1)
    manager.adapters[7] = Adapter(1)
    assert watch.agrees(AdapterRef(7, V1.digest))


def test_a_version_that_was_replaced_in_place_does_not(manager: Manager) -> None:
    watch = AdapterWatch(manager)
    manager.adapters[1] = Adapter(1)
    assert watch.agrees(V1)
    manager.adapters[1] = Adapter(2)
    assert not watch.agrees(V1)  # requests that began with the first one
    assert watch.agrees(V2)  # those that come now
    assert not watch.agrees(V1)


def test_new_files_for_what_is_loaded_already_do_not(manager: Manager) -> None:
    watch = AdapterWatch(manager)
    manager.adapters[1] = Adapter(1)
    assert watch.agrees(V1)
    assert not watch.agrees(V2)


@pytest.mark.parametrize("part", ["lora_a", "lora_b"])
def test_a_change_of_either_matrix_is_seen(manager: Manager, part: str) -> None:
    watch = AdapterWatch(manager)
    manager.adapters[1] = Adapter(1)
    assert watch.agrees(V1)
    other = Adapter(1)
    setattr(other.loras["layers.0.o"], part, getattr(other.loras["layers.0.o"], part) * 1.01)
    manager.adapters[1] = other
    assert not watch.agrees(V1)


def test_the_manager_is_found_where_vllm_has_put_it(manager: Manager) -> None:
    model = nn.Sequential(nn.Linear(2, 2))
    assert adapter_watch(None) is None
    assert adapter_watch(model) is None
    vars(model[0])["lora_manager"] = manager
    assert adapter_watch(model) is not None
