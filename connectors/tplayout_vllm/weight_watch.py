"""Notices weights that change while the server runs.

Layer: below worker.py. vLLM can replace weights in place (`reload_weights`, a worker extension, after sleep level 2)
and tells no connector. KV of the new weights under the old ones' identity would be wrong for every other server, so
each rank looks at its own weights whenever it copies.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

logger = logging.getLogger("vllm.tplayout")

# Elements of each tensor that are compared. Fine-tuning in bfloat16 leaves most of them alone: of a model's 300
# tensors these are 10,000, of which a hundredth is enough.
SAMPLES = 32

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # compared as bits: NaN is not equal to NaN


class WeightWatch:
    """Compares a rank's weights with what they were when it was made.

    model: the module that holds them. source: what tells where they came from, such as vLLM's model_config.model.
    experts_move: expert weights are exchanged between ranks (EPLB), which changes no KV: they are left out.
    """

    def __init__(self, model: nn.Module, source: Callable[[], Any], experts_move: bool = False) -> None:
        named = [
            (name, parameter.detach())
            for name, parameter in model.named_parameters()
            if not (experts_move and ".experts." in f".{name}")
        ]
        self._samples = _by_kind([tensor for _, tensor in named])
        self._packed = [module for module in model.modules() if _is_packed(module)]
        self._source = source
        self._first = self._look(), self._handlers(), source()
        self.changed = False

    def check(self) -> Callable[[], bool]:
        """Look at the weights now; the answer, True if they are still the first ones, once that look has ended.

        On an accelerator the look is queued behind the engine's work, and the answer waits for it.
        """
        if self.changed:
            return lambda: False
        bits, handlers, source = self._first
        same = [torch.eq(now, then).all() for now, then in zip(self._look(), bits, strict=True)]
        elsewhere = self._handlers() != handlers or self._source() != source
        return lambda: self._answer(elsewhere or not all(map(bool, same)))

    def _answer(self, changed: bool) -> bool:
        if changed and not self.changed:
            logger.error(
                "tplayout: the weights have changed while the server runs, so its KV is another model's: nothing is "
                "saved or loaded any more. Restart the server to use the cache with the new weights"
            )
        self.changed |= changed
        return not self.changed

    def _look(self) -> list[torch.Tensor]:
        return [torch.cat(views) for views in self._samples]

    def _handlers(self) -> list[dict[str, int]]:
        return [{name: id(value) for name, value in vars(module).items() if callable(value)} for module in self._packed]


def find_model(layers: list[nn.Module]) -> nn.Module | None:
    """The module of this process that holds all these layers, None if there is none. vLLM hands out the layers only."""
    wanted = set(map(id, layers))
    for found in gc.get_objects():
        # Not isinstance: that asks the object, and some load modules when asked.
        if issubclass(type(found), nn.Module) and wanted <= {id(module) for module in found.modules()}:
            return _outermost(found)
    return None


def _outermost(module: nn.Module) -> nn.Module:
    """The module at the top of the tree that `module` is in."""
    for parent in gc.get_objects():
        if issubclass(type(parent), nn.Module) and any(child is module for child in parent.children()):
            return _outermost(parent)
    return module


def _is_packed(module: nn.Module) -> bool:
    """Whether a backend has put the weights into a format of its own, behind a function; vLLM's CPU backend does."""
    return any(parameter.numel() == 0 for parameter in module.parameters(recurse=False))


def _by_kind(tensors: list[torch.Tensor]) -> list[list[torch.Tensor]]:
    """Views of samples of the tensors that can be compared in one go: those of one device and element size."""
    kinds: dict[tuple[torch.device, int], list[torch.Tensor]] = {}
    for tensor in tensors:
        for view in _sample(tensor):
            kinds.setdefault((view.device, view.element_size()), []).append(view)
    return list(kinds.values())


def _sample(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """One view of at most SAMPLES elements, evenly spaced in memory; none of a tensor without elements of its own."""
    order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
    dense = tensor.permute(order)
    if tensor.numel() == 0 or not dense.is_contiguous() or tensor.element_size() not in _BITS:
        return
    yield dense.view(_BITS[tensor.element_size()]).view(-1)[:: -(-tensor.numel() // SAMPLES)]
