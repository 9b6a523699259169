"""One namespace of a store as a tool sees it: identity, layouts, objects, and reading them verified.

Tools get their identity from namespace.json, so they need no model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property

from tplayout.admin.catalog import NO_SECRETS, Secrets, checked_beginning, hasher_of, key_of
from tplayout.cache.codec import Codec, begun_codec, make_codec, require
from tplayout.cache.namespace import read_document
from tplayout.cache.packing import plain_store
from tplayout.errors import (
    ConfigError,
    FormatError,
    NamespaceMismatch,
    NotFound,
    Reason,
    StorageError,
    as_damage,
)
from tplayout.format.chunk import Buffer, parse_ids, verify
from tplayout.format.digest import KEYED, XXH3, CellHasher, secret_id
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.identity import Identity, NamespaceDocument, StorageFacts
from tplayout.format.keys import (
    ChunkId,
    ObjectName,
    is_namespace,
    namespace_name,
    namespace_object,
    object_name,
    parse_object_name,
)
from tplayout.format.layout import CODEC_AES_256_GCM, CODEC_NONE, ChunkLayout, chunk_layout, layouts_of
from tplayout.storage.base import ObjectInfo, Store


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
        return namespace_name(self.digest)

    @property
    def chunk_tokens(self) -> int:
        """Tokens of a chunk."""
        return self.identity.geometry.chunk_tokens

    @property
    def layouts(self) -> tuple[ChunkLayout, ...]:
        """Of each group."""
        return layouts_of(self.identity.geometry, self.hasher.name, self.hasher.key_id)

    @cached_property
    def codec(self) -> Codec:
        """How its objects are stored."""
        facts = self.document.storage
        return make_codec(facts.codec, self.hasher, facts.encryption_key_id, self.encryption_key)

    @property
    def stored_as(self) -> StorageFacts:
        """Digest, codec and keys: what decides whether stored bytes mean the same elsewhere."""
        return self.document.storage

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
        try:
            data = self._plain.get_range(name, layout.ids_range.start, len(layout.ids_range))
        except StorageError as error:
            raise as_damage(error, name) from None
        chunk = parse_ids(data, layout, self.digest)
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
    found = (info.key.partition("/") for info in store.list())
    return sorted(directory for directory, _, rest in found if is_namespace(directory) and rest == "namespace.json")


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
    """The namespace whose name begins with `wanted`, or the only one.

    Raises NotFound if there is none, ConfigError if there are several, with their names; as `open_namespace`.
    """
    there = names(store)
    begin = None if wanted is None else checked_beginning(wanted)
    fitting = [name for name in there if name.startswith(begin or "")]
    if len(fitting) == 1:
        return open_namespace(store, fitting[0], secrets)
    if not there:
        raise NotFound(f"{store.url}: no namespace is stored here")
    if not fitting:
        raise NotFound(f"{store.url}: no namespace begins with {wanted!r}; there are {', '.join(there[:20])}")
    which = f"{len(fitting)} namespaces begin with {wanted!r}" if wanted else f"there are {len(there)} namespaces"
    raise ConfigError(f"{store.url}: {which}, name one: {', '.join(fitting[:20])}")


def begin_namespace(
    store: Store,
    identity: Identity,
    model: str,
    secrets: Secrets = NO_SECRETS,
    codec: str | None = None,
    dry_run: bool = False,
    source: StorageFacts | None = None,
) -> OpenNamespace:
    """The identity's namespace to be written to, begun if it is not there. A dry run writes nothing.

    The rule of all verbs that write: what is written is encrypted with the key that is given, and its digests are keyed
    with the secret that is given. Who asks for the codec none decrypts what `source` has encrypted; nothing else does.

    codec: that it must have; None for that which it has. source: how what will be written is stored now, None if that
    is no namespace; one that is begun is stored alike as far as the rule allows. Raises as `open_namespace`, and
    ConfigError if the namespace is there and not encrypted, or not keyed, as it must be, or if the codec does not go
    with the key; NamespaceMismatch if it is there in another codec.
    """
    document = NamespaceDocument(identity, written_facts(secrets, codec, source), model)
    found = _begin(store, document, secrets, dry_run)
    theirs = found.document.storage
    there = f"namespace {found.name} is there in {store.url}, and"
    if document.storage.encryption_key_id is not None and theirs.encryption_key_id is None:
        raise ConfigError(
            f"{there} is not encrypted (codec {theirs.codec}): nothing is written to it with a key; take another "
            "store, or leave out the key (--encryption-key-file, TPLAYOUT_ENCRYPTION_KEY); "
            "`tplayout convert --codec none` decrypts"
        )
    if document.storage.key_id is not None and theirs.key_id is None:
        raise ConfigError(
            f"{there} was written without a secret (digest {theirs.digest}): nothing is written to it with one; take "
            "another store, or leave out the secret (--secret-key-file, TPLAYOUT_SECRET_KEY)"
        )
    if codec not in (None, theirs.codec):
        raise NamespaceMismatch("storage.codec", codec, theirs.codec)
    return found


def begin_copy(
    origin: OpenNamespace, store: Store, identity: Identity, secrets: Secrets, codec: str | None, dry_run: bool
) -> OpenNamespace:
    """The identity's namespace in a store, for what another namespace holds. See `begin_namespace`.

    secrets: of the store; the encryption key may be left out, and is the source's then.
    """
    own = replace(secrets, encryption_key=secrets.encryption_key or origin.encryption_key)
    return begin_namespace(store, identity, origin.document.model, own, codec, dry_run, origin.document.storage)


def written_facts(secrets: Secrets, codec: str | None = None, source: StorageFacts | None = None) -> StorageFacts:
    """How a namespace is begun; see `begin_namespace`. Raises ConfigError where codec and key contradict each other."""
    key = secrets.encryption_key
    encrypted = source is not None and source.encryption_key_id is not None
    if encrypted and codec == CODEC_NONE:
        key = None
    if key is not None and codec not in (None, CODEC_AES_256_GCM):
        way = (
            "`--codec none` decrypts, and what is plain can be converted again"
            if encrypted
            else "leave out the key (--encryption-key-file, TPLAYOUT_ENCRYPTION_KEY)"
        )
        raise ConfigError(f"codec {codec} does not encrypt, and there is an encryption key: {way}, or take aes-256-gcm")
    if key is None and codec is None and source is not None:
        codec = source.codec
    digest, key_id = (XXH3, None) if source is None else (source.digest, source.key_id)
    if secrets.secret is not None:
        digest, key_id = KEYED, secret_id(secrets.secret)
    return StorageFacts(digest, key_id, begun_codec(codec, key), None if key is None else key.id)


def _begin(store: Store, document: NamespaceDocument, secrets: Secrets, dry_run: bool) -> OpenNamespace:
    """The document's namespace, written as it is if nothing is there, else what is there; see `open_namespace`."""
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
