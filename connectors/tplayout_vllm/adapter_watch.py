"""Checks that a rank computes with the LoRA adapter by whose files a request was keyed.

Layer: below worker.py. The scheduler's side names an adapter by a digest of its files, and vLLM may by then hold
another version: `load_inplace` replaces an adapter while requests run, and tells no connector. What the two sides say
about an adapter must therefore stay one to one: one content that is loaded for one digest.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from blake3 import blake3
from torch import nn

from tplayout_vllm.metadata import AdapterRef

_SAMPLES = 256  # elements of a tensor: adapters are small, and training changes most of them


class AdapterWatch:
    """Remembers what was loaded for each digest. manager: vLLM's, which has the loaded adapters by number."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager
        self._contents: dict[int, tuple[Callable[[], Any], bytes]] = {}  # number -> who it was, what it held
        self._content_of: dict[bytes, bytes] = {}
        self._digest_of: dict[bytes, bytes] = {}

    def loaded(self, adapter: AdapterRef) -> bool:
        """Whether an adapter of that number is loaded: else vLLM loads it with the request's first step."""
        return self._manager.get_adapter(adapter.number) is not None

    def agrees(self, adapter: AdapterRef) -> bool:
        """Whether what is loaded is what the digest has always stood for. The first time it is taken to be."""
        content = self._content(adapter.number)
        if content is None:
            return False
        known = self._content_of.setdefault(adapter.digest, content)
        return known == content and self._digest_of.setdefault(content, adapter.digest) == adapter.digest

    def _content(self, number: int) -> bytes | None:
        """A digest of samples of what is loaded, taken once for each time it is loaded."""
        model = self._manager.get_adapter(number)
        if model is None:
            return None
        known = self._contents.get(number)
        if known is None or known[0]() is not model:
            known = self._contents[number] = (weakref.ref(model), _sampled(model))
        return known[1]


def adapter_watch(model: nn.Module | None) -> AdapterWatch | None:
    """The watch of a model that vLLM has prepared for adapters, None for any other."""
    managers = (vars(module).get("lora_manager") for module in (model.modules() if model is not None else ()))
    manager = next((found for found in managers if found is not None), None)
    return None if manager is None else AdapterWatch(manager)


def _sampled(model: Any) -> bytes:
    hasher = blake3()
    for name, layer in sorted({**model.loras, **getattr(model, "modules_to_save", {})}.items()):
        for tensor in _tensors(layer):
            flat = tensor.detach().reshape(-1)
            samples = flat[:: -(-flat.numel() // _SAMPLES)].cpu().contiguous() if flat.numel() else flat.cpu()
            hasher.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
            hasher.update(samples.view(torch.uint8).numpy().tobytes())
    return hasher.digest()


def _tensors(layer: Any) -> Iterator[torch.Tensor]:
    """The tensors of a layer's adapter: vLLM keeps one, or a list with gaps where it has fused layers."""
    for _, value in sorted(vars(layer).items()):
        for each in value if isinstance(value, list | tuple) else [value]:
            if isinstance(each, torch.Tensor):
                yield each
