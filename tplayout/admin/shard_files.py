"""Per-rank shards: one safetensors file a rank, tensors named by layer, [token, head, dim].

A plain interchange for programs that know nothing of chunks, described in README under "Per-rank shards". A file
is a function of identity, tokens, rank and KV alone, so the same KV gives the same files.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tplayout.admin.tensor_file import Head, head_of
from tplayout.errors import FormatError, GeometryError, Reason
from tplayout.format.canonical import canonical_json, parse_json
from tplayout.format.geometry import Geometry, Group
from tplayout.format.header import MAX_HEADER_BYTES, Header
from tplayout.format.identity import Identity
from tplayout.format.keys import KEY_BYTES
from tplayout.format.sharding import Shard, head_range, shard_of

VERSION = "1"
MARK = "tplayout_shard"


@dataclass(frozen=True)
class Rank:
    """One rank's place. layers: the model's layer numbers of its pipeline stage."""

    tp_rank: int
    tp_size: int
    pp_rank: int
    pp_size: int
    layers: tuple[int, ...]

    @property
    def file_name(self) -> str:
        """What the tools call its file."""
        return f"tp-{self.tp_rank}-of-{self.tp_size}.pp-{self.pp_rank}-of-{self.pp_size}.safetensors"

    def shard(self, group: Group) -> Shard:
        """The group's cells that this rank holds. Raises GeometryError for a TP size that does not divide."""
        return shard_of(group, self.tp_size, self.tp_rank, self.layers)


@dataclass(frozen=True)
class ShardHeader:
    """What a shard file says about itself. absent: group name -> chunks whose rows are zeros since they were gone."""

    rank: Rank
    geometry: Geometry
    tokens: int
    identity: Identity | None
    model: str
    absent: Mapping[str, tuple[int, ...]]
    extras: bool


def tensor_name(geometry: Geometry, group: Group, layer: int, part: str) -> str:
    """Name of a layer's tensor. layer: the model's number; where two groups have it, the later's name is in front."""
    first = next(each for each in geometry.groups if layer in each.layers)
    return f"layers.{layer}.{part}" if first == group else f"{group.name}.layers.{layer}.{part}"


def rows_of(group: Group, chunk_tokens: int, tokens: range) -> range:
    """Rows of a group's tensors for these tokens: one a token, or one a chunk for recurrent state."""
    if group.kind != "state":
        return tokens
    return range(tokens.start // chunk_tokens, tokens.stop // chunk_tokens)


def expected_tensors(header: ShardHeader) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Name -> dtype and shape of every tensor of such a file, in the order in which the tools write them."""
    chunk_tokens = header.geometry.chunk_tokens
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {"tokens": ("I32", (header.tokens,))}
    if header.extras:
        tensors["extras"] = ("U8", (header.tokens // chunk_tokens, KEY_BYTES))
    for group in header.geometry.groups:
        heads = len(head_range(group.heads, header.rank.tp_size, header.rank.tp_rank))
        rows = len(rows_of(group, chunk_tokens, range(header.tokens)))
        for layer in header.rank.layers:
            for part in group.parts if layer in group.layers else ():
                tensors[tensor_name(header.geometry, group, layer, part.name)] = (group.dtype, (rows, heads, part.dim))
    return tensors


def shard_head(header: ShardHeader) -> Head:
    """The head of a rank's file. Raises GeometryError for more layers than a header holds."""
    metadata = {
        MARK: VERSION,
        "geometry": canonical_json(header.geometry.to_json()).decode(),
        "layers": canonical_json(header.rank.layers).decode(),
        "pp_rank": str(header.rank.pp_rank),
        "pp_size": str(header.rank.pp_size),
        "tp_rank": str(header.rank.tp_rank),
        "tp_size": str(header.rank.tp_size),
    }
    if header.identity is not None:
        metadata["identity"] = canonical_json(header.identity.to_json()).decode()
    if header.model:
        metadata["model"] = header.model
    if header.absent:
        metadata["absent"] = canonical_json({name: list(chunks) for name, chunks in header.absent.items()}).decode()
    return head_of(metadata, expected_tensors(header))


def read_shard_header(header: Header, where: str) -> ShardHeader:
    """Parse and check a shard file's header. where: the file, for messages.

    Raises FormatError: not-a-chunk for another safetensors file, wrong-version, bad-metadata, and bad-shape or
    bad-dtype for tensors that are not what the metadata gives.
    """
    fields = header.metadata
    if MARK not in fields:
        raise FormatError(Reason.NOT_A_CHUNK, f"no per-rank shard: its metadata has no {MARK!r}", where)
    if fields[MARK] != VERSION:
        raise FormatError(Reason.WRONG_VERSION, f"shard format {fields[MARK][:20]!r}, known is {VERSION}", where)
    try:
        geometry = Geometry.from_json(_json(fields, "geometry"))
        tp_rank, tp_size, pp_rank, pp_size = (
            _decimal(fields, name) for name in ("tp_rank", "tp_size", "pp_rank", "pp_size")
        )
        rank = Rank(tp_rank, tp_size, pp_rank, pp_size, _layers(_json(fields, "layers")))
        identity = Identity.from_json(_json(fields, "identity")) if "identity" in fields else None
        absent = _absent(_json(fields, "absent"), geometry) if "absent" in fields else {}
        for group in geometry.groups:
            rank.shard(group)
    except (GeometryError, FormatError) as error:
        raise FormatError(Reason.BAD_METADATA, str(error)[:400], where) from None
    if not 0 <= rank.pp_rank < rank.pp_size:
        raise FormatError(Reason.BAD_METADATA, f"pp_rank {rank.pp_rank} of pp_size {rank.pp_size}", where)
    if identity is not None and identity.geometry != geometry:
        raise FormatError(Reason.BAD_METADATA, "the identity's geometry is not the file's geometry", where)
    stored = header.tensors.get("tokens")
    if stored is None or stored.dtype != "I32" or len(stored.shape) != 1:
        raise FormatError(Reason.BAD_TENSOR, "tensor 'tokens' must be there, I32 of one dimension", where)
    found = ShardHeader(
        rank, geometry, stored.shape[0], identity, fields.get("model", ""), absent, "extras" in header.tensors
    )
    _check_tensors(header, found, where)
    return found


def _check_tensors(header: Header, found: ShardHeader, where: str) -> None:
    wanted = expected_tensors(found)
    for name, (dtype, shape) in wanted.items():
        tensor = header.tensors.get(name)
        if tensor is None:
            raise FormatError(Reason.BAD_TENSOR, f"tensor {name!r} is missing", where)
        if tensor.dtype != dtype:
            raise FormatError(Reason.BAD_DTYPE, f"{name!r} is {tensor.dtype}, the geometry says {dtype}", where)
        if tensor.shape != shape:
            reason = f"{name!r} is {list(tensor.shape)}, must be {list(shape)} (tokens, this rank's heads, dim)"
            raise FormatError(Reason.BAD_SHAPE, reason, where)
    foreign = sorted(header.tensors.keys() - wanted.keys())
    if foreign:
        raise FormatError(Reason.BAD_TENSOR, f"tensors that the geometry does not have: {foreign[:3]}", where)


def _json(fields: Mapping[str, str], name: str) -> Any:
    if name not in fields:
        raise GeometryError(f"metadata {name!r} is missing")
    return parse_json(fields[name].encode("utf-8", "surrogatepass"), MAX_HEADER_BYTES)


def _decimal(fields: Mapping[str, str], name: str) -> int:
    text = fields.get(name, "")
    if not text.isascii() or not text.isdecimal() or len(text) > 6:
        raise GeometryError(f"metadata {name!r} is {text[:20]!r}, must be a plain decimal")
    return int(text)


def _layers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or not all(type(layer) is int and layer >= 0 for layer in value):
        raise GeometryError("metadata 'layers' must be an array of layer numbers")
    if sorted(set(value)) != value:
        raise GeometryError("metadata 'layers' must be ascending without repeats")
    return tuple(value)


def _absent(value: Any, geometry: Geometry) -> dict[str, tuple[int, ...]]:
    if not isinstance(value, dict):
        raise GeometryError("metadata 'absent' must be an object")
    names = {group.name for group in geometry.groups}
    for name, chunks in value.items():
        if name not in names or not isinstance(chunks, list) or not all(type(i) is int and i >= 0 for i in chunks):
            raise GeometryError(f"metadata 'absent' has {name!r}: must map groups to chunk numbers")
    return {name: tuple(chunks) for name, chunks in value.items()}


def ranks_of(geometry: Geometry, tp_size: int, stages: Sequence[range]) -> list[Rank]:
    """All ranks of a TP size and the layer numbers of each pipeline stage.

    Raises GeometryError that names the first group which that TP size does not split.
    """
    for group in geometry.groups:
        head_range(group.heads, tp_size, 0)
    return [
        Rank(tp_rank, tp_size, pp_rank, len(stages), tuple(layers))
        for pp_rank, layers in enumerate(stages)
        for tp_rank in range(tp_size)
    ]
