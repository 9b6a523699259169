"""Opening a namespace: whether what a store holds for an identity is what we would write.

The name for people in namespace.json does not count: servers of the same weights under other names share.
"""

from tplayout.cache.codec import Codec, begun_codec, check_key, make_codec, require
from tplayout.errors import FormatError, NamespaceMismatch, NotFound, Reason, StorageError, as_damage
from tplayout.format.canonical import parse_json
from tplayout.format.digest import CellHasher, make_hasher
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.identity import (
    MAX_DOCUMENT_BYTES,
    Identity,
    NamespaceDocument,
    StorageFacts,
    parse_namespace_document,
)
from tplayout.format.keys import namespace_object
from tplayout.storage.base import Store

# Of a namespace.json that is not damaged, but as another server, or another version, wants it.
OF_OTHERS = frozenset(
    {
        Reason.UNSUPPORTED_CODEC,
        Reason.UNSUPPORTED_DIGEST,
        Reason.WRONG_ENCRYPTION_KEY,
        Reason.WRONG_SECRET,
        Reason.WRONG_VERSION,
    }
)


def fetch_document(store: Store, namespace: str) -> bytes:
    """What namespace.json holds, unchecked. namespace: 32 hex digits.

    Raises NotFound, other StorageErrors; FormatError where the length alone says that it is none.
    """
    name = namespace_object(namespace)
    try:
        return store.get(name, max_bytes=MAX_DOCUMENT_BYTES)
    except StorageError as error:
        raise as_damage(error, name, Reason.TOO_LARGE) from None


def read_document(store: Store, namespace: str) -> NamespaceDocument:
    """The document of the namespace of that name, whatever its identity. Raises as `fetch_document`."""
    data = fetch_document(store, namespace)
    try:
        return parse_namespace_document(data, namespace)
    except FormatError as error:
        raise error.at(namespace_object(namespace)) from None


def read_namespace(store: Store, identity: Identity) -> NamespaceDocument | None:
    """The namespace's document, None if there is none.

    Raises StorageError; FormatError for a damaged one; NamespaceMismatch if it is that of another identity.
    """
    try:
        return _parse(fetch_document(store, identity.namespace), identity)
    except NotFound:
        return None


def check_namespace(store: Store, identity: Identity, document: bytes) -> StorageFacts | None:
    """How the namespace that exists is stored, None if there is none. Writes nothing.

    document: the namespace.json that we would write. Raises StorageError; and as `check_document`.
    """
    found = read_namespace(store, identity)
    if found is None:
        return None
    return _agree(parse_namespace_document(document, identity.namespace), found)


def check_document(found: bytes, document: bytes, namespace: str) -> StorageFacts:
    """The same for a namespace.json that was read already. namespace: 32 hex digits, where it was found.

    Raises NamespaceMismatch that names the first field of identity or storage in which they differ, ours being
    `document`; FormatError for a damaged one.
    """
    ours = parse_namespace_document(document, namespace)
    return _agree(ours, _parse(found, ours.identity))


def open_namespace(
    store: Store,
    identity: Identity,
    secret: bytes | None,
    create: bool,
    model: str,
    codec: str | None = None,
    key: EncryptionKey | None = None,
) -> tuple[CellHasher, Codec]:
    """Hasher and codec of the namespace: of the one that exists, else of a new one that is written if `create` is set.

    codec: of a new one, see `begun_codec`. Raises ConfigError as that, and for one that is not known, or whose library
    is not installed; as `read_namespace`; FormatError wrong-secret or wrong-encryption-key if the secret, or the key,
    is not the namespace's, in either direction; NotFound if there is none and it is not to be created.
    """
    codec = begun_codec(codec, key)
    name = namespace_object(identity.namespace)
    found = read_namespace(store, identity)
    if found is None and create:
        hasher = make_hasher(None, secret)
        require(codec)
        facts = StorageFacts(hasher.name, hasher.key_id, codec, None if key is None else key.id)
        store.put(name, NamespaceDocument(identity, facts, model).to_bytes())
        found = read_namespace(store, identity)  # another may have begun it just now, in another codec
    if found is None:
        raise NotFound(f"{store.url}: {name}: nothing is stored for this identity (create=True begins a namespace)")
    try:
        return open_facts(found.storage, secret, key)
    except FormatError as error:
        raise error.at(f"{store.url}: {name}") from None


def open_facts(facts: StorageFacts, secret: bytes | None, key: EncryptionKey | None) -> tuple[CellHasher, Codec]:
    """What digests cells, and stores objects, as a namespace's document says.

    Raises FormatError wrong-secret or wrong-encryption-key if the secret, or the key, is not the namespace's, in either
    direction; ConfigError if its codec's library is not installed.
    """
    hasher = make_hasher(facts.digest, secret, facts.key_id)
    check_key(facts.codec, facts.encryption_key_id, key)
    require(facts.codec)
    return hasher, make_codec(facts.codec, hasher, facts.encryption_key_id, key)


def _parse(data: bytes, identity: Identity) -> NamespaceDocument:
    """The document found in the identity's directory."""
    try:
        return parse_namespace_document(data, identity.namespace)
    except FormatError as error:
        if error.reason is Reason.WRONG_NAMESPACE:  # all but the name is right: say what differs
            theirs = Identity.from_json(parse_json(data, MAX_DOCUMENT_BYTES)["identity"])
            for field, ours, other in identity.diff(theirs):
                raise NamespaceMismatch(field, ours, other) from None
        raise error.at(namespace_object(identity.namespace)) from None


def _agree(ours: NamespaceDocument, theirs: NamespaceDocument) -> StorageFacts:
    for field, mine, other in ours.identity.diff(theirs.identity):
        raise NamespaceMismatch(field, mine, other)
    for field in ("codec", "digest", "key_id", "encryption_key_id"):
        mine, other = getattr(ours.storage, field), getattr(theirs.storage, field)
        if mine != other:
            raise NamespaceMismatch(f"storage.{field}", mine, other)
    return theirs.storage
