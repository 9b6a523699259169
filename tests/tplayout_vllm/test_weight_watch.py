"""Weights that change in place are noticed, whatever changes them and however they are kept; nothing else is."""

import logging
from collections.abc import Callable

import pytest
import torch
from torch import nn

from tplayout_vllm.weight_watch import SAMPLES, WeightWatch, find_model


class Attention(nn.Module):
    """Stands for vLLM's layer: it has no weights of its own."""


class Layer(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.qkv = nn.Linear(96, 64, dtype=dtype)
        self.attn = Attention()


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(dtype) for _ in range(2))


class Wrapper(nn.Module):
    """As vLLM's outermost class, which holds the head next to the layers."""

    def __init__(self) -> None:
        super().__init__()
        self.model = Model()
        self.lm_head = nn.Linear(64, 8)


def nudge(model: Model) -> None:
    model.layers[1].qkv.weight.data.mul_(1.001)


def replace_one_row(model: Model) -> None:
    model.layers[0].qkv.weight.data[:].copy_(torch.zeros(64, 96))


def bias_only(model: Model) -> None:
    with torch.no_grad():
        model.layers[0].qkv.bias += 1


@pytest.mark.parametrize("change", [nudge, replace_one_row, bias_only])
def test_a_change_is_noticed_and_remembered(change: Callable[[Model], None], caplog: pytest.LogCaptureFixture) -> None:
    model = Model()
    watch = WeightWatch(model, lambda: "path")
    assert watch.check()()
    assert not watch.changed
    before = {name: p.clone() for name, p in model.named_parameters()}
    change(model)
    with caplog.at_level(logging.ERROR, "vllm.tplayout"):
        assert not watch.check()()
        for name, parameter in model.named_parameters():
            parameter.data.copy_(before[name])
        assert not watch.check()()  # what was computed meanwhile is not known
    assert watch.changed
    assert len(caplog.records) == 1
    assert "Restart the server" in caplog.text


def test_the_answer_is_of_the_moment_of_the_look() -> None:
    model = Model()
    watch = WeightWatch(model, lambda: "path")
    answer = watch.check()
    nudge(model)
    assert answer()
    assert not watch.check()()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.float64])
def test_every_dtype_is_compared_as_bits(dtype: torch.dtype) -> None:
    model = nn.Module()
    bits = torch.full((64, 8), 0xFF, dtype=torch.uint8)  # NaN of the float dtypes of one byte
    model.weight = nn.Parameter(bits.view(dtype), requires_grad=False)
    watch = WeightWatch(model, lambda: "path")
    assert watch.check()()
    model.weight.data.view(torch.uint8)[:] = 1
    assert not watch.check()()


@pytest.mark.parametrize("shape", [(1,), (SAMPLES,), (SAMPLES + 1,), (3, 5, 7), (1024, 33)])
def test_any_shape_and_memory_order(shape: tuple[int, ...]) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(shape).permute(*reversed(range(len(shape)))))
    watch = WeightWatch(model, lambda: "path")
    model.weight.data += 1
    assert not watch.check()()


def test_a_small_share_of_changed_elements_is_enough() -> None:
    """A step of reinforcement learning in bfloat16 changes about one element of a hundred."""
    torch.manual_seed(0)
    model = nn.Module()
    for number in range(100):
        model.register_parameter(f"w{number}", nn.Parameter(torch.randn(200, 100)))
    watch = WeightWatch(model, lambda: "path")
    for parameter in model.parameters():
        parameter.data += (torch.rand_like(parameter) < 0.01).float()
    assert not watch.check()()


def test_weights_packed_away_by_a_backend() -> None:
    """vLLM's CPU backend leaves an empty parameter and a function that holds the weights."""
    model = Model()
    linear = model.layers[0].qkv
    linear.weight = nn.Parameter(torch.empty(0), requires_grad=False)
    linear.cpu_linear = lambda x: x
    watch = WeightWatch(model, lambda: "path")
    assert watch.check()()
    linear.cpu_linear = lambda x: x + 1
    assert not watch.check()()


def test_another_source_of_the_weights() -> None:
    source = ["model"]
    watch = WeightWatch(Model(), lambda: source[0])
    source[0] = "other-model"
    assert not watch.check()()


def test_experts_that_move_between_ranks_are_no_change() -> None:
    model = nn.Module()
    model.experts = nn.Linear(4, 4)
    model.router = nn.Linear(4, 4)
    watch = WeightWatch(model, lambda: "path", experts_move=True)
    model.experts.weight.data += 1
    assert watch.check()()
    model.router.weight.data += 1
    assert not watch.check()()


def test_the_model_is_found_by_its_layers() -> None:
    wrapper, other = Wrapper(), Wrapper()
    attention = [layer.attn for layer in wrapper.model.layers]
    assert find_model(attention) is wrapper
    assert find_model([attention[0], other.model.layers[0].attn]) is None
