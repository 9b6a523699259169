"""Moving the KV of one prefix into a namespace or out of it, a chunk at a time.

Every conversion is a source that fills arrays of canonical order, or a sink that takes them; the other side is
always a namespace. Elements move as integers of their width, so nothing is rounded unless a source says so.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from tplayout.admin.namespaces import OpenNamespace
from tplayout.admin.parallel import are_there, in_order
from tplayout.admin.work import SIMPLY, Work
from tplayout.errors import FormatError, NotFound
from tplayout.format.chunk import Buffer, read_chunk_id, seal
from tplayout.format.geometry import Group
from tplayout.format.keys import ChunkId
from tplayout.format.layout import ChunkLayout

Bits = NDArray[Any]
Place = tuple[bytes, int]  # key of a chunk, index of a group


class Source(Protocol):
    """Where the KV of one prefix comes from. Calls may come from several threads."""

    def fill(self, group: int, tokens: range, out: Bits) -> bool:
        """Write the group's KV of these tokens of the prefix to out; False if the source does not have them.

        out: unsigned integers of the element's width, [heads, layers, *cell shape], see `part_of`.
        """
        ...


class Sink(Protocol):
    """Where the KV of one prefix goes. Calls may come from several threads, for different tokens."""

    def take(self, group: int, tokens: range, bits: Bits) -> None:
        """Keep the group's KV of these tokens. bits: as in `Source.fill`; read-only."""
        ...


@dataclass
class Tally:
    """What was done: objects written, there already, and not to be had (a window's that is gone); bytes written."""

    written: int = 0
    present: int = 0
    absent: int = 0
    nbytes: int = 0
    damaged: dict[str, str] = field(default_factory=dict)

    def add(self, other: Tally) -> None:
        """Count another's too."""
        self.written += other.written
        self.present += other.present
        self.absent += other.absent
        self.nbytes += other.nbytes
        self.damaged |= other.damaged


def cells_of(buf: Buffer, layout: ChunkLayout) -> Bits:
    """The cells of an object's bytes, as a view: [heads, layers, *cell shape], unsigned integers."""
    group = layout.group
    width, cell = group.element_bytes, group.cell_shape(layout.chunk_tokens)
    shape = (group.heads, len(group.layers), *cell)
    strides = [width]
    for size in reversed(cell[1:]):
        strides.insert(0, strides[0] * size)
    every = (layout.section_bytes, layout.cell_bytes, *strides)
    # A head's section is a multiple of 4096 and a digest table of 16 or 32 bytes a row: elements are aligned.
    return np.ndarray(shape, f"u{width}", memoryview(buf), layout.kv_offset(0), every)


def part_of(cells: Bits, group: Group, part: int) -> Bits:
    """One part of cells, as a view: [heads, layers, tokens, dim]."""
    dims = [each.dim for each in group.parts]
    if len(set(dims)) == 1:
        return cells[:, :, part]
    start = sum(dims[:part])
    return cells[:, :, :, start : start + dims[part]]


def resealed(plain: Buffer, origin: OpenNamespace, target: OpenNamespace, group: int) -> Buffer:
    """A verified object of a namespace as another that differs only in how it is stored has it, before its codec."""
    old, new = origin.layout(group), target.layout(group)
    if old == new:
        return plain
    buf = bytearray(new.nbytes)
    cells_of(buf, new)[...] = cells_of(plain, old)
    seal(buf, new, target.digest, read_chunk_id(plain, old, origin.digest), target.hasher)
    return buf


def store_prefix(
    source: Source,
    chunks: Sequence[ChunkId],
    target: OpenNamespace,
    work: Work = SIMPLY,
    done: set[Place] | None = None,
) -> Tally:
    """Write those objects of a prefix that the target lacks. A job holds one object's bytes, and what its source does.

    A dry run counts only; what the source does not have then counts as written. done: what prefixes before this one had
    in this run, which counts no more, and to which this one's is added.
    """
    groups = range(len(target.identity.geometry.groups))
    places = [(chunk, group) for chunk in chunks for group in groups]
    names = [target.object_name(chunk.key, group) for chunk, group in places]
    there = dict(zip(places, are_there(target.store, names), strict=True))

    def one(place: tuple[ChunkId, int]) -> Tally:
        chunk, group = place
        layout = target.layout(group)
        if done is not None:
            if (chunk.key, group) in done:
                return Tally()
            done.add((chunk.key, group))
        if there[place]:
            return Tally(present=1)
        if work.dry_run:
            return Tally(written=1, nbytes=layout.nbytes)
        buf = bytearray(layout.nbytes)
        span = range(chunk.index * target.chunk_tokens, (chunk.index + 1) * target.chunk_tokens)
        if not source.fill(group, span, cells_of(buf, layout)):
            if done is not None:
                done.discard((chunk.key, group))  # another prefix may have it
            return Tally(absent=1)
        seal(buf, layout, target.digest, chunk, target.hasher)
        return Tally(written=1, nbytes=target.write(chunk.key, group, buf))

    return _count(one, places, work)


def read_prefix(origin: OpenNamespace, chunks: Sequence[ChunkId], sink: Sink, work: Work = SIMPLY) -> Tally:
    """Give a prefix's verified KV to a sink. Objects that are missing or damaged are counted, and not given.

    "written" counts the objects that were given.
    """
    groups = range(len(origin.identity.geometry.groups))

    def one(place: tuple[ChunkId, int]) -> Tally:
        chunk, group = place
        try:
            view = origin.read(chunk.key, group)
        except NotFound:
            return Tally(absent=1)
        except FormatError as error:
            return Tally(damaged={error.where: str(error)})
        span = range(chunk.index * origin.chunk_tokens, (chunk.index + 1) * origin.chunk_tokens)
        cells = cells_of(view, origin.layout(group))
        cells.flags.writeable = False
        sink.take(group, span, cells)
        return Tally(written=1, nbytes=len(view))

    return _count(one, [(chunk, group) for chunk in chunks for group in groups], work)


def _count(
    one: Callable[[tuple[ChunkId, int]], Tally],
    places: Sequence[tuple[ChunkId, int]],
    work: Work,
) -> Tally:
    tally = Tally()
    for done, each in enumerate(in_order(one, places, work.jobs), 1):
        tally.add(each)
        work.progress(done, len(places), tally.nbytes)
    return tally
