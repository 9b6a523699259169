"""Prefixes as one portable file: a plain tar archive of a namespace's document and the objects, as a store names them.

`tar tf` lists it and `tar xf` makes a store of it. Members follow one another as they are read in a prefix; dates,
owners and modes are fixed, so the same prefixes give the same file. Reading is strict: nothing but such members.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tplayout.admin.catalog import NO_SECRETS, Secrets
from tplayout.admin.chains import Index
from tplayout.admin.convert import path_to
from tplayout.admin.local_files import NewFile, ReadFile, os_errors
from tplayout.admin.namespaces import OpenNamespace, begin_namespace, unwritten
from tplayout.admin.parallel import in_order
from tplayout.admin.transfer import resealed
from tplayout.admin.work import SIMPLY, Work
from tplayout.errors import FormatError, NotFound, Reason, Unavailable
from tplayout.format.chunk import Buffer
from tplayout.format.identity import MAX_DOCUMENT_BYTES, NamespaceDocument, parse_namespace_document
from tplayout.format.keys import ObjectName, namespace_object, parse_object_name
from tplayout.storage.base import Store

_BLOCK = tarfile.BLOCKSIZE


@dataclass
class Bundled:
    """What was written to or read from a file. prefixes: of an export; present: objects that the store had.

    keyed: whether the digests of what was read need a secret.
    """

    namespace: str = ""
    prefixes: int = 0
    objects: int = 0
    present: int = 0
    nbytes: int = 0
    keyed: bool = False
    damaged: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class _Member:
    name: str
    start: int
    size: int


def export_prefixes(
    index: Index,
    keys: Sequence[bytes] | None,
    file: Path,
    work: Work = SIMPLY,
) -> Bundled:
    """Write prefixes, verified, to a file that appears when it is complete. keys: of the last chunks; None for all.

    A job holds up to three objects.
    Raises FormatError that names a damaged object: a bundle is whole or is not written. NotFound for a prefix with a
    gap, StorageError.
    """
    origin = index.namespace
    paths = list(index.prefixes()) if keys is None else [path_to(index, key) for key in keys]
    keys_in_order = dict.fromkeys(key for path in paths for key in path)
    places = [
        (key, group, info.size) for key in keys_in_order for group, info in sorted(index.chunks[key].objects.items())
    ]
    if not places:
        raise NotFound(f"{origin.store.url}: namespace {origin.name} holds no prefix to export")
    document = origin.document.to_bytes()
    sizes = [len(document), *(size for _, _, size in places)]
    done = Bundled(origin.name, len(paths), len(places), 0, sum(map(_padded, sizes)) + 2 * _BLOCK)
    if work.dry_run:
        return done
    with os_errors():
        new = NewFile(file, done.nbytes)
    try:
        with os_errors():
            at = _write(new, 0, namespace_object(origin.name), document)

        def one(place: tuple[bytes, int, int]) -> tuple[str, Buffer]:
            key, group, size = place
            name = origin.object_name(key, group)
            data = origin.read_stored(key, group)
            if len(data) != size:  # sound, and packed by another version of a library since it was listed
                raise Unavailable(f"{origin.store.url}: {name} was replaced while it was exported: run it again")
            return name, data

        for count, (name, data) in enumerate(in_order(one, places, work.jobs), 1):
            with os_errors():
                at = _write(new, at, name, data)
            work.progress(count, len(places), at)
        with os_errors():
            new.publish()
    finally:
        new.discard()
    return done


def import_bundle(file: Path, store: Store, secrets: Secrets = NO_SECRETS, work: Work = SIMPLY) -> Bundled:
    """Put a file's objects into a store, verified; what the store has with the right size is skipped.

    secrets: of the file and of the store. Damaged objects are named and left out. Raises FormatError for what is no
    bundle, as `begin_namespace`, StorageError.
    """
    with os_errors():
        opened = ReadFile(file)
    with opened:
        members = list(read_members(opened))
        document = _document(opened, members)
        inside, facts = unwritten(store, document, secrets), document.storage
        target = begin_namespace(store, document.identity, document.model, secrets, None, work.dry_run, facts)
        done = Bundled(target.name, keyed=facts.key_id is not None)
        there = {info.key: info.size for info in store.list(f"{target.name}/")}

        def one(member: _Member) -> Bundled:
            try:
                name = _object_name(member, target)
                size = there.get(member.name)
                if size is not None and size in target.codec.sizes(target.layout(name.group_index)):
                    return Bundled(present=1)
                return Bundled(objects=1, nbytes=_put(opened, member, name, inside, None if work.dry_run else target))
            except FormatError as error:
                return Bundled(damaged={member.name: str(error.at(f"{opened.path}: {member.name}"))})

        for count, each in enumerate(in_order(one, members[1:], work.jobs), 1):
            done.objects += each.objects
            done.present += each.present
            done.nbytes += each.nbytes
            done.damaged |= each.damaged
            work.progress(count, len(members) - 1, done.nbytes)
    return done


def _put(
    opened: ReadFile, member: _Member, name: ObjectName, inside: OpenNamespace, target: OpenNamespace | None
) -> int:
    """Verify one member's object, and store it if there is a target; its bytes there. Raises FormatError.

    inside: the namespace as the file has it, which may be another way than the target's.
    """
    sizes = inside.codec.sizes(inside.layout(name.group_index))
    if member.size not in sizes:
        reason = Reason.TRUNCATED if member.size < sizes.start else Reason.TRAILING
        raise FormatError(reason, f"{member.size} bytes, must be {_span(sizes)}")
    data = opened.read(member.start, member.size)
    plain = inside.verified(data, name.key, name.group_index)
    if target is None:
        return member.size
    if target.stored_as == inside.stored_as:
        target.store.put(member.name, data)
        return member.size
    return target.write(name.key, name.group_index, resealed(plain, inside, target, name.group_index))


def _span(sizes: range) -> str:
    return str(sizes.start) if len(sizes) == 1 else f"{sizes.start} to {sizes.stop - 1}"


def _object_name(member: _Member, target: OpenNamespace) -> ObjectName:
    name = parse_object_name(member.name)
    if name.namespace != target.name:
        raise FormatError(Reason.WRONG_NAMESPACE, f"the file is of namespace {target.name}", member.name)
    if name.group_index >= len(target.identity.geometry.groups):
        raise FormatError(Reason.WRONG_GROUP, "the geometry has no such group", member.name)
    return name


def _document(opened: ReadFile, members: Sequence[_Member]) -> NamespaceDocument:
    """The document, which comes first and gives every object its meaning."""
    where = str(opened.path)
    directory, _, rest = members[0].name.partition("/") if members else ("", "", "")
    if rest != "namespace.json":
        raise FormatError(Reason.BAD_NAMESPACE, "the first member must be <namespace>/namespace.json", where)
    if members[0].size > MAX_DOCUMENT_BYTES:
        raise FormatError(Reason.TOO_LARGE, f"namespace.json of {members[0].size} bytes", where)
    try:
        return parse_namespace_document(opened.read(members[0].start, members[0].size), directory)
    except FormatError as error:
        raise error.at(f"{where}: {members[0].name}") from None


def read_members(opened: ReadFile) -> Iterator[_Member]:
    """Name, place and size of every member. Raises FormatError for another kind of archive, or an unfinished one."""
    at = 0
    while True:
        block = opened.read(at, min(_BLOCK, max(0, opened.size - at)))
        if len(block) < _BLOCK and at == 0:
            detail = f"no tplayout bundle: {opened.size} bytes"
            raise FormatError(Reason.NOT_A_CHUNK, detail, str(opened.path))
        if len(block) < _BLOCK:
            raise FormatError(Reason.TRUNCATED, f"no end of archive at byte {at}", str(opened.path))
        if block == bytes(_BLOCK):
            return
        try:
            info = tarfile.TarInfo.frombuf(block, "ascii", "strict")
        except (tarfile.HeaderError, UnicodeDecodeError) as error:
            detail = f"no tplayout bundle: at byte {at}: {error}"
            raise FormatError(Reason.NOT_A_CHUNK, detail, str(opened.path)) from None
        if info.type != tarfile.REGTYPE or info.size < 0:
            detail = f"member {info.name[:100]!r} is not a plain file"
            raise FormatError(Reason.BAD_NAME, detail, str(opened.path))
        if at + _padded(info.size) > opened.size:
            raise FormatError(Reason.TRUNCATED, f"{info.name[:200]} ends behind the file", str(opened.path))
        yield _Member(info.name, at + _BLOCK, info.size)
        at += _padded(info.size)


def _padded(size: int) -> int:
    """Bytes of a member with its header."""
    return _BLOCK + -(-size // _BLOCK) * _BLOCK


def _write(new: NewFile, at: int, name: str, data: Buffer) -> int:
    """Write a member at an offset; the offset behind it."""
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(data), 0o600
    new.write(at, info.tobuf(tarfile.USTAR_FORMAT, "ascii", "strict"))
    new.write(at + _BLOCK, data)
    return at + _padded(len(data))
