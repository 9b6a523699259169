"""Copying and moving chunks between stores, verified on the way.

An object is read whole, verified, and written whole; what is there already is skipped, so a run that was cut short is
continued by running it again. Nothing but names and sizes is kept in memory, and one object a job.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tplayout.admin.catalog import RESERVED
from tplayout.admin.chains import Index, build_index
from tplayout.admin.convert import path_to
from tplayout.admin.namespaces import OpenNamespace, begin_copy, check_same_storage
from tplayout.admin.parallel import in_order
from tplayout.admin.progress import Progress, silent
from tplayout.errors import ConfigError, FormatError, NotFound
from tplayout.format.keys import namespace_object
from tplayout.storage.base import Store

Place = tuple[bytes, int]  # key of a chunk, index of a group


@dataclass
class Copied:
    """What a copy did, in objects. present: there already; removed: from the source, by a move."""

    copied: int = 0
    present: int = 0
    removed: int = 0
    nbytes: int = 0
    damaged: dict[str, str] = field(default_factory=dict)

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
    secret: bytes | None = None,
    keys: Sequence[bytes] | None = None,
    index: Index | None = None,
    jobs: int = 1,
    progress: Progress = silent,
    dry_run: bool = False,
    recheck: bool = False,
) -> Copied:
    """Copy a namespace, or the prefixes that end with these chunks. namespace.json is written first.

    recheck: read and verify what is there already, and replace it if it is damaged; else its size must do.
    index: of the namespace, needed for keys. Raises NamespaceMismatch if the target stores the namespace with another
    digest or secret; StorageError.
    """
    check_same_storage(target, origin.document)
    there = {info.key: info.size for info in target.list(f"{origin.name}/")}
    if keys is None:
        places: Iterable[Place] = ((name.key, name.group_index) for name, _ in origin.objects())
    else:
        places = _places(index or build_index(origin), keys)
    copied = Copied()
    if dry_run:
        for key, group in places:
            layout = origin.layout(group)
            if there.get(origin.object_name(key, group)) == layout.nbytes:
                copied.present += 1
            else:
                copied.copied, copied.nbytes = copied.copied + 1, copied.nbytes + layout.nbytes
        return copied
    opened = begin_copy(target, origin.document, secret)

    def one(place: Place) -> Copied:
        key, group = place
        name = origin.object_name(key, group)
        size = origin.layout(group).nbytes
        if there.get(name) == size and (not recheck or _sound(opened, key, group)):
            return Copied(present=1)
        try:
            data = origin.read(key, group)
        except NotFound:  # deleted since it was listed
            return Copied()
        except FormatError as error:
            return Copied(damaged={name: str(error)})
        target.put(name, data)
        return Copied(copied=1, nbytes=size)

    for done, each in enumerate(in_order(one, places, jobs), 1):
        copied.copied += each.copied
        copied.present += each.present
        copied.nbytes += each.nbytes
        copied.damaged |= each.damaged
        progress(done, None, copied.nbytes)
    return copied


def move_namespace(
    origin: OpenNamespace,
    target: Store,
    secret: bytes | None = None,
    keys: Sequence[bytes] | None = None,
    jobs: int = 1,
    progress: Progress = silent,
    dry_run: bool = False,
) -> Copied:
    """Copy, then delete from the source what is sound at the destination; tails first, namespace.json last.

    What prefixes share with others that stay is copied, and stays too. Damaged objects stay. Raises as
    `copy_namespace`, and ConfigError if source and destination are one store.
    """
    index = build_index(origin)
    if not dry_run:
        check_apart(origin.store, target)
    copied = copy_namespace(origin, target, secret, keys, index, jobs, progress, dry_run, recheck=True)
    copied.damaged = {**{name: str(error) for name, error in index.damaged.items()}, **copied.damaged}
    depths = index.depths()
    moved = set(depths) if keys is None else _only_of(index, keys)
    order = sorted(moved, key=lambda key: (depths[key], key), reverse=True)
    names = [origin.object_name(key, group) for key in order for group in index.chunks[key].objects]
    names = [name for name in names if name not in copied.damaged]
    copied.removed = len(names)
    if dry_run:
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
        (key, group) for last in keys for key in path_to(index, last) for group in sorted(index.chunks[key].objects)
    ]
    return list(dict.fromkeys(places))


def _only_of(index: Index, keys: Sequence[bytes]) -> set[bytes]:
    """The chunks of these prefixes that no chunk of another prefix needs."""
    mine = {key for last in keys for key in path_to(index, last)}
    for key in index.chunks.keys() - mine:
        while key in index.chunks:
            mine.discard(key)
            key = index.chunks[key].parent
    return mine


def _sound(namespace: OpenNamespace, key: bytes, group: int) -> bool:
    try:
        namespace.read(key, group)
    except (FormatError, NotFound):
        return False
    return True
