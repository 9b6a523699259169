"""Is one object what its name says? Reads it whole (deep), or its first bytes (quick), and names what is wrong."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from tplayout.admin.catalog import Catalog, Secrets, Stored, hasher_of
from tplayout.admin.rate import RateLimit
from tplayout.cache.codec import Codec, require
from tplayout.errors import (
    Forbidden,
    FormatError,
    NotFound,
    Reason,
    StorageError,
    StorageErrorKind,
    as_damage,
)
from tplayout.format.chunk import check_info, read_chunk_id, verify
from tplayout.format.digest import CellHasher
from tplayout.format.header import LENGTH_BYTES, header_size, parse_header
from tplayout.format.keys import ChunkId, object_name
from tplayout.format.layout import ChunkLayout, stated_layout
from tplayout.storage.base import Store


class Kind(StrEnum):
    """What a finding is about. The values are stable."""

    DAMAGED = "damaged"  # the bytes are not those that were written
    TRUNCATED = "truncated"  # shorter than its content, zero length included
    MISNAMED = "misnamed"  # sound, but it belongs under another name
    FOREIGN = "foreign"  # no name of the key tree
    UNREADABLE = "unreadable"  # the store lists it and refuses to hand it out
    UNIDENTIFIED = "unidentified"  # a namespace without namespace.json
    TEMPORARY = "temporary"  # left by a writer that died
    UNAUTHENTICATED = "unauthenticated"  # a namespace without a secret, where one is given
    UNENCRYPTED = "unencrypted"  # a namespace in clear, where an encryption key is given
    UNREACHABLE = "unreachable"  # sound, but behind a gap: no server can use it as things are


@dataclass(frozen=True)
class Fault:
    """Why an object is not accepted. reason: a format `Reason` or a storage error's kind. home: its right name."""

    kind: Kind
    reason: str
    detail: str
    home: str | None = None


@dataclass(frozen=True)
class Verdict:
    """What a check found: the chunk's ids if it is sound, a fault, or neither if it is gone. nbytes: read.

    sealed: it is encrypted and nobody has the key, so that no more than what is stored was compared.
    """

    chunk: ChunkId | None = None
    fault: Fault | None = None
    nbytes: int = 0
    sealed: bool = False


@dataclass(frozen=True)
class _Context:
    digest: bytes  # of the identity
    layouts: Sequence[ChunkLayout]
    codec: Codec
    hasher: CellHasher | None  # None in quick checks


class Checker:
    """Checks objects of the namespaces of one catalog; safe to use from many threads.

    deep: read and digest every cell. Without, an object's size, header, tokens and key are checked. Without the key of
    an encrypted namespace what it stores is compared with its digests, and not opened. Raises ConfigError when a deep
    check needs a secret that is not given, for another key, or if what a codec needs is not installed.
    """

    def __init__(
        self,
        store: Store,
        catalog: Catalog,
        secrets: Secrets,
        deep: bool,
        limit: RateLimit,
    ) -> None:
        self._store = store
        self._deep = deep
        self._limit = limit
        self._buffers = threading.local()
        self._of: dict[str, _Context] = {}
        for namespace in catalog.namespaces.values():
            if namespace.document is not None:
                hasher = hasher_of(namespace.document, secrets.secret) if deep else None
                digest = namespace.document.identity.digest()
                self._of[namespace.name] = _Context(
                    digest, namespace.layouts(), namespace.codec(hasher, secrets.encryption_key), hasher
                )
                if secrets.encryption_key is not None if namespace.encrypted else deep:
                    require(namespace.document.storage.codec)
        sizes = [context.codec.most_bytes(layout) for context in self._of.values() for layout in context.layouts]
        self._largest = max(sizes, default=0)

    def object(self, stored: Stored) -> Verdict:
        """The verdict on one chunk object. Its namespace must have a document. Raises StorageError for the store's."""
        namespace = stored.name.partition("/")[0]
        context = self._of[namespace]
        if stored.group >= len(context.layouts):
            detail = f"group {stored.group}, the geometry has {len(context.layouts)}"
            return Verdict(fault=Fault(Kind.MISNAMED, Reason.WRONG_GROUP, detail))
        layout = context.layouts[stored.group]
        try:
            if context.hasher is not None:
                return self._whole(stored, layout, context, context.hasher)
            return self._beginning(stored, layout, context)
        except NotFound:
            return Verdict()
        except Forbidden as error:
            return Verdict(fault=Fault(Kind.UNREADABLE, error.kind, error.detail))

    def _whole(self, stored: Stored, layout: ChunkLayout, context: _Context, hasher: CellHasher) -> Verdict:
        most = context.codec.most_bytes(layout)
        self._limit.take(min(stored.size, most))
        buf = self._buffer(most)
        try:
            length = self._store.get_into(stored.name, buf)
        except StorageError as error:
            if error.kind is StorageErrorKind.TOO_LARGE:
                return self._too_large(stored, layout, context)
            return Verdict(fault=_of_length(error))
        data = buf[:length]
        try:
            if context.codec.closed is not None:
                context.codec.closed.check(data, layout, stored.key)
                return Verdict(nbytes=length, sealed=True)
            chunk = verify(context.codec.unpack(data, layout, stored.key), layout, context.digest, stored.key, hasher)
            return Verdict(chunk, nbytes=length)
        except FormatError as error:
            return Verdict(fault=self._named(error, data), nbytes=length)

    def _beginning(self, stored: Stored, layout: ChunkLayout, context: _Context) -> Verdict:
        """Size, header, tokens and key."""
        if stored.size > context.codec.most_bytes(layout):
            return self._too_large(stored, layout, context)
        wanted = min(stored.size, context.codec.info_bytes(layout))
        self._limit.take(wanted)
        try:
            head = self._store.get_range(stored.name, 0, wanted)
            if context.codec.closed is not None:
                context.codec.closed.check_head(head, stored.size, layout)
                return Verdict(nbytes=wanted, sealed=True)
            plain, size = context.codec.beginning(head, stored.size, layout, stored.key)
            chunk = check_info(plain, size, layout, context.digest, stored.key)
            return Verdict(chunk, nbytes=wanted)
        except StorageError as error:
            return Verdict(fault=_of_length(error))
        except FormatError as error:
            kind = _kind_of(error.reason)
            unsure = "; a deep check tells whether it is misnamed or damaged" if kind is Kind.MISNAMED else ""
            return Verdict(fault=Fault(kind, error.reason, error.detail + unsure), nbytes=wanted)

    def _too_large(self, stored: Stored, layout: ChunkLayout, context: _Context) -> Verdict:
        """Longer than its name allows: another chunk, or bytes behind one."""
        most = context.codec.most_bytes(layout)
        size = max(stored.size, most + 1)
        if context.hasher is not None and size <= self._largest:
            data = memoryview(self._store.get(stored.name, max_bytes=self._largest))
            error = FormatError(Reason.TRAILING, f"{len(data)} bytes, at most {most}")
            return Verdict(fault=self._named(error, data), nbytes=len(data))
        try:
            first = self._store.get_range(stored.name, 0, LENGTH_BYTES)
            head = self._store.get_range(stored.name, 0, max(header_size(first, size), LENGTH_BYTES))
            theirs, codec = stated_layout(parse_header(head, size))
            if (theirs, codec) != (layout, context.codec.name):
                reason = Reason.WRONG_GEOMETRY if codec == context.codec.name else Reason.WRONG_CODEC
                return Verdict(fault=Fault(Kind.MISNAMED, reason, "laid out as another chunk"))
        except FormatError as error:
            return Verdict(fault=Fault(_kind_of(error.reason), error.reason, error.detail))
        return Verdict(fault=Fault(Kind.DAMAGED, Reason.TRAILING, f"{size} bytes, at most {most}"))

    def _named(self, error: FormatError, data: memoryview) -> Fault:
        """The fault of an object that was read whole: misnamed only if it is sound under another name."""
        home = self._home(data)
        if home is not None:
            return Fault(Kind.MISNAMED, error.reason, f"it is {home}", home)
        kind = _kind_of(error.reason)
        return Fault(Kind.DAMAGED if kind is Kind.MISNAMED else kind, error.reason, error.detail)

    def _home(self, data: memoryview) -> str | None:
        """The name under which these bytes would be sound; encrypted ones do not tell."""
        try:
            theirs, codec = stated_layout(parse_header(data, len(data)))
        except FormatError:
            return None
        for namespace, context in self._of.items():
            known = theirs in context.layouts and codec == context.codec.name
            if context.hasher is None or not known or context.codec.encrypts:
                continue
            try:
                plain = context.codec.unpack(data, theirs, b"")
                key = read_chunk_id(plain, theirs, context.digest).key
                verify(plain, theirs, context.digest, key, context.hasher)
                return object_name(namespace, key, theirs.group_index)
            except FormatError:
                continue
        return None

    def _buffer(self, nbytes: int) -> memoryview:
        """Memory of this thread's own."""
        buf: memoryview | None = getattr(self._buffers, "view", None)
        if buf is None or len(buf) < nbytes:
            buf = self._buffers.view = memoryview(bytearray(nbytes))
        return buf[:nbytes]


_MISNAMED = (
    *(Reason.WRONG_KEY, Reason.WRONG_GROUP, Reason.WRONG_GEOMETRY),
    *(Reason.WRONG_DIGEST, Reason.WRONG_SECRET, Reason.WRONG_CODEC, Reason.WRONG_ENCRYPTION_KEY),
)


def _kind_of(reason: Reason) -> Kind:
    if reason is Reason.TRUNCATED:
        return Kind.TRUNCATED
    return Kind.MISNAMED if reason in _MISNAMED else Kind.DAMAGED


def _of_length(error: StorageError) -> Fault:
    """The fault that an object's length is; other errors are the store's own and are raised."""
    damage = as_damage(error)
    if isinstance(damage, StorageError):
        raise damage
    return Fault(_kind_of(damage.reason), damage.reason, damage.detail)
