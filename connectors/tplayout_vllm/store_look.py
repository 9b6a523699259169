"""The first look at the store, at start: how the namespace is kept, and whether the store can be used at all.

Layer: below opening.py. Only a wrong set-up refuses the start; a store that is broken costs misses, unless `strict`.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from tplayout.cache.codec import begun_codec, check_key, require
from tplayout.cache.namespace import OF_OTHERS, read_namespace
from tplayout.errors import ConfigError, FormatError, NamespaceMismatch, StorageError, Unusable
from tplayout.format.digest import CellHasher, make_hasher
from tplayout.format.identity import Identity, NamespaceDocument
from tplayout.key_files import ENCRYPTION_KEY_ENV
from tplayout.staging.protocol import NAMESPACE_DIFFERS
from tplayout.storage.base import Store
from tplayout.storage.redact import redact
from tplayout.storage.trial import try_writing
from tplayout.storage.url import open_store
from tplayout_vllm.options import Options

logger = logging.getLogger("vllm.tplayout")

_LONGEST_S = 10.0  # for one operation at start, which nobody watches


@dataclass(frozen=True)
class Fault:
    """What will not go away by itself. kind, detail: as those of a failed job. loads: it keeps from loading too."""

    kind: str
    detail: str
    loads: bool


@dataclass(frozen=True)
class Found:
    """How to store. agreed: the namespace is kept in this way, or is not there; else it is in another, or not seen."""

    hasher: CellHasher
    codec: str
    agreed: bool
    fault: Fault | None = None


def look_at_store(options: Options, identity: Identity, saves: bool) -> Found:
    """Look at the namespace once, and take over digest and codec of one that exists. saves: this server writes.

    With `strict` a store must answer, and take and give back an object where the server writes. Raises ConfigError,
    one line: for a namespace of another kind; with `strict` for all that is wrong. Without, a store that does not
    answer, is damaged, or is encrypted with another key is told in the log (keys are changed while servers run).
    """
    begun, store = _prepared(options)
    try:
        document = read_namespace(store, identity)
        found = _taken_over(options, document, begun)
        if options.strict and saves:
            _try_out(store)
        return found
    except StorageError as error:
        fault = _unusable(options, error)
    except (FormatError, NamespaceMismatch) as error:
        fault = _not_ours(options, identity, error)
    finally:
        store.close()
    return Found(make_hasher(None, options.secret), begun, False, fault)


def _prepared(options: Options) -> tuple[str, Store]:
    """The codec that a new namespace gets, and the store, not yet connected. Raises ConfigError."""
    begun = begun_codec(None, options.encryption_key)
    try:
        require(begun)
    except ConfigError as error:
        raise ConfigError(
            f"kv_connector_extra_config: 'encryption_key_file' (or {ENCRYPTION_KEY_ENV}) is set, and {error}"
        ) from None
    timeout = min(options.store_timeout, _LONGEST_S)
    try:
        return begun, open_store(options.url, options.storage_options, timeout, options.max_bytes or 0)
    except ConfigError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from None


def _taken_over(options: Options, document: NamespaceDocument | None, begun: str) -> Found:
    if document is None:
        return Found(make_hasher(None, options.secret), begun, True)
    facts = document.storage
    hasher = make_hasher(facts.digest, options.secret, facts.key_id)
    if not _has_key(options, document):
        return Found(hasher, begun, False)
    require(facts.codec)
    return Found(hasher, facts.codec, True)


def _try_out(store: Store) -> None:
    left = try_writing(store)
    if left is not None:
        logger.warning(
            "tplayout: what is written to the store %s cannot be deleted (%s), which no server needs; a small object "
            "stays there",
            store.url,
            left,
        )


def _unusable(options: Options, error: StorageError) -> Fault | None:
    """Refuse, or say that the store fails; None where that may end by itself."""
    url, lasts = redact(options.url), isinstance(error, Unusable)
    if options.strict:
        way_out = "correct the 'url'" if lasts else "make it reachable"
        raise ConfigError(
            f"the store {url} cannot be used ({error}) and 'strict' is set; {way_out}, or leave 'strict' out to start "
            "without it"
        )
    if lasts:
        logger.error(
            "tplayout: the store %s can never be used (%s): serving WITHOUT it; correct the 'url' and restart",
            url,
            error,
        )
        return Fault(error.kind.value, error.detail, loads=True)
    logger.warning(
        "tplayout: the store %s cannot be used now (%s): serving WITHOUT it, it is tried again by and by", url, error
    )
    return None


def _not_ours(options: Options, identity: Identity, error: FormatError | NamespaceMismatch) -> Fault:
    """Refuse a namespace that is wanted otherwise. A damaged document costs saves, since nobody knows what it said."""
    url = redact(options.url)
    if isinstance(error, FormatError) and error.reason in OF_OTHERS:
        raise ConfigError(
            f"the store {url} holds another namespace {identity.namespace}: {error}; "
            "use another 'url', or the secret and options that it was made with"
        )
    damage = f"a damaged namespace.json: {error}; remove that file, it is written anew then"
    if options.strict:
        raise ConfigError(
            f"the store {url} holds {damage}, or use another 'url'; or leave 'strict' out to start without saving"
        )
    logger.error("tplayout: the store %s holds %s: nothing is saved until then", url, damage)
    return Fault(NAMESPACE_DIFFERS, damage, loads=False)


def _has_key(options: Options, found: NamespaceDocument) -> bool:
    """Whether our encryption key, or none, is the namespace's. If not all of it is a miss; FormatError if strict."""
    try:
        check_key(found.storage.codec, found.storage.encryption_key_id, options.encryption_key)
    except FormatError as error:
        if options.strict:
            raise
        logger.warning(
            "tplayout: the store %s holds namespace %s in another way (%s): serving WITHOUT it; use another 'url', or "
            "restart with the 'encryption_key_file' that it was made with",
            redact(options.url),
            found.identity.namespace,
            error,
        )
        return False
    return True
