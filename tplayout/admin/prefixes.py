"""Prefixes as a store holds them: chunks linked to their parents, drawn together into segments of a tree.

A prefix is a chain of chunks from token 0. A chunk whose parent is not there lies behind a gap: no server can use it
before the gap is filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tplayout.admin.catalog import Namespace, Stored, by_key, span_of
from tplayout.admin.parallel import in_order
from tplayout.admin.progress import Progress, silent
from tplayout.cache.chunk_ids import read_id
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.geometry import Geometry
from tplayout.format.keys import ROOT, ChunkId
from tplayout.storage.base import Store


@dataclass
class Segment:
    """A run of chunks without a fork. start: index of its first chunk, None behind a gap; depth: in the tree.

    first, last: keys. waits_for: key of the missing chunk before it. lacks: names of the groups that its chunks should
    have and do not; each such chunk is a gap itself.
    """

    first: bytes
    last: bytes
    start: int | None
    depth: int
    chunks: int
    nbytes: int
    oldest: float | None
    newest: float | None
    waits_for: bytes | None = None
    lacks: tuple[str, ...] = ()


@dataclass
class Links:
    """Parents of a namespace's chunks. damaged: chunks whose ids do not give the key that names them."""

    ids: dict[bytes, ChunkId] = field(default_factory=dict)
    damaged: list[Stored] = field(default_factory=list)

    @property
    def parents(self) -> dict[bytes, bytes]:
        """Key -> key of the parent."""
        return {key: chunk.parent for key, chunk in self.ids.items()}


def read_links(
    store: Store,
    namespace: Namespace,
    jobs: int = 8,
    progress: Progress = silent,
    encryption_key: EncryptionKey | None = None,
) -> Links:
    """Token ids, parent and extras of every chunk: one small ranged read each. Cells are not read.

    encryption_key: of an encrypted namespace. Raises ConfigError if that is missing or another.
    """
    layouts, plain = namespace.layouts(), namespace.plain(store, encryption_key)
    digest = namespace.known().identity.digest()
    chunks = [
        next((one for one in objects if one.group < len(layouts)), None)
        for objects in by_key(namespace.objects).values()
    ]
    wanted = [stored for stored in chunks if stored is not None]
    links = Links()

    def read(stored: Stored) -> ChunkId | None:
        return read_id(plain, layouts[stored.group], digest, stored.name, stored.key)

    for done, (stored, chunk) in enumerate(zip(wanted, in_order(read, wanted, jobs), strict=True), 1):
        if chunk is None:
            links.damaged.append(stored)
        else:
            links.ids[stored.key] = chunk
        progress(done, len(wanted), 0)
    return links


def tree(geometry: Geometry, objects: Iterable[Stored], parents: Mapping[bytes, bytes]) -> list[Segment]:
    """The chunks as segments, each behind the one that it continues. Chunks without a known parent are left out."""
    chunks = {key: stored for key, stored in by_key(objects).items() if key in parents}
    children: dict[bytes, list[bytes]] = {}
    for key in chunks:
        children.setdefault(parents[key], []).append(key)
    roots = sorted(children.get(ROOT, ()))
    behind_gaps = sorted(key for key in chunks if parents[key] not in chunks and parents[key] != ROOT)
    segments: list[Segment] = []
    todo: list[tuple[bytes, int | None, int]] = [(key, None, 0) for key in reversed(behind_gaps)]
    todo += [(key, 0, 0) for key in reversed(roots)]
    while todo:
        first, start, depth = todo.pop()
        run = _run(first, geometry, chunks, children)
        stored = [one for key in run for one in chunks[key]]
        oldest, newest = span_of(one.modified for one in stored)
        lacks = lacking(geometry, chunks[first])
        parent = parents[first]
        waits_for = parent if parent != ROOT and parent not in chunks else None
        nbytes = sum(one.size for one in stored)
        segment = Segment(first, run[-1], start, depth, len(run), nbytes, oldest, newest, waits_for, lacks)
        segments.append(segment)
        behind = None if start is None else start + len(run)
        todo.extend((key, behind, depth + 1) for key in sorted(children.get(run[-1], ()), reverse=True))
    return segments


def lacking(geometry: Geometry, objects: Iterable[Stored]) -> tuple[str, ...]:
    """The groups that a chunk needs wherever it is in a prefix, and has no object of. Windows may be missing."""
    there = {stored.group for stored in objects}
    return tuple(
        group.name for index, group in enumerate(geometry.groups) if group.window is None and index not in there
    )


def unreachable(
    geometry: Geometry, chunks: Mapping[bytes, Iterable[int]], parents: Mapping[bytes, bytes]
) -> dict[bytes, list[bytes]]:
    """Chunks that no server can use as things are: key of the gap before them -> their keys.

    chunks: key -> the groups whose objects are there and sound. A chunk that lacks a group which is needed everywhere
    is its own gap. Where all groups are windows, a run that covers the largest window needs nothing before it.
    """
    needed = {index for index, group in enumerate(geometry.groups) if group.window is None}
    usable = {key for key, groups in chunks.items() if key in parents and needed <= set(groups)}
    gap_of: dict[bytes, bytes | None] = {}  # None: reachable from token 0
    for key in chunks:
        path = []
        while key in usable and key not in gap_of and key != ROOT:
            path.append(key)
            key = parents[key]
        gap = None if key == ROOT else gap_of.get(key) if key in usable else key
        gap_of.update(dict.fromkeys(path, gap))
        if path == [] and key not in usable:
            gap_of[key] = key
    behind: dict[bytes, list[bytes]] = {}
    for key, gap in gap_of.items():
        if gap is not None and key in chunks:
            behind.setdefault(gap, []).append(key)
    if not needed:
        _drop_served_windows(geometry, behind, parents)
    return behind


def _run(
    first: bytes, geometry: Geometry, chunks: Mapping[bytes, list[Stored]], children: Mapping[bytes, list[bytes]]
) -> list[bytes]:
    """Keys from `first` on, up to a fork or a chunk that is complete in another way."""
    run, lacks = [first], lacking(geometry, chunks[first])
    while len(next_ones := children.get(run[-1], [])) == 1 and lacking(geometry, chunks[next_ones[0]]) == lacks:
        run.append(next_ones[0])
    return run


def _drop_served_windows(geometry: Geometry, behind: dict[bytes, list[bytes]], parents: Mapping[bytes, bytes]) -> None:
    """Forget the chunks that lie in a run which is long enough to fill all windows."""
    # Of its window, the next token itself is not stored: see `window_start`.
    widest = max((group.window or 1) - 1 for group in geometry.groups)
    reach = max(1, -(-widest // geometry.chunk_tokens))
    for gap, keys in list(behind.items()):
        inside = set(keys)
        served: set[bytes] = set()
        for key in keys:
            run = [key]
            while len(run) < reach and parents.get(run[-1]) in inside:
                run.append(parents[run[-1]])
            if len(run) >= reach:
                served.update(run)
        behind[gap] = [key for key in keys if key not in served]
        if not behind[gap]:
            del behind[gap]
