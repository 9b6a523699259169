"""Why a prompt misses, by name: two identities compared, and a chunk compared with those that are stored in its place.

Pure: knows no store.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from tplayout.format.identity import Identity
from tplayout.format.keys import NO_EXTRAS, ChunkId


class Why(StrEnum):
    """The reasons. The values are stable."""

    EMPTY = "empty-store"  # no namespace at all
    TOO_SHORT = "too-short"  # the prompt has no full chunk
    DTYPE = "dtype"  # of the forward pass, and with it of the KV
    KV_DTYPE = "kv-dtype"
    WEIGHTS = "weights"
    CHUNK_SIZE = "chunk-size"
    QUANTIZATION = "quantization"
    SCALES = "scales"  # of a quantised KV cache
    GEOMETRY = "geometry"  # heads, layers, windows …
    CONFIG = "config"  # another field of the model's configuration
    ENCRYPTION = "encryption-key"  # encrypted with another key, or with one at all
    SECRET = "secret"  # digests keyed with another secret, or with one at all
    DOCUMENT = "damaged-namespace"  # namespace.json cannot be read
    EXTRAS = "salt"  # another cache salt, or adapter, or multimodal item
    FIRST_TOKEN = "first-token"  # equal but for the first token: a BOS is missing or superfluous
    DIVERGES = "diverges"  # another prompt is stored that begins so
    NOT_STORED = "not-stored"  # nothing like it is stored
    GAP = "gap"  # later chunks are stored, this one is not
    DAMAGED = "damaged"
    WINDOW = "window"  # a sliding window's part is missing


@dataclass(frozen=True)
class Cause:
    """One reason. text: for people. namespace: the one it is about; field, ours, theirs: what differs."""

    why: Why
    text: str
    namespace: str | None = None
    field: str | None = None
    ours: Any = None
    theirs: Any = None


_GROUP_FIELD = re.compile(r"geometry\.groups\[\d+\](?:\.(\w+).*)?")


def identity_causes(ours: Identity, theirs: Identity, weights_known: bool = True) -> list[Cause]:
    """In what two identities differ; the most telling first. weights_known: False leaves the weights out."""
    causes: dict[tuple[Why, Any, Any], Cause] = {}
    for field, mine, other in ours.diff(theirs):
        why, name = _of_field(field)
        if why is Why.WEIGHTS and not weights_known:
            continue
        text = f"{name}: {_short(mine)} vs {_short(other)}"
        causes.setdefault((why, str(mine), str(other)), Cause(why, text, theirs.namespace, field, mine, other))
    if any(cause.why is Why.DTYPE for cause in causes.values()):  # the KV dtype follows from it
        causes = {key: cause for key, cause in causes.items() if cause.why is not Why.KV_DTYPE}
    order = list(Why)
    return sorted(causes.values(), key=lambda cause: order.index(cause.why))


def sibling_cause(chunk: ChunkId, siblings: Iterable[ChunkId]) -> Cause:
    """Why a chunk is not stored where others are that continue the same prefix."""
    others = list(siblings)
    for other in others:
        if other.tokens == chunk.tokens:
            return _extras_cause(chunk, other)
    if chunk.index == 0:
        for other in others:
            cause = _first_token_cause(chunk.tokens, other.tokens)
            if cause is not None:
                return cause
    nearest = max(others, key=lambda other: _common(chunk.tokens, other.tokens), default=None)
    where = chunk.index * len(chunk.tokens)
    if nearest is None or not _common(chunk.tokens, nearest.tokens):
        if chunk.index:
            text = f"nothing of the prompt is stored from token {where} on: it is new, or was never complete"
        else:
            text = "no stored prompt begins with this first token: it was never stored, or is gone"
        return Cause(Why.NOT_STORED, text)
    at = _common(chunk.tokens, nearest.tokens)
    mine, other_token = chunk.tokens[at], nearest.tokens[at]
    text = f"differs from the nearest stored prompt at token {where + at}: {mine} here, {other_token} stored"
    return Cause(Why.DIVERGES, text, field=f"tokens[{where + at}]", ours=mine, theirs=other_token)


def _of_field(field: str) -> tuple[Why, str]:
    """The reason that a differing field is, and its name for people."""
    simple = {
        "weights": (Why.WEIGHTS, "weights fingerprint"),
        "compute_dtype": (Why.DTYPE, "dtype"),
        "quantization": (Why.QUANTIZATION, "weight quantization"),
        "geometry.chunk_tokens": (Why.CHUNK_SIZE, "chunk size"),
    }
    if field in simple:
        return simple[field]
    if (match := _GROUP_FIELD.fullmatch(field)) is not None:
        if match[1] == "dtype":
            return Why.KV_DTYPE, "KV dtype"
        if match[1] == "scales":
            return Why.SCALES, "KV scales"
        return Why.GEOMETRY, field.removeprefix("geometry.")
    if field.startswith("config."):
        return Why.CONFIG, field
    return Why.GEOMETRY, field


def _extras_cause(ours: ChunkId, theirs: ChunkId) -> Cause:
    if ours.extras == NO_EXTRAS:
        text = "the same tokens are stored with a salt (or an adapter, or multimodal items), and asked for without"
    elif theirs.extras == NO_EXTRAS:
        text = "the same tokens are stored without a salt or adapter, and asked for with one"
    else:
        text = "the same tokens are stored with another salt (or adapter, or multimodal items)"
    return Cause(Why.EXTRAS, text, field="extras", ours=ours.extras.hex(), theirs=theirs.extras.hex())


def _first_token_cause(ours: Sequence[int], theirs: Sequence[int]) -> Cause | None:
    if len(ours) < 2:
        return None
    text = None
    if theirs[1:] == ours[:-1]:
        text = f"the stored prompt begins with token {theirs[0]}, which is missing here: a BOS?"
    elif ours[1:] == theirs[:-1]:
        text = f"the prompt begins with token {ours[0]}, which the stored one does not have: a BOS too many?"
    elif ours[1:] == theirs[1:]:
        text = f"only the first token differs: {ours[0]} here, {theirs[0]} stored: another BOS?"
    return None if text is None else Cause(Why.FIRST_TOKEN, text, None, "tokens[0]", ours[0], theirs[0])


def _common(ours: Sequence[int], theirs: Sequence[int]) -> int:
    """How many tokens are equal from the beginning."""
    for index, (mine, other) in enumerate(zip(ours, theirs, strict=False)):
        if mine != other:
            return index
    return min(len(ours), len(theirs))


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:28]}…{text[-28:]}"
