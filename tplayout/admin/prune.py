"""Which chunks go when a store shall shrink, and deleting them while servers go on.

Least recently used first, by what the store knows: last use where it notes that, else when an object was written. A
chunk counts as used when one behind it is, so tails go before heads and no prefix gets a gap. What was written a
moment ago stays: it may be half of something. Nothing here needs a secret; what is encrypted stays without its key,
since nothing else tells what is a prefix's tail.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from tplayout.admin.catalog import Catalog, Namespace, by_key, scan
from tplayout.admin.parallel import in_order
from tplayout.admin.progress import Progress, silent
from tplayout.cache.chunk_ids import read_id
from tplayout.cache.pruning import Chunk, link, victims
from tplayout.errors import ConfigError
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.keys import prompt_chain
from tplayout.storage.base import TEMPORARY_AGE_S, ObjectInfo, Store

GRACE_S = 60.0
_BATCH = 500


@dataclass
class Kept:
    """What must stay whatever its age. keys: beginnings of chunk keys or namespaces, hex; prompts: token ids."""

    keys: Sequence[str] = ()
    prompts: Sequence[Sequence[int]] = ()
    salt: str | None = None


@dataclass
class Limits:
    """max_bytes: of the whole store; max_age: seconds since last use; None for no limit.

    grace: objects younger than this many seconds stay. temporary_age: what dead writers left goes after so long.
    """

    max_bytes: int | None = None
    max_age: float | None = None
    grace: float = GRACE_S
    temporary_age: float = TEMPORARY_AGE_S


@dataclass
class Plan:
    """What would go, in the order in which it goes. by_use: whether the store notes use, else age decides.

    names: object names; temporaries: what dead writers left; before, after: bytes of the whole store. unjudged:
    namespaces whose document is missing or damaged, or which are encrypted with a key that is not given, with why;
    their objects stay.
    """

    by_use: bool
    before: int = 0
    after: int = 0
    chunks: int = 0
    names: list[str] = field(default_factory=list)
    temporaries: list[ObjectInfo] = field(default_factory=list)
    unjudged: dict[str, str] = field(default_factory=dict)
    met: bool = True


def plan(
    store: Store,
    limits: Limits,
    kept: Kept | None = None,
    namespace: str | None = None,
    now: float | None = None,
    jobs: int = 8,
    progress: Progress = silent,
    encryption_key: EncryptionKey | None = None,
) -> Plan:
    """Decide what goes. namespace: only chunks of this one go, and max_bytes is for it alone. Deletes nothing.

    encryption_key: of what is encrypted.

    Raises ConfigError for a `kept` that fits nothing, StorageError.
    """
    now = time.time() if now is None else now
    catalog = scan(store, namespace)
    decided = Plan(store.notes_use)
    below = "" if namespace is None else f"{next(iter(catalog.namespaces))}/"
    old = (info for info in store.temporaries() if _older(info, now - limits.temporary_age))
    decided.temporaries = [info for info in old if info.key.startswith(below)]
    groups: dict[str, list[Chunk]] = {}
    for each in catalog.namespaces.values():
        decided.before += each.nbytes + (each.info.size if each.info else 0)
        if each.document is None:
            decided.unjudged[each.name] = str(each.fault)
            continue
        try:
            groups[each.name] = _chunks(store, each, jobs, progress, encryption_key)
        except ConfigError as error:
            decided.unjudged[each.name] = str(error)
    decided.before += sum(info.size for info in (*catalog.foreign, *catalog.tools))
    _protect(catalog, groups, kept or Kept(), now - limits.grace)
    for chunks in groups.values():
        link(chunks)
    _choose(decided, [chunk for chunks in groups.values() for chunk in chunks], limits, now)
    return decided


def carry_out(store: Store, decided: Plan, progress: Progress = silent) -> None:
    """Delete what was decided, in its order; servers that miss an object compute it again. Raises StorageError."""
    for start in range(0, len(decided.names), _BATCH):
        store.delete(decided.names[start : start + _BATCH])
        progress(min(start + _BATCH, len(decided.names)), len(decided.names), 0)
    store.remove_temporaries([info.key for info in decided.temporaries])


def _older(info: ObjectInfo, moment: float) -> bool:
    return info.modified is not None and info.modified < moment


def _chunks(
    store: Store,
    namespace: Namespace,
    jobs: int,
    progress: Progress,
    encryption_key: EncryptionKey | None,
) -> list[Chunk]:
    """The chunks of a namespace, each with its parent; None where no object tells. ConfigError as `Namespace.plain`."""
    plain = namespace.plain(store, encryption_key)
    layouts, digest = namespace.layouts(), namespace.known().identity.digest()
    by_name = by_key(namespace.objects)
    chunks = []
    for key, objects in by_name.items():
        chunks.append(Chunk(key))
        for stored in objects:
            written = stored.modified or 0.0
            chunks[-1].add(stored.name, stored.size, stored.used or written, written)

    def parent(chunk: Chunk) -> bytes | None:
        for stored in by_name[chunk.key]:
            if stored.group < len(layouts):
                found = read_id(plain, layouts[stored.group], digest, stored.name, stored.key)
                if found is not None:
                    return found.parent
        return None

    for done, (chunk, found) in enumerate(zip(chunks, in_order(parent, chunks, jobs), strict=True), 1):
        chunk.parent = found
        progress(done, len(chunks), 0)
    return chunks


def _protect(catalog: Catalog, groups: Mapping[str, list[Chunk]], kept: Kept, young: float) -> None:
    """Mark what stays on its own account: young chunks and kept ones. ConfigError for what fits nothing."""
    fitting: set[str] = set()
    for name, chunks in groups.items():
        prompts = _prompt_keys(catalog.namespaces[name], kept)
        for chunk in chunks:
            text = chunk.key.hex()
            found = {key for key in kept.keys if text.startswith(key) or name.startswith(key)}
            fitting |= found
            chunk.stays = bool(found) or chunk.key in prompts or chunk.written > young
    for key in kept.keys:
        if key not in fitting:
            raise ConfigError(f"--keep {key}: no chunk and no namespace begins so; `tplayout ls` lists them")


def _prompt_keys(namespace: Namespace, kept: Kept) -> set[bytes]:
    identity = namespace.known().identity
    digest, size = identity.digest(), identity.geometry.chunk_tokens
    return {chunk.key for tokens in kept.prompts for chunk in prompt_chain(digest, tokens, size, kept.salt)}


def _choose(decided: Plan, chunks: list[Chunk], limits: Limits, now: float) -> None:
    """Victims: what is behind a gap first, then the least recently used, tails before heads."""
    decided.after = decided.before
    oldest = None if limits.max_age is None else now - limits.max_age
    for chunk in victims(chunks):
        too_old = oldest is not None and chunk.used < oldest
        too_much = limits.max_bytes is not None and decided.after > limits.max_bytes
        if too_old or too_much:
            decided.chunks += 1
            decided.after -= chunk.nbytes
            decided.names += chunk.names
    decided.met = limits.max_bytes is None or decided.after <= limits.max_bytes
