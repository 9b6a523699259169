"""Which requests can be keyed, and with what besides their tokens.

Layer: scheduler side. What cannot be keyed is neither stored nor loaded: a missing digest in a key would hand one
request's KV to another.
"""

from __future__ import annotations

from typing import Any

from tplayout.format.keys import EXTRA_LORA, EXTRA_SALT
from tplayout_vllm.adapters import Adapters

Extras = tuple[tuple[str, bytes], ...]


class Keying:
    """Decides a request at a time; remembers the adapters it has seen."""

    def __init__(self) -> None:
        self._adapters = Adapters()

    def extras(self, request: Any) -> Extras | str:
        """What belongs into every chunk key of a request besides its tokens, or why it cannot be keyed."""
        reason = _unkeyable(request)
        if reason is not None:
            return reason
        extras: list[tuple[str, bytes]] = []
        if request.lora_request is not None:
            digest = self._adapters.digest(request.lora_request)
            if digest is None:
                return "lora"
            extras.append((EXTRA_LORA, digest))
        if request.cache_salt:
            extras.append((EXTRA_SALT, request.cache_salt.encode()))
        return tuple(extras)


def _unkeyable(request: Any) -> str | None:
    if request.prompt_embeds is not None:
        return "prompt-embeds"
    if request.mm_features:
        return "multimodal"  # their identifiers may be the caller's own, which are no digests of the content
    if request.pooling_params is not None:
        return "pooling"
    if request.resumable:
        return "streaming-input"
    return None
