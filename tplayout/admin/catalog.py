"""What lies in a store, by name: namespaces, chunk objects, and files that the key tree does not have.

Reads names and namespace documents, no chunk. Names whose first component begins with RESERVED belong to tools
(what was moved to quarantine, records of use); they are neither objects nor foreign.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from tplayout.cache.codec import Codec, check_key, make_codec
from tplayout.cache.namespace import read_document as read_namespace_document
from tplayout.cache.packing import plain_store
from tplayout.errors import ConfigError, FormatError, NotFound, Reason, Unavailable
from tplayout.format.digest import CellHasher, make_hasher
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.identity import NamespaceDocument
from tplayout.format.keys import is_namespace, namespace_object, parse_object_name
from tplayout.format.layout import ChunkLayout, layouts_of
from tplayout.storage.base import RESERVED, ObjectInfo, Store

QUARANTINE = f"{RESERVED}quarantine"

_SOME_HEX = re.compile(r"[0-9a-f]{4,32}")


@dataclass(frozen=True)
class Secrets:
    """What keyed digests and encrypted objects need; ignored where nothing needs it. None: there is none."""

    secret: bytes | None = field(default=None, repr=False)
    encryption_key: EncryptionKey | None = None


NO_SECRETS = Secrets()


@dataclass(frozen=True, slots=True)
class Stored:
    """One chunk object as a listing has it. key: 32 bytes; size: bytes.

    modified, used: when it was written, and last used, in seconds since the epoch; None where the store does not tell.
    """

    name: str
    key: bytes
    group: int
    size: int
    modified: float | None
    used: float | None = None


@dataclass
class Namespace:
    """One directory. document is None where `fault` says why; info is that of namespace.json, None if missing."""

    name: str
    objects: list[Stored] = field(default_factory=list)
    info: ObjectInfo | None = None
    document: NamespaceDocument | None = None
    fault: FormatError | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the chunk objects."""
        return sum(stored.size for stored in self.objects)

    @property
    def chunks(self) -> int:
        """How many chunks have an object."""
        return len({stored.key for stored in self.objects})

    def times(self) -> tuple[float | None, float | None]:
        """When the oldest and the newest object were written."""
        return span_of(stored.modified for stored in self.objects)

    def known(self) -> NamespaceDocument:
        """The document; raises its fault if there is none."""
        if self.document is None:
            assert self.fault is not None
            raise self.fault
        return self.document

    def layouts(self) -> tuple[ChunkLayout, ...]:
        """The layout of each group. Raises as `known`."""
        document = self.known()
        return layouts_of(document.identity.geometry, document.storage.digest, document.storage.key_id)

    def most_bytes(self) -> int:
        """Bytes of the largest object that the geometry allows. Raises as `known`."""
        codec = self.codec()
        return max(codec.most_bytes(layout) for layout in self.layouts())

    @property
    def encrypted(self) -> bool:
        """Whether its objects can be read with a key only; False where its document cannot be read."""
        return self.document is not None and self.document.storage.encryption_key_id is not None

    def codec(self, hasher: CellHasher | None = None, encryption_key: EncryptionKey | None = None) -> Codec:
        """How its objects are stored. hasher, encryption_key: None where nobody has the secret, or the key.

        Raises as `known`, and ConfigError for another key.
        """
        facts = self.known().storage
        return make_codec(
            facts.codec, hasher, facts.encryption_key_id, encryption_key and key_of(self.known(), encryption_key)
        )

    def plain(self, store: Store, encryption_key: EncryptionKey | None = None) -> Store:
        """The store as one that holds this namespace's objects plain, for reading.

        Raises as `known`, and ConfigError if they are encrypted and the key is missing or another.
        """
        key_of(self.known(), encryption_key)
        return plain_store(store, self.name, self.layouts(), self.codec(None, encryption_key))


@dataclass
class Catalog:
    """A store's namespaces by name, the files that are none of ours, and what tools keep (quarantine, usage)."""

    namespaces: dict[str, Namespace]
    foreign: list[ObjectInfo]
    tools: list[ObjectInfo]

    @property
    def objects(self) -> int:
        """How many chunk objects there are."""
        return sum(len(namespace.objects) for namespace in self.namespaces.values())


def scan(store: Store, namespace: str | None = None) -> Catalog:
    """List a store, or one namespace of it, and read the documents. namespace: its first hex digits, 4 or more.

    Raises NotFound for a namespace that is not there, ConfigError where several begin so.
    """
    catalog = Catalog({}, [], [])
    try:
        for info in store.list("" if namespace is None else checked_beginning(namespace)):
            _sort_in(catalog, info)
    except NotFound as error:  # not an object: the bucket
        raise Unavailable(error.detail) from None
    if namespace is not None:
        if not catalog.namespaces:
            raise NotFound(f"{store.url}: no namespace begins with {namespace!r}; `tplayout ls` lists them")
        if len(catalog.namespaces) > 1:
            raise ConfigError(f"{namespace!r} is ambiguous: {', '.join(sorted(catalog.namespaces))}")
    catalog.namespaces = dict(sorted(catalog.namespaces.items()))
    for found in catalog.namespaces.values():
        found.objects.sort(key=lambda stored: stored.name)
        read_document(store, found)
    return catalog


def read_document(store: Store, namespace: Namespace) -> bool:
    """Read namespace.json into `document` or `fault`. False if there is none. Raises StorageError."""
    name = namespace_object(namespace.name)
    try:
        namespace.document = read_namespace_document(store, namespace.name)
        namespace.layouts()  # a geometry without a layout is a fault too
    except NotFound:
        namespace.info = None  # deleted since it was listed
        namespace.fault = FormatError(Reason.BAD_NAMESPACE, "it is missing", name)
        return False
    except FormatError as error:
        namespace.document, namespace.fault = None, error.at(name)
    return True


def hasher_of(document: NamespaceDocument, secret: bytes | None) -> CellHasher:
    """What digests the cells of a namespace. A secret that it does not use is ignored: tools see many namespaces.

    Raises ConfigError if it needs a secret and that is missing or another.
    """
    facts = document.storage
    try:
        return make_hasher(facts.digest, secret if facts.key_id else None, facts.key_id)
    except FormatError as error:
        namespace = document.identity.namespace
        raise ConfigError(
            f"namespace {namespace} has keyed digests ({error.detail}): give --secret-key-file or TPLAYOUT_SECRET_KEY"
        ) from None


def key_of(document: NamespaceDocument, encryption_key: EncryptionKey | None) -> EncryptionKey | None:
    """What a namespace is encrypted with, None for nothing. A key that it does not use is ignored.

    Raises ConfigError if it needs a key and that is missing or another.
    """
    facts = document.storage
    if facts.encryption_key_id is None:
        return None
    try:
        check_key(facts.codec, facts.encryption_key_id, encryption_key)
    except FormatError as error:
        raise ConfigError(
            f"namespace {document.identity.namespace} is encrypted ({error.detail}): give --encryption-key-file or "
            "TPLAYOUT_ENCRYPTION_KEY"
        ) from None
    return encryption_key


def span_of(times: Iterable[float | None]) -> tuple[float | None, float | None]:
    """The smallest and largest of what is known."""
    known = [time for time in times if time is not None]
    return (min(known), max(known)) if known else (None, None)


def by_key(objects: Iterable[Stored]) -> Mapping[bytes, list[Stored]]:
    """The objects of each chunk, in the order of their groups."""
    chunks: dict[bytes, list[Stored]] = {}
    for stored in objects:
        chunks.setdefault(stored.key, []).append(stored)
    for group in chunks.values():
        group.sort(key=lambda stored: stored.group)
    return chunks


def checked_beginning(namespace: str) -> str:
    """The first digits of a namespace's name as it has them. Raises ConfigError for what can be none."""
    text = namespace.strip("/").lower()
    if not _SOME_HEX.fullmatch(text):
        raise ConfigError(f"namespace {namespace!r} must be 4 to 32 hex digits; `tplayout ls URL` lists them")
    return text


def _sort_in(catalog: Catalog, info: ObjectInfo) -> None:
    directory, _, rest = info.key.partition("/")
    if directory.startswith(RESERVED) and rest:
        catalog.tools.append(info)
        return
    if is_namespace(directory) and rest == "namespace.json":
        catalog.namespaces.setdefault(directory, Namespace(directory)).info = info
        return
    try:
        name = parse_object_name(info.key)
    except FormatError:
        catalog.foreign.append(info)
        return
    namespace = catalog.namespaces.setdefault(directory, Namespace(directory))
    namespace.objects.append(Stored(info.key, name.key, name.group_index, info.size, info.modified, info.used))
