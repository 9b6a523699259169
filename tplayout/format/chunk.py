"""Sealing and verifying chunk objects in place.

A slot of memory holds an object's exact bytes: writers fill cells where they belong, `seal` adds the rest,
and `verify` accepts a buffer only if every byte of it is accounted for. Neither copies a cell.
"""

import struct
from collections.abc import Mapping
from itertools import islice

from tplayout.errors import FormatError, GeometryError, Reason
from tplayout.format.digest import CellHasher
from tplayout.format.header import Header, parse_header
from tplayout.format.keys import KEY_BYTES, ROOT, ChunkId, chunk_key, key_of_packed, pack_tokens
from tplayout.format.layout import ALIGN, ChunkLayout, layout_of
from tplayout.format.sharding import Shard, whole

Buffer = bytes | bytearray | memoryview
_ZEROS = bytes(ALIGN)


def write_info(buf: bytearray | memoryview, layout: ChunkLayout, chunk: ChunkId) -> None:
    """Write everything but cells and digests: header, tokens, parent, extras digest, all padding.

    buf: writable, at least layout.nbytes long; what is behind that is left alone.
    """
    view = _writable(buf, layout)
    if len(chunk.tokens) != layout.chunk_tokens:
        raise GeometryError(f"chunk of {len(chunk.tokens)} tokens, the layout has {layout.chunk_tokens}")
    view[: layout.data_start] = layout.header
    view[cut(layout.tokens_range)] = pack_tokens(chunk.tokens)
    view[cut(layout.parent_range)] = chunk.parent
    view[cut(layout.extras_range)] = chunk.extras
    for pad in layout.pads():
        view[cut(pad)] = _ZEROS[: len(pad)]


def write_digests(buf: bytearray | memoryview, layout: ChunkLayout, key: bytes, hasher: CellHasher) -> None:
    """Write the digests of the cells that buf holds. key: the chunk's."""
    view = _writable(buf, layout)
    _check_hasher(layout, hasher)
    group, size, layers = layout.group, layout.cell_bytes, range(len(layout.group.layers))
    for head in range(group.heads):
        cells = view[cut(layout.kv_range(head, layers))]
        view[cut(layout.digests_range(head, layers))] = b"".join(
            hasher.cell(key, group.name, head, layer, cells[row * size : (row + 1) * size])
            for row, layer in enumerate(group.layers)
        )


def seal(
    buf: bytearray | memoryview, layout: ChunkLayout, namespace: bytes, chunk: ChunkId, hasher: CellHasher
) -> None:
    """Complete an object whose cells are in place: buf[:layout.nbytes] then holds its exact bytes.

    namespace: 32 bytes. Raises FormatError wrong-key if chunk.key is not the key of its content.
    """
    if chunk_key(namespace, chunk.parent, chunk.tokens, chunk.extras) != chunk.key:
        raise FormatError(Reason.WRONG_KEY, f"{chunk.key.hex()} is not the key of these tokens")
    write_info(buf, layout, chunk)
    write_digests(buf, layout, chunk.key, hasher)


def verify(buf: Buffer, layout: ChunkLayout, namespace: bytes, expected_key: bytes, hasher: CellHasher) -> ChunkId:
    """Check that buf is, byte for byte, the object of that key.

    namespace: 32 bytes; expected_key: from the object's name. Raises FormatError with a reason; allocates
    nothing by what the content claims.
    """
    _check_hasher(layout, hasher)
    view = memoryview(buf).cast("B")
    chunk = check_info(view, len(view), layout, namespace, expected_key)
    for pad in islice(layout.pads(), 1, None):
        _check_padding(view, pad)
    verify_shard({range(layout.nbytes): view}, layout, chunk.key, hasher, whole(layout.group))
    return chunk


def check_info(head: Buffer, file_size: int, layout: ChunkLayout, namespace: bytes, expected_key: bytes) -> ChunkId:
    """Check an object by its size and its first layout.sections bytes: all but what its heads hold.

    head: these bytes or more; fewer if the object is shorter. Otherwise as `verify`.
    """
    view = memoryview(head).cast("B")
    if bytes(view[: layout.data_start]) != layout.header:
        raise _header_fault(view, file_size, layout)
    check_length(file_size, layout.nbytes)
    chunk = read_chunk_id(view, layout, namespace)
    if chunk.key != expected_key:
        raise FormatError(Reason.WRONG_KEY, f"content belongs to {chunk.key.hex()}, not to {expected_key.hex()}")
    if min(chunk.tokens) < 0:
        raise FormatError(Reason.BAD_TOKENS, f"token id {min(chunk.tokens)} is negative")
    _check_padding(view, next(layout.pads()))
    return chunk


def verify_shard(
    parts: Mapping[range, Buffer], layout: ChunkLayout, key: bytes, hasher: CellHasher, shard: Shard
) -> None:
    """Check a shard's cells in pieces of an object: byte range in the file -> its bytes.

    The pieces must hold what `layout.shard_sections(shard)` names. The chunk's key is in every digest, so the
    header need not be read. Raises FormatError: truncated, digest-mismatch.
    """
    _check_hasher(layout, hasher)
    layout.check_shard(shard)
    views = {span: memoryview(data).cast("B") for span, data in parts.items()}
    for span, view in views.items():
        check_length(len(view), len(span))
    group, size = layout.group, layout.digest_size
    for head in shard.heads if shard.cells else ():
        digests = piece(views, layout.digests_range(head, shard.layers))
        cells = piece(views, layout.kv_range(head, shard.layers))
        for row, position in enumerate(shard.layers):
            data = cells[row * layout.cell_bytes : (row + 1) * layout.cell_bytes]
            digest = hasher.cell(key, group.name, head, group.layers[position], data)
            if digests[row * size : (row + 1) * size] != digest:
                place = f"group {group.name!r}, head {head}, layer {group.layers[position]}"
                raise FormatError(Reason.DIGEST_MISMATCH, place)


def piece(parts: Mapping[range, Buffer], wanted: range) -> memoryview:
    """The bytes of a file range from pieces of the file, uncopied; FormatError truncated if not there."""
    for span, data in parts.items():
        if span.start <= wanted.start and wanted.stop <= span.stop:
            return memoryview(data)[wanted.start - span.start : wanted.stop - span.start]
    raise FormatError(Reason.TRUNCATED, f"bytes {wanted.start} to {wanted.stop} were not read")


def read_chunk_id(buf: Buffer, layout: ChunkLayout, namespace: bytes) -> ChunkId:
    """What an object says it is: its key computed from parent, tokens and extras. Nothing else is checked.

    buf: at least up to the extras. The index is not in the object and is -1, or 0 for a first chunk.
    """
    view = memoryview(buf).cast("B")
    if len(view) < layout.ids_range.stop:
        check_length(len(view), layout.nbytes)
    return parse_ids(view[cut(layout.ids_range)], layout, namespace)


def parse_ids(ids: Buffer, layout: ChunkLayout, namespace: bytes) -> ChunkId:
    """As `read_chunk_id`. ids: the object's bytes layout.ids_range alone."""
    data = bytes(ids)
    packed, parent, extras = data[: -2 * KEY_BYTES], data[-2 * KEY_BYTES : -KEY_BYTES], data[-KEY_BYTES:]
    key = key_of_packed(namespace, parent, packed, extras)
    tokens = struct.unpack(f"<{layout.chunk_tokens}i", packed)
    return ChunkId(key, parent, tokens, extras, 0 if parent == ROOT else -1)


def cut(span: range) -> slice:
    """What a range is of a buffer that begins where the range counts from."""
    return slice(span.start, span.stop)


def _writable(buf: bytearray | memoryview, layout: ChunkLayout) -> memoryview:
    view = memoryview(buf).cast("B")
    if len(view) < layout.nbytes:
        raise GeometryError(f"buffer of {len(view)} bytes for an object of {layout.nbytes}")
    return view


def check_length(got: int, wanted: int) -> None:
    """FormatError truncated or trailing unless there are as many bytes as must be."""
    if got != wanted:
        reason = Reason.TRUNCATED if got < wanted else Reason.TRAILING
        raise FormatError(reason, f"{got} bytes, must be {wanted}")


def _check_padding(view: memoryview, pad: range) -> None:
    if bytes(view[cut(pad)]) != _ZEROS[: len(pad)]:
        raise FormatError(Reason.BAD_PADDING, f"not zero between byte {pad.start} and {pad.stop}")


def _check_hasher(layout: ChunkLayout, hasher: CellHasher) -> None:
    if hasher.name != layout.digest_name:
        raise FormatError(Reason.WRONG_DIGEST, f"object has {layout.digest_name}, the hasher is {hasher.name}")
    if hasher.key_id != layout.key_id:
        raise FormatError(Reason.WRONG_SECRET, f"object has {layout.key_id}, the secret is {hasher.key_id}")


def _header_fault(view: memoryview, file_size: int, layout: ChunkLayout) -> FormatError:
    """Why a header is not the expected one. Returns, or raises, the error."""
    header = parse_header(view, file_size)
    fault = stated_fault(layout_of(header), layout)
    return tensor_fault(header, parse_header(layout.header, layout.nbytes)) if fault is None else fault


def stated_fault(theirs: ChunkLayout, layout: ChunkLayout) -> FormatError | None:
    """In what a header states another layout than this; None if it does not."""
    for reason, field in (
        (Reason.WRONG_DIGEST, "digest_name"),
        (Reason.WRONG_SECRET, "key_id"),
        (Reason.WRONG_GROUP, "group_index"),
        (Reason.WRONG_GEOMETRY, "chunk_tokens"),
    ):
        if getattr(theirs, field) != getattr(layout, field):
            detail = f"{field} is {getattr(theirs, field)}, must be {getattr(layout, field)}"
            return FormatError(reason, detail)
    if theirs.group.name != layout.group.name:
        return FormatError(Reason.WRONG_GROUP, f"{theirs.group.name!r}, must be {layout.group.name!r}")
    if theirs.group != layout.group:
        return FormatError(Reason.WRONG_GEOMETRY, f"group {layout.group.name!r} is laid out differently")
    return None


def overlap(one: range, other: range) -> bool:
    """Whether they have a byte in common."""
    return one.start < other.stop and other.start < one.stop


def paste(plain: bytearray, span: range, start: int, data: Buffer) -> None:
    """Copy data, which lies at `start` of an object, into plain, the object's bytes `span`, as far as it is in them."""
    first, last = max(start, span.start), min(start + len(data), span.stop)
    if first < last:
        plain[first - span.start : last - span.start] = data[first - start : last - start]


def tensor_fault(header: Header, wanted: Header) -> FormatError:
    """Why a header that states the right layout has other bytes than the right one."""
    missing = wanted.tensors.keys() ^ header.tensors.keys()
    if missing:
        return FormatError(Reason.BAD_TENSOR, f"missing or unknown tensors {sorted(missing)[:4]}"[:400])
    for name, tensor in wanted.tensors.items():
        found = header.tensors[name]
        if found.dtype != tensor.dtype:
            return FormatError(Reason.BAD_DTYPE, f"{name} is {found.dtype}, must be {tensor.dtype}")
        if found.shape != tensor.shape:
            return FormatError(Reason.BAD_SHAPE, f"{name} is {found.shape}, must be {tensor.shape}")
        if (found.start, found.end) != (tensor.start, tensor.end):
            return FormatError(Reason.BAD_OFFSETS, f"{name} is not where the geometry puts it")
    return FormatError(Reason.BAD_HEADER, "same content in other bytes than the format prescribes")
