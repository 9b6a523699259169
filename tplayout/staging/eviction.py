"""Making room in a local store under a limit, by an I/O process that has something to write there.

Layer: storage and cache on files. Knows no sockets, jobs or slots. Of several processes one makes room at a time, the
others wait for it and find what it has left.
"""

from __future__ import annotations

import contextlib
import math
import threading
import time
from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from tplayout.cache.chunk_ids import read_id
from tplayout.cache.codec import make_codec, require
from tplayout.cache.namespace import read_document
from tplayout.cache.packing import plain_store
from tplayout.cache.pruning import Chunk, link, victims
from tplayout.errors import FormatError, TPLayoutError
from tplayout.format.keys import ROOT, parse_object_name
from tplayout.format.layout import CODEC_NONE, CODEC_SHUFFLE_ZSTD, ChunkLayout, layouts_of
from tplayout.storage.base import TEMPORARY_AGE_S, Store, target_of
from tplayout.storage.capped import CappedStore

_RECENTLY_S = 60.0  # so long after it was written a chunk may be waiting for the one before it
_SPARE = 20  # a twentieth of the limit is freed at a time, since looking at everything takes its time
_BATCH = 100
_WITHOUT_A_KEY = (CODEC_NONE, CODEC_SHUFFLE_ZSTD)


@dataclass(frozen=True)
class Opened:
    """How the objects of a namespace are read. store: as one of plain objects. digest: of the identity."""

    name: str
    store: Store
    layouts: Sequence[ChunkLayout]
    digest: bytes


class Evictor:
    """Removes what was used least recently, of all namespaces. Threads may share it."""

    def __init__(self, store: CappedStore, own: Opened) -> None:
        """own: the namespace that we write to."""
        self._store = store
        self._own = own
        self._lock = threading.Lock()
        self._count = 0
        self.alive_at = -math.inf  # when it last got on, by time.monotonic: all together may take long
        self._parents: dict[str, bytes] = {}  # by object name: an object never says anything else
        self._writing: Counter[bytes] = Counter()

    @contextlib.contextmanager
    def writing(self, key: bytes) -> Iterator[None]:
        """While the chunk of that key is being written, waiting for room included: what continues it has a prefix."""
        with self._lock:
            self._writing[key] += 1
        try:
            yield
        finally:
            with self._lock:
                self._writing -= Counter([key])

    def make_room(self, nbytes: int, key: bytes, parent: bytes) -> bool:
        """Remove chunks until so many bytes can be written, and some more. False, and nothing goes, if too little may.

        key, parent: of the chunk that is to be written to our namespace. What it continues stays. A chunk that
        continues nothing that is stored pushes out nothing that was used a moment ago: it may belong to a prefix for
        which there is no room. Raises StorageError.
        """
        with self._store.evicting():
            if self._store.room() >= nbytes:
                return True
            self.alive_at = time.monotonic()
            begun = self._look_at_temporaries()
            with self._lock:
                begun |= set(self._writing)
            short = nbytes - self._store.room()
            chunks = self._chunks({key, parent})
            if parent != ROOT and parent not in begun and not any(chunk.key == parent for chunk in chunks):
                recently = time.time() - _RECENTLY_S
                chunks = [chunk for chunk in chunks if chunk.used < recently]
            going = _first(chunks, short, short + self._store.max_bytes // _SPARE)
            for start in range(0, len(going), _BATCH):
                batch = going[start : start + _BATCH]
                self._store.delete([name for chunk in batch for name in chunk.names])
                self.alive_at = time.monotonic()
                with self._lock:
                    self._count += len(batch)
            return sum(chunk.nbytes for chunk in going) >= short

    def take_count(self) -> int:
        """How many chunks went since this was last asked."""
        with self._lock:
            count, self._count = self._count, 0
        return count

    def _look_at_temporaries(self) -> set[bytes]:
        """Remove what dead writers left. Returns the keys of the chunks that are being written."""
        old, dead = time.time() - TEMPORARY_AGE_S, []
        begun: set[bytes] = set()
        for info in self._store.temporaries():
            if info.modified is not None and info.modified < old:
                dead.append(info.key)
            else:
                with contextlib.suppress(FormatError):  # not a chunk's
                    begun.add(parse_object_name(target_of(info.key)).key)
        self._store.remove_temporaries(dead)
        return begun

    def _chunks(self, keep: Collection[bytes]) -> list[Chunk]:
        """All that may be judged, linked. What lies in a namespace that cannot be read stays."""
        spaces: dict[str, dict[bytes, Chunk]] = {}
        for info in self._store.list():
            try:
                name = parse_object_name(info.key)
            except TPLayoutError:
                continue
            chunk = spaces.setdefault(name.namespace, {}).setdefault(name.key, Chunk(name.key))
            chunk.add(info.key, info.size, info.used or 0.0, info.modified or 0.0)
            self.alive_at = time.monotonic()
        known = self._parents
        self._parents = {}
        judged: list[Chunk] = []
        for space, chunks in spaces.items():
            if (opened := self._open(space)) is None:
                continue
            for chunk in chunks.values():
                chunk.parent = self._parent(opened, chunk, known)
                self.alive_at = time.monotonic()
                chunk.stays = space == self._own.name and chunk.key in keep
            link(list(chunks.values()))
            judged += chunks.values()
        return judged

    def _open(self, namespace: str) -> Opened | None:
        """None for a namespace that cannot be read, as where only others have the key."""
        if namespace == self._own.name:
            return self._own
        try:
            document = read_document(self._store, namespace)
            facts = document.storage
            if facts.codec not in _WITHOUT_A_KEY:
                return None
            require(facts.codec)
            layouts = layouts_of(document.identity.geometry, facts.digest, facts.key_id)
            plain = plain_store(self._store, namespace, layouts, make_codec(facts.codec, None))
        except TPLayoutError:
            return None
        return Opened(namespace, plain, layouts, document.identity.digest())

    def _parent(self, opened: Opened, chunk: Chunk, known: dict[str, bytes]) -> bytes | None:
        """The key of the chunk before it; None where no object of it tells, which is damage."""
        for name in chunk.names:
            parent = known.get(name) or _read_parent(opened, name)
            if parent is not None:
                self._parents[name] = parent
                return parent
        return None


def _first(chunks: Sequence[Chunk], least: int, wanted: int) -> list[Chunk]:
    """What goes first: at least `least` bytes, and up to `wanted`. Nothing if all that may go is not enough."""
    going: list[Chunk] = []
    freed = 0
    for chunk in victims(chunks, young=time.time() - _RECENTLY_S):
        if freed >= least and freed + chunk.nbytes > wanted:
            break
        going.append(chunk)
        freed += chunk.nbytes
    return going if freed >= least else []


def _read_parent(opened: Opened, name: str) -> bytes | None:
    parsed = parse_object_name(name)
    if parsed.group_index >= len(opened.layouts):
        return None
    found = read_id(opened.store, opened.layouts[parsed.group_index], opened.digest, name, parsed.key)
    return None if found is None else found.parent
