"""Which requests can be keyed, and with what besides their tokens.

Layer: scheduler side. What cannot be keyed is neither stored nor loaded: a missing digest in a key would hand one
request's KV to another.
"""

from __future__ import annotations

from typing import Any

from tplayout.format.keys import EXTRA_SALT

Extras = tuple[tuple[str, bytes], ...]


def unkeyable(request: Any) -> str | None:
    """Why a request's KV is not named by its tokens and extras, or None when it is."""
    if request.prompt_embeds is not None:
        return "prompt-embeds"
    if request.mm_features:
        return "multimodal"
    if request.lora_request is not None:
        return "lora"
    if request.pooling_params is not None:
        return "pooling"
    if request.resumable:
        return "streaming-input"
    return None


def extras(request: Any) -> Extras:
    """What belongs into every chunk key of a request besides its tokens."""
    return ((EXTRA_SALT, request.cache_salt.encode()),) if request.cache_salt else ()
