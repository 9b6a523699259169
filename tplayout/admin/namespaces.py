"""One namespace of a store as a tool sees it: identity, layouts, objects, and reading them verified.

Tools get their identity from namespace.json, so they need no model.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from tplayout.admin.catalog import NO_SECRETS, Secrets, hasher_of, key_of
from tplayout.cache.codec import Codec, begun_codec, make_codec, require
from tplayout.cache.namespace import check_document, read_document
from tplayout.cache.packing import plain_store
from tplayout.errors import (
    ConfigError,
    FormatError,
    NamespaceMismatch,
    NotFound,
    Reason,
    StorageError,
    StorageErrorKind,
)
from tplayout.format.chunk import Buffer, read_chunk_id, verify
from tplayout.format.digest import CellHasher, make_hasher
from tplayout.format.encrypted import EncryptionKey
from tplayout.format.identity import Identity, NamespaceDocument, StorageFacts
from tplayout.format.keys import ChunkId, ObjectName, namespace_object, object_name, parse_object_name
from tplayout.format.layout import ChunkLayout, chunk_layout
from tplayout.storage.base import ObjectInfo, Store

_DOCUMENT = re.compile(r"([0-9a-f]{32})/namespace\.json")


@dataclass(frozen=True)
class OpenNamespace:
    """A namespace and what reads and writes it. digest: 32 bytes, of the identity. encryption_key: None if it is plain.

    Objects are plain where they come in and go out, in whatever codec the store has them.
    """

    store: Store
    document: NamespaceDocument
    hasher: CellHasher
    digest: bytes
    encryption_key: EncryptionKey | None = None

    @property
    def identity(self) -> Identity:
        """What its KV depends on."""
        return self.document.identity

    @property
    def name(self) -> str:
        """Its directory in the store, 32 hex digits."""
        return self.digest.hex()[:32]

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.identity.geometry.chunk_tokens

    @property
    def layouts(self) -> tuple[ChunkLayout, ...]:
        """Of each group."""
        return tuple(self.layout(index) for index in range(len(self.identity.geometry.groups)))

    @cached_property
    def codec(self) -> Codec:
        """How its objects are stored."""
        facts = self.document.storage
        return make_codec(facts.codec, self.hasher, facts.encryption_key_id, self.encryption_key)

    @property
    def stored_as(self) -> tuple[str, str | None]:
        """Codec and id of the encryption key: what decides whether stored bytes mean the same elsewhere."""
        return self.document.storage.codec, self.document.storage.encryption_key_id

    @cached_property
    def _plain(self) -> Store:
        return plain_store(self.store, self.name, self.layouts, self.codec)

    def layout(self, group: int) -> ChunkLayout:
        """Of one group; GeometryError if there is none."""
        return chunk_layout(self.identity.geometry, group, self.hasher.name, self.hasher.key_id)

    def object_name(self, key: bytes, group: int) -> str:
        """Store key of a chunk's group."""
        return object_name(self.name, key, group)

    def objects(self) -> Iterator[tuple[ObjectName, ObjectInfo]]:
        """What is listed and has an object's name; whether it is one, nobody has looked yet."""
        for info in self.store.list(f"{self.name}/"):
            try:
                name = parse_object_name(info.key)
            except FormatError:
                continue
            if name.group_index < len(self.identity.geometry.groups):
                yield name, info

    def chunk_id(self, key: bytes, group: int) -> ChunkId:
        """What an object says it is, checked against its key, which binds it; cells are not read.

        Raises NotFound, or FormatError: wrong-key, truncated.
        """
        layout, name = self.layout(group), self.object_name(key, group)
        start = layout.data_start
        try:
            data = self._plain.get_range(name, start, layout.extras_range.stop - start)
        except StorageError as error:
            raise as_damage(error, name) from None
        chunk = read_chunk_id(bytes(start) + data, layout, self.digest)
        if chunk.key != key:
            raise FormatError(Reason.WRONG_KEY, f"content belongs to {chunk.key.hex()}", name)
        return chunk

    def read(self, key: bytes, group: int, buf: bytearray | memoryview | None = None) -> memoryview:
        """A whole object, verified. buf: memory of at least layout.nbytes for it, None for new.

        Raises NotFound, FormatError that names the object, StorageError.
        """
        layout, name = self.layout(group), self.object_name(key, group)
        view = memoryview(bytearray(layout.nbytes) if buf is None else buf).cast("B")[: layout.nbytes]
        try:
            length = self._plain.get_into(name, view)
        except StorageError as error:
            raise as_damage(error, name) from None
        try:
            verify(view[:length], layout, self.digest, key, self.hasher)
        except FormatError as error:
            raise error.at(name) from None
        return view

    def read_stored(self, key: bytes, group: int) -> Buffer:
        """The bytes of an object as they are stored, verified. Raises as `read`."""
        layout, name = self.layout(group), self.object_name(key, group)
        try:
            stored = self.store.get(name, max_bytes=self.codec.most_bytes(layout))
        except StorageError as error:
            raise as_damage(error, name) from None
        try:
            self.verified(stored, key, group)
        except FormatError as error:
            raise error.at(name) from None
        return stored

    def verified(self, stored: Buffer, key: bytes, group: int) -> memoryview:
        """The plain object of stored bytes. Raises FormatError."""
        layout = self.layout(group)
        plain = self.codec.unpack(stored, layout, key)
        verify(plain, layout, self.digest, key, self.hasher)
        return plain

    def write(self, key: bytes, group: int, plain: Buffer) -> int:
        """Store a sealed object; the bytes that it takes there."""
        data = self.codec.pack(plain, self.layout(group), key)
        self.store.put(self.object_name(key, group), data)
        return len(data)


def names(store: Store) -> list[str]:
    """The namespaces of a store that have a document, sorted."""
    found = (_DOCUMENT.fullmatch(info.key) for info in store.list())
    return sorted(match[1] for match in found if match)


def open_namespace(store: Store, name: str, secrets: Secrets = NO_SECRETS) -> OpenNamespace:
    """The namespace of that name.

    Raises NotFound; FormatError if namespace.json is damaged; ConfigError if it needs a secret or key and has another
    or none, or if what its codec needs is not installed.
    """
    return unwritten(store, _document(store, name), secrets)


def _document(store: Store, name: str) -> NamespaceDocument:
    """What namespace.json says. Raises NotFound; FormatError that names store and file."""
    try:
        return read_document(store, name)
    except FormatError as error:
        raise error.at(f"{store.url}: {error.where}") from None


def choose_namespace(store: Store, wanted: str | None, secrets: Secrets = NO_SECRETS) -> OpenNamespace:
    """The namespace whose name starts with `wanted`, or the only one. Raises ConfigError that lists them."""
    there = names(store)
    fitting = [name for name in there if name.startswith(wanted or "")]
    if len(fitting) == 1:
        return open_namespace(store, fitting[0], secrets)
    if not there:
        raise NotFound(f"{store.url}: no namespace is stored here")
    which = f"{len(fitting)} namespaces start with {wanted!r}" if wanted else f"there are {len(there)} namespaces"
    raise ConfigError(f"{store.url}: {which}, name one: {', '.join((fitting or there)[:20])}")


def begin_namespace(
    store: Store,
    identity: Identity,
    model: str,
    secrets: Secrets = NO_SECRETS,
    codec: str | None = None,
    dry_run: bool = False,
) -> OpenNamespace:
    """The identity's namespace, written if it is not there, with keyed digests if there is a secret, encrypted if there
    is a key. A dry run writes nothing.

    codec: that it must have; None for that which it has, or that which goes with the key. Raises as `open_namespace`,
    and NamespaceMismatch if it is there in another codec, or without keyed digests although there is a secret;
    ConfigError if it is not encrypted although there is a key.
    """
    document = new_document(identity, model, secrets, codec)
    found = begin_copy(store, document, secrets, dry_run)
    check_encrypted(document, found)
    if codec is not None:
        check_codec_of(found, codec)
    if secrets.secret is not None and found.hasher.key_id is None:
        raise NamespaceMismatch("storage.digest", document.storage.digest, found.document.storage.digest)
    return found


def check_encrypted(wanted: NamespaceDocument, found: OpenNamespace) -> None:
    """ConfigError if a namespace that was to be encrypted is not: nothing is decrypted unasked."""
    if wanted.storage.encryption_key_id is not None and found.encryption_key is None:
        raise ConfigError(
            f"namespace {found.name} is there in {found.store.url}, and is not encrypted (codec {found.codec.name}): "
            "nothing is written to it; take another store, or `tplayout convert --codec none` to decrypt"
        )


def check_codec_of(namespace: OpenNamespace, codec: str) -> None:
    """NamespaceMismatch if the namespace has another codec."""
    if namespace.codec.name != codec:
        raise NamespaceMismatch("storage.codec", codec, namespace.codec.name)


def new_document(identity: Identity, model: str, secrets: Secrets, codec: str | None = None) -> NamespaceDocument:
    """What a new namespace of this identity says of itself. Raises ConfigError as `begun_codec`."""
    hasher, key = make_hasher(None, secrets.secret), secrets.encryption_key
    facts = StorageFacts(hasher.name, hasher.key_id, begun_codec(codec, key), None if key is None else key.id)
    return NamespaceDocument(identity, facts, model)


def begin_copy(store: Store, document: NamespaceDocument, secrets: Secrets, dry_run: bool = False) -> OpenNamespace:
    """The document's namespace, written as it is if nothing is there, else what is there; see `open_namespace`.

    A dry run writes nothing.
    """
    name = document.identity.namespace
    try:
        return open_namespace(store, name, secrets)
    except NotFound:
        begun = unwritten(store, document, secrets)
        if dry_run:
            return begun
        store.put(namespace_object(name), document.to_bytes())
        return open_namespace(store, name, secrets)  # another may have begun it just now


def unwritten(store: Store, document: NamespaceDocument, secrets: Secrets) -> OpenNamespace:
    """A namespace as its document has it, whether it is there or not. Raises ConfigError as `open_namespace`."""
    used = key_of(document, secrets.encryption_key)
    require(document.storage.codec)
    return OpenNamespace(store, document, hasher_of(document, secrets.secret), document.identity.digest(), used)


def check_same_digests(store: Store, document: NamespaceDocument) -> None:
    """NamespaceMismatch if the namespace is in the store, but with another digest or secret.

    Its codec may differ, and its encryption key.
    """
    name = document.identity.namespace
    try:
        found = _document(store, name)
    except NotFound:
        return
    theirs = found.storage
    facts = replace(document.storage, codec=theirs.codec, encryption_key_id=theirs.encryption_key_id)
    ours = replace(document, storage=facts)
    check_document(found.to_bytes(), ours.to_bytes(), name)


def as_damage(error: StorageError, name: str) -> StorageError | FormatError:
    """An object of the wrong length is a damaged one, whatever noticed it first."""
    if error.kind == StorageErrorKind.TOO_LARGE:
        return FormatError(Reason.TRAILING, error.detail, name)
    if error.kind == StorageErrorKind.SHORT_READ:
        return FormatError(Reason.TRUNCATED, error.detail, name)
    return error
