"""What a worker says about a layer is right, or the layer is refused by name."""

from types import SimpleNamespace

import pytest
import torch

from tplayout.errors import ConfigError
from tplayout_vllm.discovery import _scales


def layer(k: list[float], v: list[float]) -> SimpleNamespace:
    """A layer as vLLM leaves it after loading: of scales by head, the float is only the largest."""
    scales = {"_k_scale": torch.tensor(k), "_v_scale": torch.tensor(v)}
    return SimpleNamespace(**scales, _k_scale_float=max(k), _v_scale_float=max(v))


def test_one_scale_a_part() -> None:
    assert _scales("layer", layer([0.5], [0.25]), latent=False) == (0.5, 0.25)
    assert _scales("layer", layer([0.5], [0.25]), latent=True) == (0.5, 0.5)


@pytest.mark.parametrize(("k", "v"), [([0.5, 0.25], [1.0]), ([1.0], [0.5, 0.25])])
def test_scales_by_head_are_refused(k: list[float], v: list[float]) -> None:
    with pytest.raises(ConfigError, match=r"layer model\.layers\.7.*differ by head"):
        _scales("model.layers.7", layer(k, v), latent=False)
