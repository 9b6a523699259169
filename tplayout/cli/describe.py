"""How namespaces, geometries and prefixes look, for the verbs that show them."""

from __future__ import annotations

from typing import Any

from tplayout.admin.catalog import Namespace
from tplayout.admin.prefixes import Segment
from tplayout.cli.common import moment
from tplayout.format.geometry import Geometry, Group
from tplayout.format.identity import StorageFacts

SHORT = 12  # hex digits of a key that tell it from others, for people


def namespace_json(space: Namespace) -> dict[str, Any]:
    """A namespace for --json. What its document says is null where that cannot be read; `fault` says why."""
    oldest, newest = space.times()
    document = space.document
    identity = None if document is None else document.identity
    return {
        "namespace": space.name,
        "model": None if document is None else document.model,
        "weights": None if identity is None else identity.weights,
        "compute_dtype": None if identity is None else identity.compute_dtype,
        "quantization": None if identity is None else identity.quantization,
        "chunk_tokens": None if identity is None else identity.geometry.chunk_tokens,
        "groups": None if identity is None else [group_json(group) for group in identity.geometry.groups],
        "digest": None if document is None else document.storage.digest,
        "key_id": None if document is None else document.storage.key_id,
        "codec": None if document is None else document.storage.codec,
        "encryption_key_id": None if document is None else document.storage.encryption_key_id,
        "chunks": space.chunks,
        "objects": len(space.objects),
        "bytes": space.nbytes,
        "oldest": moment(oldest),
        "newest": moment(newest),
        "fault": None if space.fault is None else str(space.fault),
    }


def stored_as(facts: StorageFacts, full: bool = True) -> str:
    """Codec, encryption key and secret in a few words: "aes-256-gcm, key 1a2b…"; full: with the keys' ids."""
    if not full:
        return facts.codec + (", secret" if facts.key_id else "")
    key = f", encryption key {facts.encryption_key_id}" if facts.encryption_key_id else ""
    return f"{facts.codec}{key}; digests {facts.digest}" + (f", secret {facts.key_id}" if facts.key_id else "")


def group_json(group: Group) -> dict[str, Any]:
    """A group for --json: FORMAT.md's members but the scales."""
    members = group.to_json()
    members["scales"] = group.scales is not None
    return members


def dtypes(geometry: Geometry) -> str:
    """The KV dtypes, once each: "BF16"."""
    return "+".join(dict.fromkeys(group.dtype for group in geometry.groups))


def shape(geometry: Geometry) -> str:
    """The groups in a few words: "30 layers x 3 heads x (k64 v64)"."""
    return ", ".join(group_shape(group) for group in geometry.groups)


def group_shape(group: Group) -> str:
    """One group in a few words."""
    parts = " ".join(f"{part.name}{part.dim}" for part in group.parts)
    kind = "" if group.kind == "full" else f"{group.name}: "
    return f"{kind}{len(group.layers)} layers x {group.heads} heads x ({parts})"


def segment_json(segment: Segment, chunk_tokens: int) -> dict[str, Any]:
    """A segment of a prefix tree for --json."""
    start = segment.start
    return {
        "depth": segment.depth,
        "first": segment.first.hex(),
        "last": segment.last.hex(),
        "start_token": None if start is None else start * chunk_tokens,
        "tokens": segment.chunks * chunk_tokens,
        "chunks": segment.chunks,
        "bytes": segment.nbytes,
        "oldest": moment(segment.oldest),
        "newest": moment(segment.newest),
        "waits_for": None if segment.waits_for is None else segment.waits_for.hex(),
        "lacks": list(segment.lacks),
    }


def segment_place(segment: Segment, chunk_tokens: int) -> str:
    """Where a segment is in its prefix, indented by its depth: "└ 512..1024"."""
    tokens = segment.chunks * chunk_tokens
    mark = "  " * min(segment.depth - 1, 20) + "└ " if segment.depth else ""
    if segment.start is None:
        return f"{mark}?..?+{tokens}"
    start = segment.start * chunk_tokens
    return f"{mark}{start}..{start + tokens}"


def segment_remark(segment: Segment) -> str:
    """What keeps servers from using it."""
    remarks = []
    if segment.waits_for is not None:
        remarks.append(f"gap: waits for {segment.waits_for.hex()[:SHORT]}")
    if segment.lacks:
        remarks.append(f"gap: lacks {', '.join(segment.lacks)}")
    return "; ".join(remarks)
