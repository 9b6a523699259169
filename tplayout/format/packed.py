"""Packed chunk objects: what the codec shuffle-zstd stores instead of a plain object's bytes.

A cell is cut into planes, the first bytes of its elements, the second ones and so on, and each plane is compressed by
itself. `pack` and `unpack` go between the bytes of a plain object and those that are stored; they lose nothing, and
the digests of the cells are those of the plain object. The compressor is given: this module computes only.
"""

import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from tplayout.errors import FormatError, Reason
from tplayout.format.chunk import Buffer, check_length, cut, overlap, paste, stated_fault, tensor_fault
from tplayout.format.digest import CellHasher
from tplayout.format.header import parse_header
from tplayout.format.keys import KEY_BYTES, ROOT
from tplayout.format.layout import CODEC_SHUFFLE_ZSTD, ChunkLayout, encode_header, stated_layout

_LENGTH_BYTES = 4
_WHOLE = 2**32 - 1  # head and layer of the digest of a whole object: no cell has them


class Compressor(Protocol):
    """What makes planes smaller. Used by one thread at a time."""

    def compress(self, data: bytes) -> bytes:
        """One frame that says how long the data is."""
        ...

    def expand(self, frame: memoryview, nbytes: int) -> bytes:
        """The data of one frame, which must be nbytes. FormatError bad-plane; allocates no more than that."""
        ...


@dataclass(frozen=True)
class PackedLayout:
    """What is known of a packed object before a byte of it is read.

    plain: of the object that is packed. data_start: as there. info_bytes: header, ids and tables; the planes follow.
    metadata: of the header, which is made anew for each object's lengths.
    """

    plain: ChunkLayout
    data_start: int
    info_bytes: int
    metadata: Mapping[str, str] = field(repr=False, compare=False)

    @property
    def planes(self) -> int:
        """Of a cell: bytes of an element."""
        return self.plain.group.element_bytes

    @property
    def plane_bytes(self) -> int:
        """Of one plane that is not compressed."""
        return self.plain.cell_bytes // self.planes

    @property
    def cells(self) -> int:
        """Of the object: head by head, the layers of each."""
        return self.plain.group.heads * len(self.plain.group.layers)

    @property
    def sizes(self) -> range:
        """What the whole object may have, in bytes."""
        planes = self.cells * self.planes
        return range(self.info_bytes + planes, self.info_bytes + planes * self.plane_bytes + 1)

    @property
    def ids_start(self) -> int:
        """Where tokens, parent and extras start."""
        return self.data_start + self.plain.digest_size

    @property
    def ids_range(self) -> range:
        """Tokens, parent and extras; they follow one another as in the plain object."""
        return range(self.ids_start, self.ids_start + len(self.plain.ids_range))

    def digests_range(self, head: int) -> range:
        """Digests of a head's cells."""
        layers = len(self.plain.group.layers)
        own = layers * self.plain.digest_size
        start = self.ids_range.stop + head * (own + layers * self.planes * _LENGTH_BYTES)
        return range(start, start + own)

    def lengths_range(self, head: int) -> range:
        """Stored lengths of a head's planes."""
        start = self.digests_range(head).stop
        return range(start, start + len(self.plain.group.layers) * self.planes * _LENGTH_BYTES)

    def header(self, lengths: Sequence[int]) -> bytes:
        """The file's first data_start bytes. lengths: of all planes."""
        return _encode(self.plain, self.metadata, lengths, self.data_start)

    def place(self, cell: int) -> range:
        """Where a cell is in the plain object."""
        return self.plain.cell_range(*divmod(cell, len(self.plain.group.layers)))


@lru_cache(maxsize=256)
def packed_layout(layout: ChunkLayout) -> PackedLayout:
    """The layout of packed objects of a group. GeometryError if the header would exceed its cap."""
    group = layout.group
    planes = group.heads * len(group.layers) * group.element_bytes
    # Offsets grow with the lengths: no header is longer than that of planes which did not get smaller.
    metadata = layout.metadata(CODEC_SHUFFLE_ZSTD)
    data_start = len(_encode(layout, metadata, [layout.cell_bytes // group.element_bytes] * planes, 0))
    tables = group.heads * len(group.layers) * layout.digest_size + planes * _LENGTH_BYTES
    return PackedLayout(layout, data_start, data_start + layout.digest_size + len(layout.ids_range) + tables, metadata)


def pack(plain: Buffer, layout: PackedLayout, hasher: CellHasher, compressor: Compressor) -> bytearray:
    """The bytes that are stored for a sealed plain object. hasher: of the namespace.

    Raises FormatError bad-header if it is no object of this layout; that it is sound is for others to check.
    """
    view = memoryview(plain).cast("B")
    if len(view) != layout.plain.nbytes or view[: layout.plain.data_start] != layout.plain.header:
        raise FormatError(Reason.BAD_HEADER, "not the plain object of this group")
    buf = bytearray(layout.info_bytes)  # grows with the planes: a list of them would be held beside it
    lengths: list[int] = []
    for cell in range(layout.cells):
        place = layout.place(cell)
        data = bytes(view[place.start : place.stop])
        for number in range(layout.planes):
            plane = data[number :: layout.planes]
            frame = compressor.compress(plane)
            stored = frame if len(frame) < len(plane) else plane
            lengths.append(len(stored))
            buf += stored
    out = memoryview(buf)
    out[: layout.data_start] = layout.header(lengths)
    out[cut(layout.ids_range)] = view[cut(layout.plain.ids_range)]
    of_head = len(lengths) // layout.plain.group.heads
    for head in range(layout.plain.group.heads):
        digests = layout.plain.digests_range(head, range(len(layout.plain.group.layers)))
        own = lengths[head * of_head : (head + 1) * of_head]
        out[cut(layout.digests_range(head))] = view[cut(digests)]
        out[cut(layout.lengths_range(head))] = struct.pack(f"<{of_head}I", *own)
    out[layout.data_start : layout.ids_start] = _digest(out, layout, hasher)
    return buf


def unpack(
    stored: Buffer,
    layout: PackedLayout,
    hasher: CellHasher | None,
    compressor: Compressor,
    out: memoryview | None = None,
) -> memoryview:
    """The plain object of a packed one; every stored byte is accounted for, the plain object is not verified.

    hasher: of the namespace; None where its secret is not at hand: then the stored bytes are not authenticated before
    they are expanded. out: memory for it, at least plain.nbytes; undefined after an error. Raises FormatError with a
    reason; allocates nothing by what the content claims.
    """
    view = memoryview(stored).cast("B")
    lengths = check_info(view, len(view), layout)
    if hasher is not None and view[layout.data_start : layout.ids_start] != _digest(view, layout, hasher):
        raise FormatError(Reason.DIGEST_MISMATCH, "the object's stored bytes are not those that were written")
    nbytes = layout.plain.nbytes
    plain = memoryview(bytearray(nbytes)) if out is None else memoryview(out).cast("B")[:nbytes]
    for start, data in _beginning(view, layout):
        plain[start : start + len(data)] = data
    for pad in layout.plain.pads():
        plain[cut(pad)] = bytes(len(pad))
    at = layout.info_bytes
    for cell in range(layout.cells):
        own = lengths[cell * layout.planes : (cell + 1) * layout.planes]
        plain[cut(layout.place(cell))] = _expand(view[at : at + sum(own)], own, layout, compressor)
        at += sum(own)
    return plain


def check_info(head: Buffer, file_size: int, layout: PackedLayout) -> tuple[int, ...]:
    """The stored lengths of all planes, once header, tables and size agree; nothing is expanded.

    head: the object's first layout.info_bytes, or more; fewer if it is shorter. Raises FormatError with a reason.
    """
    view = memoryview(head).cast("B")
    lengths = _lengths(view, layout)
    if lengths is None or bytes(view[: layout.data_start]) != layout.header(lengths):
        raise _header_fault(view, file_size, layout, lengths)
    check_length(file_size, layout.info_bytes + sum(lengths))
    return lengths


def plain_beginning(head: Buffer, layout: PackedLayout) -> memoryview:
    """The plain object's header, tokens, parent, extras and padding. head: of the packed one, checked."""
    plain = bytearray(layout.plain.sections)
    for start, data in _beginning(memoryview(head).cast("B"), layout):
        paste(plain, range(len(plain)), start, data)
    return memoryview(plain)


def plain_range(
    head: Buffer,
    span: range,
    layout: PackedLayout,
    compressor: Compressor,
    read: Callable[[int, int], bytes],
) -> bytes:
    """Bytes of the plain object, from the planes of those cells alone that are in it.

    head: the packed object's first layout.info_bytes. read: start and length in the packed object -> its bytes.
    Nothing but the cells' digests says that they are right. Raises FormatError as `check_info`.
    """
    view = memoryview(head).cast("B")
    lengths = _lengths(view, layout)
    if lengths is None or bytes(view[: layout.data_start]) != layout.header(lengths):
        raise FormatError(Reason.BAD_HEADER, "not the header of these lengths")
    plain = bytearray(len(span))

    for start, data in _beginning(view, layout):
        paste(plain, span, start, data)
    count = layout.planes
    wanted = [cell for cell in range(layout.cells) if overlap(layout.place(cell), span)]
    if wanted:
        at = layout.info_bytes + sum(lengths[: wanted[0] * count])
        stored = memoryview(read(at, sum(lengths[wanted[0] * count : (wanted[-1] + 1) * count])))
        for cell in wanted:
            own = lengths[cell * count : (cell + 1) * count]
            paste(plain, span, layout.place(cell).start, _expand(stored[: sum(own)], own, layout, compressor))
            stored = stored[sum(own) :]
    return bytes(plain)


def salvage(stored: Buffer, layout: PackedLayout, compressor: Compressor) -> memoryview:
    """As much of the plain object as a damaged packed one gives, for who looks at it; lost cells are zeros.

    Raises FormatError truncated if not even its tables are there, bad-lengths if they are none.
    """
    view = memoryview(stored).cast("B")
    if len(view) < layout.info_bytes:
        raise FormatError(Reason.TRUNCATED, f"{len(view)} bytes, header and tables have {layout.info_bytes}")
    lengths = _lengths(view, layout)
    if lengths is None:
        raise FormatError(Reason.BAD_LENGTHS, f"a plane has 1 to {layout.plane_bytes} bytes")
    plain = memoryview(bytearray(layout.plain.nbytes))
    for start, data in _beginning(view, layout):
        plain[start : start + len(data)] = data
    at = layout.info_bytes
    for cell in range(layout.cells):
        own = lengths[cell * layout.planes : (cell + 1) * layout.planes]
        with suppress(FormatError):
            plain[cut(layout.place(cell))] = _expand(view[at : at + sum(own)], own, layout, compressor)
        at += sum(own)
    return plain


def _expand(stored: memoryview, lengths: Sequence[int], layout: PackedLayout, compressor: Compressor) -> bytes:
    """One cell from its planes as they are stored."""
    cell = bytearray(layout.plain.cell_bytes)
    at, size = 0, layout.plane_bytes
    for number, length in enumerate(lengths):
        plane = stored[at : at + length]
        if len(plane) != length:
            raise FormatError(Reason.TRUNCATED, f"{len(plane)} bytes of a plane of {length}")
        # As bytes: slices with a step are ten times slower in a memoryview.
        cell[number :: layout.planes] = bytes(plane) if length == size else compressor.expand(plane, size)
        at += length
    return bytes(cell)


def _beginning(view: memoryview, layout: PackedLayout) -> Iterator[tuple[int, Buffer]]:
    """(offset in the plain object, bytes) of everything but cells and padding."""
    yield 0, layout.plain.header
    yield layout.plain.ids_range.start, view[cut(layout.ids_range)]
    for head in range(layout.plain.group.heads):
        yield layout.plain.head_section(head).start, view[cut(layout.digests_range(head))]


def _digest(view: memoryview, layout: PackedLayout, hasher: CellHasher) -> bytes:
    """The digest of the whole object: of all bytes behind it, which the header is a function of."""
    return hasher.cell(ROOT, layout.plain.group.name, _WHOLE, _WHOLE, view[layout.ids_start :])


def _lengths(view: memoryview, layout: PackedLayout) -> tuple[int, ...] | None:
    """The stored lengths, None if they are not there or cannot be."""
    if len(view) < layout.info_bytes:
        return None
    tables = b"".join(view[cut(layout.lengths_range(head))] for head in range(layout.plain.group.heads))
    lengths = struct.unpack(f"<{len(tables) // _LENGTH_BYTES}I", tables)
    return lengths if min(lengths) >= 1 and max(lengths) <= layout.plane_bytes else None


def _header_fault(
    view: memoryview, file_size: int, layout: PackedLayout, lengths: tuple[int, ...] | None
) -> FormatError:
    """Why the beginning is not that of a packed object of this layout. Returns, or raises, the error."""
    header = parse_header(view, file_size)
    theirs, codec = stated_layout(header)
    if codec != CODEC_SHUFFLE_ZSTD:
        return FormatError(Reason.WRONG_CODEC, f"codec is {codec}, must be {CODEC_SHUFFLE_ZSTD}")
    fault = stated_fault(theirs, layout.plain)
    if fault is not None:
        return fault
    if len(view) < layout.info_bytes:
        return FormatError(Reason.TRUNCATED, f"{len(view)} bytes, header and tables have {layout.info_bytes}")
    if lengths is None:
        return FormatError(Reason.BAD_LENGTHS, f"a plane has 1 to {layout.plane_bytes} bytes")
    return tensor_fault(header, parse_header(layout.header(lengths), layout.info_bytes + sum(lengths)))


def _encode(layout: ChunkLayout, metadata: Mapping[str, str], lengths: Sequence[int], least: int) -> bytes:
    """The header of a packed object with planes of these lengths, of `least` bytes or more."""
    group, layers, of_head = layout.group, len(layout.group.layers), len(lengths) // layout.group.heads
    entries: dict[str, Any] = {}
    offset = 0

    def add(name: str, dtype: str, shape: list[int], nbytes: int) -> None:
        nonlocal offset
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + nbytes]}
        offset += nbytes

    add("digest", "U8", [layout.digest_size], layout.digest_size)
    add("tokens", "I32", [layout.chunk_tokens], len(layout.tokens_range))
    add("parent", "U8", [KEY_BYTES], KEY_BYTES)
    add("extras", "U8", [KEY_BYTES], KEY_BYTES)
    for head in range(group.heads):
        add(f"h{head}.digests", "U8", [layers, layout.digest_size], layers * layout.digest_size)
        add(f"h{head}.lengths", "U32", [layers, group.element_bytes], _LENGTH_BYTES * of_head)
    for head in range(group.heads):
        stored = sum(lengths[head * of_head : (head + 1) * of_head])
        add(f"h{head}.stored", "U8", [stored], stored)
    return encode_header(metadata, entries, least)
