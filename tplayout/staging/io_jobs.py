"""What an I/O process does with one slot: fetch and verify, or seal and publish.

Layer: storage and format on the region's memory. Knows no sockets, threads or queues, so tests run it
in-process.
"""

import math
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from tplayout.cache.namespace import OF_OTHERS, check_document, fetch_document
from tplayout.errors import (
    FormatError,
    NamespaceMismatch,
    NotFound,
    OverLimit,
    Reason,
    StorageError,
    as_damage,
)
from tplayout.format.chunk import read_chunk_id, verify, write_digests
from tplayout.format.digest import CellHasher
from tplayout.format.keys import ROOT, namespace_name, namespace_object, object_name
from tplayout.format.layout import ChunkLayout
from tplayout.staging.eviction import Evictor
from tplayout.staging.protocol import NAMESPACE_DIFFERS, Load, Loaded, Probe, Probed, Save, Saved
from tplayout.staging.region import Region
from tplayout.storage.base import Buffer, Store

_TOUCH_S = 1.0
_ROOM_PAUSES_S = (0.1, 0.3, 0.6)  # between attempts to make room
_DOCUMENT_S = 60.0  # between looks at namespace.json
_WRITTEN_S = 5.0  # the same, once we have written it
_WAY_OUT = "restart this server, which takes over how the namespace is kept, or says what to change"
_REMOVE = "remove that file, it is written anew then"


@dataclass(frozen=True)
class Bench:
    """The fixed things of every job. namespace: 32 bytes; document, agreed: as in `StagingPlan`.

    store: as one that holds plain objects, whatever their codec (`cache.packing`). evictor: where it has a limit.
    """

    store: Store
    region: Region
    layouts: tuple[ChunkLayout, ...]
    hasher: CellHasher
    namespace: bytes
    document: bytes
    agreed: bool = False
    evictor: Evictor | None = None

    @property
    def namespace_name(self) -> str:
        """The namespace's directory in the store."""
        return namespace_name(self.namespace)

    def put(self, name: str, data: Buffer, key: bytes = b"", parent: bytes = ROOT) -> None:
        """Put an object, and make room for it first if that must be. key, parent: of a chunk. Raises StorageError."""
        if self.evictor is None:
            return self.store.put(name, data)
        with self.evictor.writing(key):
            # What one makes room for, another may take; and the chunk before this one may not have been begun yet.
            for pause in _ROOM_PAUSES_S:
                try:
                    return self.store.put(name, data)
                except OverLimit as error:
                    if not self.evictor.make_room(error.nbytes, key, parent):
                        time.sleep(pause)
            self.store.put(name, data)


class NamespaceCheck:
    """Whether the store's namespace is kept in another way than we do, who began without having seen it."""

    def __init__(self, bench: Bench, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is known about the store yet."""
        self._bench = bench
        self._clock = clock
        self._lock = threading.Lock()
        self._looked_at = -math.inf
        self._conflict = ""

    def conflict(self) -> str:
        """In which way, "" if it is not or cannot be read. The store is asked once a minute at most."""
        with self._lock:
            if self._clock() - self._looked_at >= _DOCUMENT_S:
                try:
                    self._conflict = conflict(self._bench)
                except StorageError:
                    self._conflict = ""
                self._looked_at = self._clock()
            return self._conflict


def conflict(bench: Bench) -> str:
    """In which way the store's namespace.json is not ours; "" for none, ours and a damaged one. Raises StorageError."""
    try:
        found = fetch_document(bench.store, bench.namespace_name)
        if bench.document and found != bench.document:
            check_document(found, bench.document, bench.namespace_name)
    except NamespaceMismatch as error:
        return f"{error}; {_WAY_OUT}"
    except FormatError as error:
        return f"{error}; {_WAY_OUT}" if error.reason in OF_OTHERS else ""
    except NotFound:
        pass
    return ""


def load(bench: Bench, job: Load, namespace: NamespaceCheck) -> Loaded:
    """Fetch each group's object into its place and verify it. Ends at the first that is not right.

    Objects of a namespace that is kept in another way look damaged, all of them: they are not.
    """
    started = time.monotonic()
    key = bytes.fromhex(job.key)
    done: list[int] = []
    nbytes, outcome, kind, detail = 0, "ready", "", ""
    for group in job.groups:
        name = object_name(bench.namespace_name, key, group)
        try:
            nbytes += _fetch(bench, job.slot, group, name, key)
            done.append(group)
            continue
        except NotFound as error:
            outcome, kind, detail = "miss", error.kind.value, name
        except FormatError as error:
            outcome, kind, detail = "damaged", error.reason.value, str(error.at(name))
            if differs := namespace.conflict():
                outcome, kind, detail = "error", NAMESPACE_DIFFERS, differs
        except StorageError as error:
            outcome, kind, detail = "error", error.kind.value, str(error)
        break
    return Loaded(job.job, outcome, tuple(done), kind, detail, nbytes, time.monotonic() - started)


def note_use(bench: Bench, key: bytes, groups: Sequence[int]) -> None:
    """Tell the store, for whoever prunes it. Nothing depends on it, so nothing waits for it."""
    with suppress(StorageError):
        bench.store.touch([object_name(bench.namespace_name, key, group) for group in groups], deadline=_TOUCH_S)


def _fetch(bench: Bench, slot: int, group: int, name: str, key: bytes) -> int:
    """Bytes of the object, which is verified. Raises NotFound, FormatError or StorageError."""
    layout = bench.layouts[group]
    view = bench.region.slot(slot, group)
    try:
        length = bench.store.get_into(name, view)
    except StorageError as error:
        raise as_damage(error) from None
    if length != layout.nbytes:
        raise FormatError(Reason.TRUNCATED, f"{length} bytes, must be {layout.nbytes}")
    verify(view, layout, bench.namespace, key, bench.hasher)
    return length


def seal(bench: Bench, job: Save) -> None:
    """Complete the objects whose cells the writers have written.

    Raises FormatError wrong-key if the tokens that the slot holds are not those of the job.
    """
    key = bytes.fromhex(job.key)
    for group in job.groups:
        layout = bench.layouts[group]
        view = bench.region.slot(job.slot, group)
        found = read_chunk_id(view, layout, bench.namespace).key
        if found != key:
            raise FormatError(Reason.WRONG_KEY, f"slot {job.slot} holds {found.hex()}, not {job.key}")
        write_digests(view, layout, key, bench.hasher)


class Publisher:
    """Puts sealed slots into the store, and namespace.json before the first of them."""

    def __init__(self, bench: Bench, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is known about the store yet."""
        self._bench = bench
        self._clock = clock
        self._lock = threading.Lock()
        self._document_at = -math.inf if bench.document else math.inf  # when it was last seen
        self._ours = bench.agreed  # what is there was, or was to be, what we would write

    def publish(self, job: Save) -> Saved:
        """Put each group's object, unless it is there and need not be replaced. The slot must be sealed."""
        started = time.monotonic()
        stored: list[int] = []
        written, outcome, kind, detail = 0, "saved", "", ""
        try:
            self._document()
            missing = self._missing(job)
            stored = [group for group in job.groups if group not in missing]
            note_use(self._bench, bytes.fromhex(job.key), stored)
            for group in missing:
                view = self._bench.region.slot(job.slot, group)
                span = self._bench.layouts[group].parent_range
                parent = bytes(view[span.start : span.stop])
                self._bench.put(self._name(job, group), view, bytes.fromhex(job.key), parent)
                written += len(view)
                stored.append(group)
        except StorageError as error:
            outcome, kind, detail = "error", error.kind.value, str(error)
        except _Differs as error:
            outcome, kind, detail = "error", NAMESPACE_DIFFERS, str(error)
        evicted = 0 if self._bench.evictor is None else self._bench.evictor.take_count()
        return Saved(job.job, outcome, tuple(stored), kind, detail, written, time.monotonic() - started, evicted)

    def _name(self, job: Save, group: int) -> str:
        return object_name(self._bench.namespace_name, bytes.fromhex(job.key), group)

    def _missing(self, job: Save) -> list[int]:
        if job.replace:
            return list(job.groups)
        try:
            there = self._bench.store.exists([self._name(job, group) for group in job.groups])
        except StorageError:  # some stores allow to put but not to ask
            return list(job.groups)
        return [group for group, found in zip(job.groups, there, strict=True) if not found]

    def _document(self) -> None:
        """Write namespace.json if it is missing, or was ours and is damaged: a write may fail half-way.

        Raises _Differs if another one is there.
        """
        with self._lock:
            # Again now and then: the store may have been emptied while we run.
            if self._clock() - self._document_at < _DOCUMENT_S:
                return
            try:
                found = fetch_document(self._bench.store, self._bench.namespace_name)
                if found != self._bench.document:  # the model may just be called something else there
                    check_document(found, self._bench.document, self._bench.namespace_name)
            except NotFound:
                self._write_document()
            except (FormatError, NamespaceMismatch) as error:
                if not self._ours or _of_another(error):
                    damaged = isinstance(error, FormatError) and error.reason not in OF_OTHERS
                    raise _Differs(f"{error}; {_REMOVE if damaged else _WAY_OUT}") from None
                self._write_document()
            else:
                self._ours = True
                self._document_at = self._clock()

    def _write_document(self) -> None:
        self._ours = True
        self._bench.put(namespace_object(self._bench.namespace_name), self._bench.document)
        # Another server may be writing its own at this moment, and the last one counts: look again soon.
        self._document_at = self._clock() - _DOCUMENT_S + _WRITTEN_S


class _Differs(Exception):
    """The store's namespace is kept in another way; str() says how, and the way out."""


def _of_another(error: FormatError | NamespaceMismatch) -> bool:
    """Whether somebody wants it so. An identity that is not the directory's is damage, whatever it says."""
    if isinstance(error, FormatError):
        return error.reason in OF_OTHERS
    return error.field.startswith("storage.")


def probe(bench: Bench, job: Probe) -> Probed:
    """Read namespace.json: whether it is there does not matter, but the store must answer, and one must be ours."""
    try:
        differs = conflict(bench)
    except StorageError as error:
        return Probed(job.job, error.kind.value, str(error))
    return Probed(job.job, NAMESPACE_DIFFERS if differs else "", differs)
