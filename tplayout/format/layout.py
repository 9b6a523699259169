"""Where everything is in a chunk object: a function of geometry, group and digest alone.

A reader knows every byte range before it has read a byte. All ranges and offsets are bytes in the FILE.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tplayout.errors import FormatError, GeometryError, Reason
from tplayout.format.canonical import canonical_json, parse_json
from tplayout.format.digest import DIGEST_BYTES, KEY_ID_BYTES, KEYED, digest_bytes
from tplayout.format.geometry import MAX_CHUNK_TOKENS, MAX_GROUPS, Geometry, Group
from tplayout.format.header import LENGTH_BYTES, MAX_HEADER_BYTES, Header
from tplayout.format.keys import KEY_BYTES
from tplayout.format.sharding import Shard

FORMAT_VERSION = 1
ALIGN = 4096
CODEC_NONE = "none"
CODEC_SHUFFLE_ZSTD = "shuffle-zstd"
CODEC_AES_256_GCM = "aes-256-gcm"
CODECS = (CODEC_NONE, CODEC_SHUFFLE_ZSTD, CODEC_AES_256_GCM)
MERGE_GAP = 65536  # reading this many unwanted bytes is cheaper than another request
_TOKEN_BYTES = 4


@dataclass(frozen=True)
class ChunkLayout:
    """Byte ranges of one chunk object of one group.

    header: the file's first data_start bytes, length field and padding included. nbytes: of the whole file.
    cell_bytes, digest_size: of one cell. sections: where the first head's section starts; each head has
    section_bytes, a multiple of ALIGN: digests of its layers, their cells, zeros.
    """

    group: Group
    group_index: int
    chunk_tokens: int
    digest_name: str
    digest_size: int
    key_id: str | None
    data_start: int
    sections: int
    section_bytes: int
    cell_bytes: int
    header: bytes = field(repr=False)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole object."""
        return self.sections + self.group.heads * self.section_bytes

    def metadata(self, codec: str) -> dict[str, str]:
        """`__metadata__` of an object of that codec, but for what a codec adds."""
        return _metadata(self.group, self.group_index, self.chunk_tokens, self.digest_name, self.key_id, codec)

    @property
    def tokens_range(self) -> range:
        """Token ids, int32 little-endian."""
        return range(self.data_start, self.data_start + _TOKEN_BYTES * self.chunk_tokens)

    @property
    def parent_range(self) -> range:
        """Key of the parent chunk, 32 bytes."""
        return range(self.tokens_range.stop, self.tokens_range.stop + KEY_BYTES)

    @property
    def extras_range(self) -> range:
        """Digest of the extras, 32 bytes."""
        return range(self.parent_range.stop, self.parent_range.stop + KEY_BYTES)

    @property
    def ids_range(self) -> range:
        """Tokens, parent and extras, which follow one another: what the chunk's key is made of."""
        return range(self.tokens_range.start, self.extras_range.stop)

    def head_section(self, head: int) -> range:
        """Digests, cells and padding of one head."""
        if not 0 <= head < self.group.heads:
            raise GeometryError(f"group {self.group.name!r} has no head {head}")
        start = self.sections + head * self.section_bytes
        return range(start, start + self.section_bytes)

    def kv_offset(self, head: int) -> int:
        """Where the cells of a head start."""
        return self.head_section(head).start + len(self.group.layers) * self.digest_size

    def digests_range(self, head: int, layers: range) -> range:
        """Digests of consecutive layer positions of a head."""
        start = self.head_section(head).start
        return range(start + layers.start * self.digest_size, start + layers.stop * self.digest_size)

    def kv_range(self, head: int, layers: range) -> range:
        """Cells of consecutive layer positions of a head."""
        start = self.kv_offset(head)
        return range(start + layers.start * self.cell_bytes, start + layers.stop * self.cell_bytes)

    def digest_range(self, head: int, layer_pos: int) -> range:
        """Digest of one cell. layer_pos: position in group.layers."""
        return self.digests_range(head, range(layer_pos, layer_pos + 1))

    def cell_range(self, head: int, layer_pos: int) -> range:
        """Bytes of one cell. layer_pos: position in group.layers."""
        return self.kv_range(head, range(layer_pos, layer_pos + 1))

    def pads(self) -> Iterator[range]:
        """All padding of the data section; each shorter than ALIGN."""
        yield range(self.extras_range.stop, self.sections)
        used = len(self.group.layers) * (self.digest_size + self.cell_bytes)
        for head in range(self.group.heads):
            section = self.head_section(head)
            yield range(section.start + used, section.stop)

    def check_shard(self, shard: Shard) -> None:
        """GeometryError unless the shard lies in the group."""
        if shard.cells and (shard.heads.stop > self.group.heads or shard.layers.stop > len(self.group.layers)):
            raise GeometryError(f"group {self.group.name!r} does not hold {shard}")

    def shard_sections(self, shard: Shard) -> list[range]:
        """Ascending disjoint ranges with the shard's cells and digests; gaps up to MERGE_GAP are included."""
        self.check_shard(shard)
        if not shard.cells:
            return []
        wanted = [
            span
            for head in shard.heads
            for span in (self.digests_range(head, shard.layers), self.kv_range(head, shard.layers))
        ]
        merged = [wanted[0]]
        for span in wanted[1:]:
            if span.start - merged[-1].stop <= MERGE_GAP:
                merged[-1] = range(merged[-1].start, span.stop)
            else:
                merged.append(span)
        return merged


@lru_cache(maxsize=256)
def chunk_layout(geometry: Geometry, group_index: int, digest_name: str, key_id: str | None = None) -> ChunkLayout:
    """Layout of a geometry's group. key_id: of the secret, for keyed digests only.

    Raises GeometryError for a group that is not there or whose header exceeds MAX_HEADER_BYTES, FormatError
    for an unknown digest.
    """
    if not 0 <= group_index < len(geometry.groups):
        raise GeometryError(f"no group {group_index} in a geometry of {len(geometry.groups)}")
    return _layout(geometry.groups[group_index], group_index, geometry.chunk_tokens, digest_name, key_id)


def layouts_of(geometry: Geometry, digest_name: str, key_id: str | None = None) -> tuple[ChunkLayout, ...]:
    """Layouts of all groups of a geometry; see `chunk_layout`."""
    return tuple(chunk_layout(geometry, index, digest_name, key_id) for index in range(len(geometry.groups)))


def layout_of(header: Header) -> ChunkLayout:
    """The layout that a plain chunk's header declares, for tools that have no geometry at hand.

    Raises FormatError: not-a-chunk, wrong-version, wrong-codec, unsupported-codec, unsupported-digest, bad-metadata.
    That the header's bytes are this layout's is for `verify` to check.
    """
    layout, codec = stated_layout(header)
    if codec != CODEC_NONE:
        raise FormatError(Reason.WRONG_CODEC, f"codec is {codec}, must be {CODEC_NONE}")
    return layout


def stated_layout(header: Header) -> tuple[ChunkLayout, str]:
    """The layout of what a header's object holds, plain, and the codec that it is stored in. Raises as `layout_of`."""
    fields = header.metadata
    if "tplayout" not in fields:
        raise FormatError(Reason.NOT_A_CHUNK, "safetensors without tplayout metadata")
    if fields["tplayout"] != str(FORMAT_VERSION):
        wanted = f"this version reads {FORMAT_VERSION}"
        raise FormatError(Reason.WRONG_VERSION, f"format {fields['tplayout'][:20]!r}, {wanted}")
    codec = fields.get("codec")
    if codec is not None:
        check_codec(codec)
    digest = fields.get("digest")
    if digest is not None:
        digest_bytes(digest)
    key_id = ["key_id"] if digest == KEYED else []
    encryption = ["encryption_key_id"] if codec == CODEC_AES_256_GCM else []
    names = ["tplayout", "chunk_tokens", "codec", "digest", "group", "group_index", *key_id, *encryption]
    if fields.keys() != set(names):
        raise FormatError(Reason.BAD_METADATA, f"fields {sorted(fields)}, must be {sorted(names)}"[:400])
    if encryption and not is_key_id(fields["encryption_key_id"]):
        raise FormatError(Reason.BAD_METADATA, f"encryption_key_id is {fields['encryption_key_id'][:40]!r}")
    try:
        group = Group.from_json(parse_json(fields["group"].encode("utf-8"), MAX_HEADER_BYTES))
        chunk_tokens = _decimal(fields["chunk_tokens"], 1, MAX_CHUNK_TOKENS)
        index = _decimal(fields["group_index"], 0, MAX_GROUPS - 1)
        return _layout(group, index, chunk_tokens, fields["digest"], fields.get("key_id")), fields["codec"]
    except (GeometryError, FormatError, UnicodeEncodeError) as error:
        raise FormatError(Reason.BAD_METADATA, str(error)[:400]) from None


def is_key_id(text: str) -> bool:
    """Whether it can name a secret or an encryption key: 16 hex digits."""
    return len(text) == 2 * KEY_ID_BYTES and not text.strip("0123456789abcdef")


def check_codec(name: str) -> None:
    """FormatError unsupported-codec for a codec that this version does not know."""
    if name not in CODECS:
        raise FormatError(Reason.UNSUPPORTED_CODEC, f"{name[:100]!r}, known are {', '.join(CODECS)}")


def _decimal(text: str, low: int, high: int) -> int:
    if len(text) > 9 or not text.isascii() or not text.isdecimal() or str(int(text)) != text:
        raise GeometryError(f"{text[:20]!r} is no plain decimal")
    if not low <= int(text) <= high:
        raise GeometryError(f"{text} is not from {low} to {high}")
    return int(text)


def _layout(group: Group, group_index: int, chunk_tokens: int, digest_name: str, key_id: str | None) -> ChunkLayout:
    size = digest_bytes(digest_name)
    if (key_id is not None) != (digest_name == KEYED):
        raise GeometryError(f"digest {digest_name} with key id {key_id!r}: {KEYED} has one, others none")
    if key_id is not None and not is_key_id(key_id):
        raise GeometryError(f"key id {key_id[:40]!r} is not 16 hex digits")
    metadata = _metadata(group, group_index, chunk_tokens, digest_name, key_id, CODEC_NONE)
    info = _align(_TOKEN_BYTES * chunk_tokens + 2 * KEY_BYTES)
    cell = group.cell_bytes(chunk_tokens)
    section = _align(len(group.layers) * (size + cell))
    header = encode_header(metadata, _entries(group, chunk_tokens, size, info, section))
    start = len(header)
    return ChunkLayout(
        group,
        group_index,
        chunk_tokens,
        digest_name,
        size,
        key_id,
        start,
        start + info,
        section,
        cell,
        header,
    )


def _metadata(
    group: Group, group_index: int, chunk_tokens: int, digest_name: str, key_id: str | None, codec: str
) -> dict[str, str]:
    metadata = {
        "tplayout": str(FORMAT_VERSION),
        "chunk_tokens": str(chunk_tokens),
        "codec": codec,
        "digest": digest_name,
        "group": canonical_json(group.to_json()).decode(),
        "group_index": str(group_index),
    }
    if key_id is not None:
        metadata["key_id"] = key_id
    return metadata


def _align(nbytes: int) -> int:
    return -(-nbytes // ALIGN) * ALIGN


def _entries(group: Group, chunk_tokens: int, digest: int, info: int, section: int) -> dict[str, Any]:
    """The tensor entries in the order of their offsets, which count from the start of the data section."""
    layers, cell_shape = len(group.layers), group.cell_shape(chunk_tokens)
    entries: dict[str, Any] = {}
    offset = 0

    def add(name: str, dtype: str, shape: list[int], nbytes: int) -> None:
        nonlocal offset
        if nbytes:
            entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
            offset += nbytes

    add("tokens", "I32", [chunk_tokens], _TOKEN_BYTES * chunk_tokens)
    add("parent", "U8", [KEY_BYTES], KEY_BYTES)
    add("extras", "U8", [KEY_BYTES], KEY_BYTES)
    add("pad", "U8", [info - offset], info - offset)
    for head in range(group.heads):
        end = info + (head + 1) * section
        add(f"h{head}.digests", "U8", [layers, digest], layers * digest)
        add(f"h{head}.kv", group.dtype, [layers, *cell_shape], layers * group.cell_bytes(chunk_tokens))
        add(f"h{head}.pad", "U8", [end - offset], end - offset)
    return entries


def encode_header(metadata: Mapping[str, str], entries: dict[str, Any], least: int = 0) -> bytes:
    """The bytes before the data section, as few as are a multiple of ALIGN, `least` or more. Raises GeometryError."""
    text = json.dumps({"__metadata__": dict(sorted(metadata.items())), **entries}, separators=(",", ":"))
    length = max(least, _align(LENGTH_BYTES + len(text))) - LENGTH_BYTES
    if length > MAX_HEADER_BYTES:
        raise GeometryError(f"the header would have {length} bytes, at most {MAX_HEADER_BYTES}")
    return length.to_bytes(LENGTH_BYTES, "little") + text.encode("ascii").ljust(length)


assert set(DIGEST_BYTES.values()) <= {16, 32}  # cells stay aligned to 16 bytes for every dtype
