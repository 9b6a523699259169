"""Copying and moving chunks between stores, verified on the way.

An object is read whole, verified, and written whole; what is there already is skipped, so a run that was cut short is
continued by running it again. Nothing but names and sizes is kept in memory, and one object a job.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from tplayout.admin.catalog import NO_SECRETS, Secrets
from tplayout.admin.chains import Index, build_index
from tplayout.admin.convert import Report, path_to
from tplayout.admin.namespaces import OpenNamespace, begin_copy
from tplayout.admin.parallel import in_order
from tplayout.admin.transfer import Tally, resealed
from tplayout.admin.work import SIMPLY, Work
from tplayout.errors import ConfigError, FormatError, NotFound
from tplayout.format.keys import namespace_object
from tplayout.storage.base import RESERVED, Store

Place = tuple[bytes, int, int]  # key of a chunk, index of a group, bytes of the object in the source


@dataclass
class Copied:
    """What a copy did, in objects. present: there already; removed: from the source, by a move.

    read: bytes that the copied ones take in the source; nbytes: at the destination, whose codec may be another, which
    a dry run cannot know.
    """

    copied: int = 0
    present: int = 0
    removed: int = 0
    read: int = 0
    nbytes: int = 0
    damaged: dict[str, str] = field(default_factory=dict)

    def add(self, other: Copied) -> None:
        """Count another's too."""
        self.copied += other.copied
        self.present += other.present
        self.removed += other.removed
        self.read += other.read
        self.nbytes += other.nbytes
        self.damaged |= other.damaged

    @property
    def complete(self) -> bool:
        """Whether everything is at the destination now."""
        return not self.damaged


def check_apart(source: Store, target: Store) -> None:
    """ConfigError if both are one store, by whatever names: a move would delete what it has just written.

    Puts a small object into the target for a moment, to see whether it appears in the source.
    """
    if source.url == target.url:
        raise ConfigError(f"source and destination are one store: {source.url}")
    probe = f"{RESERVED}probe/{os.urandom(16).hex()}"
    target.put(probe, b"is this one store?")
    try:
        if source.exists([probe])[0]:
            raise ConfigError(f"{source.url} and {target.url} are one store by two names")
    finally:
        target.delete([probe])


def copy_namespace(
    origin: OpenNamespace,
    target: Store,
    secrets: Secrets = NO_SECRETS,
    keys: Sequence[bytes] | None = None,
    index: Index | None = None,
    work: Work = SIMPLY,
    recheck: bool = False,
    codec: str | None = None,
) -> Copied:
    """Copy a namespace, or the prefixes that end with these chunks. namespace.json is written first.

    recheck: read and verify what is there already, and replace it if it is damaged; else its size must do.
    index: of the namespace, where it is known. codec: that the target must have; None for that which it has, or the
    source's. secrets: of the target, see `begin_copy`. Where the target has other digests, as for a secret that the
    source does not have, what was verified is digested anew. Raises as `begin_namespace`, StorageError.
    """
    opened = begin_copy(origin, target, origin.identity, secrets, codec, work.dry_run)
    there = {info.key: info.size for info in target.list(f"{origin.name}/")}
    if keys is None:
        places = [(name.key, name.group_index, info.size) for name, info in origin.objects()]
    else:
        places = _places(index or build_index(origin), keys)

    def is_there(key: bytes, group: int) -> bool:
        size = there.get(origin.object_name(key, group))
        return size is not None and size in opened.codec.sizes(opened.layout(group))

    def one(place: Place) -> Copied:
        key, group, size = place
        if is_there(key, group) and (work.dry_run or not recheck or _sound(opened, key, group)):
            return Copied(present=1)
        if work.dry_run:
            return Copied(copied=1, read=size, nbytes=size)
        return _copy(origin, opened, place)

    copied = Copied()
    for done, each in enumerate(in_order(one, places, work.jobs), 1):
        copied.add(each)
        work.progress(done, len(places), copied.nbytes)
    return copied


def _copy(origin: OpenNamespace, target: OpenNamespace, place: Place) -> Copied:
    """Copy one object, verified; what was deleted since it was listed counts as nothing."""
    key, group, size = place
    name = origin.object_name(key, group)
    try:
        if target.stored_as != origin.stored_as:
            plain = resealed(origin.read(key, group), origin, target, group)
            return Copied(copied=1, read=size, nbytes=target.write(key, group, plain))
        data = origin.read_stored(key, group)
    except NotFound:
        return Copied()
    except FormatError as error:
        return Copied(damaged={name: str(error)})
    target.store.put(name, data)
    return Copied(copied=1, read=size, nbytes=len(data))


def recode(
    origin: OpenNamespace,
    target: Store,
    codec: str,
    secrets: Secrets = NO_SECRETS,
    keys: Sequence[bytes] | None = None,
    index: Index | None = None,
    work: Work = SIMPLY,
) -> Report:
    """Copy a namespace, or some of its prefixes, into a store that keeps it in another codec, or encrypted with another
    key. See `copy_namespace`.

    What lies behind a gap is copied too, unless prefixes are chosen.
    """
    index = index or build_index(origin)
    copied = copy_namespace(origin, target, secrets, keys, index, work, codec=codec)
    damaged = index.reasons() | copied.damaged
    tally = Tally(copied.copied, copied.present, 0, copied.nbytes, damaged)
    prefixes = sum(1 for _ in index.prefixes()) if keys is None else len(keys)
    return Report(prefixes, tally, namespace=origin.name, bytes_read=copied.read)


def move_namespace(
    origin: OpenNamespace,
    target: Store,
    secrets: Secrets = NO_SECRETS,
    keys: Sequence[bytes] | None = None,
    index: Index | None = None,
    work: Work = SIMPLY,
) -> Copied:
    """Copy, then delete from the source what is sound at the destination; tails first, namespace.json last.

    What prefixes share with others that stay is copied, and stays too. Damaged objects stay. Raises as
    `copy_namespace`, and ConfigError if source and destination are one store.
    """
    index = index or build_index(origin)
    if not work.dry_run:
        check_apart(origin.store, target)
    copied = copy_namespace(origin, target, secrets, keys, index, work, recheck=True)
    copied.damaged = index.reasons() | copied.damaged
    depths = index.depths()
    moved = set(depths) if keys is None else only_of(index, keys)
    order = sorted(moved, key=lambda key: (depths[key], key), reverse=True)
    names = [origin.object_name(key, group) for key in order for group in index.chunks[key].objects]
    names = [name for name in names if name not in copied.damaged]
    copied.removed = len(names)
    if work.dry_run:
        return copied
    for start in range(0, len(names), 500):
        origin.store.delete(names[start : start + 500])
    document = namespace_object(origin.name)
    if keys is None and not any(info.key != document for info in origin.store.list(f"{origin.name}/")):
        origin.store.delete([document])
    return copied


def _places(index: Index, keys: Sequence[bytes]) -> list[Place]:
    """The objects of prefixes, heads first, each once."""
    places = [
        (key, group, info.size)
        for last in keys
        for key in path_to(index, last)
        for group, info in sorted(index.chunks[key].objects.items())
    ]
    return list(dict.fromkeys(places))


def only_of(index: Index, keys: Sequence[bytes]) -> set[bytes]:
    """The chunks of these prefixes that no chunk of another prefix needs."""
    mine = {key for last in keys for key in path_to(index, last)}
    needed: set[bytes] = set()
    for key in index.chunks.keys() - mine:
        while key in index.chunks and key not in needed:
            needed.add(key)
            key = index.chunks[key].parent
    return mine - needed


def _sound(namespace: OpenNamespace, key: bytes, group: int) -> bool:
    try:
        namespace.read(key, group)
    except (FormatError, NotFound):
        return False
    return True
