"""Which requests can be keyed, and with what besides their tokens.

Layer: scheduler side. What cannot be keyed is neither stored nor loaded: a missing digest in a key would hand one
request's KV to another.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tplayout.format.keys import Extras, prefix_extras
from tplayout_vllm.adapters import Adapters
from tplayout_vllm.metadata import AdapterRef

ExtrasOf = Callable[[int], Extras]  # from a chunk's index


class Keying:
    """Decides a request at a time; remembers the adapters it has seen."""

    def __init__(self, chunk_tokens: int) -> None:
        self._chunk_tokens = chunk_tokens
        self._adapters = Adapters()

    def extras(self, request: Any) -> ExtrasOf | str:
        """What belongs into the chunk keys of a request besides its tokens, or why it cannot be keyed."""
        reason = _unkeyable(request)
        if reason is not None:
            return reason
        digest = None
        if request.lora_request is not None:
            digest = self._adapters.digest(request.lora_request)
            if digest is None:
                return "lora"
        return prefix_extras(self._chunk_tokens, lora=digest, salt=request.cache_salt or None)

    def adapter(self, request: Any) -> AdapterRef | None:
        """The adapter by whose digest a request was keyed just now."""
        lora = request.lora_request
        return None if lora is None else AdapterRef(lora.lora_int_id, self._adapters.seen(lora))


def _unkeyable(request: Any) -> str | None:
    if request.prompt_embeds is not None:
        return "prompt-embeds"
    if request.mm_features:
        return "multimodal"  # their identifiers may be the caller's own, which are no digests of the content
    if request.pooling_params is not None:
        return "pooling"
    if request.resumable:
        return "streaming-input"
    tokens = request.prompt_token_ids or ()
    if tokens and not 0 <= min(tokens) <= max(tokens) < 2**31:
        return "tokens"  # vLLM checks them only where it has a tokenizer
    try:
        (request.cache_salt or "").encode()
    except UnicodeEncodeError:  # half a surrogate pair, which JSON can say and UTF-8 cannot
        return "salt"
    return None
