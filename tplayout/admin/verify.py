"""Verifying a store: every object, in parallel, and what lies around them. Reads only; see quarantine.py for moving.

Damage is what is not what its name says. Orphan temporaries and chunks behind a gap are told too, but a store with
them is sound: nothing wrong can be read from it.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from itertools import groupby
from typing import Any

from tplayout.admin.catalog import NO_SECRETS, Catalog, Namespace, Secrets, Stored, by_key, scan
from tplayout.admin.check import Checker, Kind, Verdict
from tplayout.admin.journal import Journal
from tplayout.admin.parallel import in_order
from tplayout.admin.prefixes import unreachable
from tplayout.admin.progress import Progress, silent
from tplayout.admin.rate import RateLimit
from tplayout.errors import ConfigError, Reason
from tplayout.format.keys import namespace_object, object_name
from tplayout.storage.base import TEMPORARY_AGE_S, Store

NOTES = (Kind.TEMPORARY, Kind.UNREACHABLE)  # a store with these is sound


@dataclass(frozen=True)
class Finding:
    """Something that is not as it should be. name: of the object; fix: the command that mends it.

    reason: a format reason, a storage error's kind, or the kind once more. objects: names, where several are meant.
    by_hand: no verb of the store takes it.
    """

    kind: Kind
    name: str
    reason: str
    detail: str
    fix: str
    nbytes: int = 0
    home: str | None = None
    objects: tuple[str, ...] = ()
    by_hand: bool = False

    @property
    def is_damage(self) -> bool:
        """Whether the store is not what it is asked to be; False for what is only untidy."""
        return self.kind not in NOTES


@dataclass
class Report:
    """What a verification found. checked, nbytes: objects and bytes read in this run and those that it resumes.

    sealed: of those checked, encrypted ones of which no more than the stored bytes was compared, for want of the key.
    """

    namespaces: int = 0
    checked: int = 0
    nbytes: int = 0
    skipped: int = 0
    sealed: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def damage(self) -> list[Finding]:
        """What makes the answer "no"."""
        return [finding for finding in self.findings if finding.is_damage]

    @property
    def notes(self) -> list[Finding]:
        """What is untidy and harmless."""
        return [finding for finding in self.findings if not finding.is_damage]


_Sound = dict[bytes, tuple[bytes, frozenset[int]]]  # key -> parent, groups that are sound


@dataclass
class _Piece:
    """Result of one fan directory of a namespace. parents: hex key -> (hex parent, groups that are sound)."""

    checked: int = 0
    nbytes: int = 0
    sealed: int = 0
    faults: list[dict[str, Any]] = field(default_factory=list)
    parents: dict[str, tuple[str, list[int]]] = field(default_factory=dict)


def verify_store(
    store: Store,
    *,
    secrets: Secrets = NO_SECRETS,
    deep: bool = True,
    namespace: str | None = None,
    only: Collection[str] = (),
    jobs: int = 8,
    max_rate: float | None = None,
    temporary_age: float = TEMPORARY_AGE_S,
    journal_path: str | None = None,
    progress: Progress = silent,
) -> Report:
    """Check every object of a store, of a namespace (its first hex digits), or those that `only` names.

    deep: read everything; else sizes, headers and keys. max_rate: bytes a second. journal_path: a local file that lets
    an interrupted run go on; it is removed at the end. Without its key what is encrypted is compared as it is stored.
    Raises StorageError if the store fails, ConfigError for a missing secret, another key, an unknown object in `only`,
    or another run's journal.
    """
    catalog = scan(store, namespace)
    checker = Checker(store, catalog, secrets, deep, RateLimit(max_rate))
    report = Report(namespaces=len(catalog.namespaces))
    if only:
        _restrict(catalog, only)
    task = {"url": store.url, "deep": deep, "namespace": namespace, "only": sorted(only)}
    key = secrets.encryption_key
    task |= {} if key is None else {"encryption_key": key.id}
    journal = None if journal_path is None else Journal.open(journal_path, task)
    try:
        for space in catalog.namespaces.values():
            _document_findings(store, space, report)
            report.findings.extend(_unprotected(store, space, secrets))
        sound: dict[str, _Sound] = {name: {} for name in catalog.namespaces}
        for piece_name, piece in _pieces(catalog, checker, journal, jobs, progress):
            _add(store, piece, sound[piece_name.partition("/")[0]], report)
        report.findings.extend(_foreign(store, catalog))
        if not only:
            if namespace is None:
                report.findings.extend(_strangers(store))
            below = "" if namespace is None else f"{next(iter(catalog.namespaces))}/"
            report.findings.extend(_temporaries(store, temporary_age, below))
            report.findings.extend(_gaps(store, catalog, sound, report))
    except BaseException:
        if journal is not None:
            journal.close()
        raise
    if journal is not None:
        journal.finish()
    return report


def fix_of(store: Store, kind: Kind, names: Iterable[str] = ()) -> str:
    """The command that mends a finding."""
    if kind is Kind.UNREADABLE:
        return shlex.join(["tplayout", "doctor", store.url])
    command = ["tplayout", "verify", store.url, "--quarantine"]
    if kind in (Kind.TEMPORARY, Kind.UNREACHABLE):
        command += ["--also", kind.value]
    for name in names:
        command += ["--object", name]
    return shlex.join(command)


def _restrict(catalog: Catalog, only: Collection[str]) -> None:
    """Leave the named objects in the catalog. A document is checked with its namespace anyway."""
    wanted = set(only)
    known = {info.key for info in catalog.foreign}
    for space in catalog.namespaces.values():
        known.add(namespace_object(space.name))
        known.update(stored.name for stored in space.objects)
    for name in sorted(wanted - known):
        raise ConfigError(f"--object {name}: no such object; `tplayout verify` prints the names")
    for space in list(catalog.namespaces.values()):
        space.objects = [stored for stored in space.objects if stored.name in wanted]
        if not space.objects and namespace_object(space.name) not in wanted:
            del catalog.namespaces[space.name]
    catalog.foreign = [info for info in catalog.foreign if info.key in wanted]


def _pieces(
    catalog: Catalog, checker: Checker, journal: Journal | None, jobs: int, progress: Progress
) -> Iterator[tuple[str, _Piece]]:
    """(namespace/fan, result) of every fan directory, those that the journal has included."""
    done = {} if journal is None else journal.done
    known = [stored for space in catalog.namespaces.values() if space.document for stored in space.objects]
    total, finished, moved = len(known), 0, 0
    for name, result in done.items():
        piece = _piece_of(name, result)
        finished, moved = finished + piece.checked, moved + piece.nbytes
        if name.partition("/")[0] in catalog.namespaces:
            yield name, piece
    todo = [stored for stored in known if _fan(stored) not in done]
    verdicts = in_order(checker.object, todo, jobs)
    for name, objects in groupby(todo, key=_fan):
        piece = _Piece()
        for stored in objects:
            verdict = next(verdicts)
            _record(piece, stored, verdict)
            finished, moved = finished + 1, moved + verdict.nbytes
            progress(finished, max(total, finished), moved)
        if journal is not None:
            journal.add(name, asdict(piece))
        yield name, piece


def _piece_of(name: str, result: Any) -> _Piece:
    """A piece that the journal has; ConfigError if it is none."""
    try:
        return _Piece(**result)
    except TypeError:
        raise ConfigError(f"the journal does not say what was found in {name}: remove it and begin anew") from None


def _fan(stored: Stored) -> str:
    return stored.name.rpartition("/")[0]


def _record(piece: _Piece, stored: Stored, verdict: Verdict) -> None:
    piece.checked += 1
    piece.nbytes += verdict.nbytes
    piece.sealed += verdict.sealed
    if verdict.fault is not None:
        piece.faults.append({**asdict(verdict.fault), "name": stored.name, "nbytes": stored.size})
    elif verdict.chunk is not None:
        _, groups = piece.parents.setdefault(stored.key.hex(), (verdict.chunk.parent.hex(), []))
        groups.append(stored.group)


def _add(store: Store, piece: _Piece, sound: _Sound, report: Report) -> None:
    """Take a piece's result into the report, and its sound objects into those of the namespace."""
    report.checked += piece.checked
    report.nbytes += piece.nbytes
    report.sealed += piece.sealed
    for fault in piece.faults:
        name, kind = fault["name"], Kind(fault["kind"])
        reason, detail, nbytes = fault["reason"], fault["detail"], fault["nbytes"]
        fix = fix_of(store, kind, [name])
        report.findings.append(Finding(kind, name, reason, detail, fix, nbytes, fault["home"]))
    for key, (parent, groups) in piece.parents.items():
        sound[bytes.fromhex(key)] = (bytes.fromhex(parent), frozenset(groups))


def _document_findings(store: Store, space: Namespace, report: Report) -> None:
    fault = space.fault
    if fault is None:
        return
    name, count = namespace_object(space.name), len(space.objects)
    report.skipped += count
    unchecked = f"; its {count} objects could not be checked" if count else ""
    if space.info is None:
        detail = f"namespace.json is missing{unchecked}: start a server of this model once, it writes it again"
        report.findings.append(Finding(Kind.UNIDENTIFIED, name, Kind.UNIDENTIFIED, detail, _start_server(store)))
        return
    kind = Kind.MISNAMED if fault.reason is Reason.WRONG_NAMESPACE else Kind.DAMAGED
    detail = f"{fault.detail}{unchecked}; a server of this model writes it again"
    report.findings.append(Finding(kind, name, fault.reason, detail, fix_of(store, kind, [name]), space.info.size))


def _unprotected(store: Store, space: Namespace, secrets: Secrets) -> Iterator[Finding]:
    """What a namespace does not have of that which is given: nothing of it is damaged, and it stays where it is."""
    if space.document is None:
        return
    facts, name, count = space.document.storage, namespace_object(space.name), len(space.objects)
    copy = ["tplayout", "cp", store.url, "NEW-URL"]
    if secrets.secret is not None and facts.key_id is None:
        detail = (
            f"not authenticated: written without a secret, so that its {count} objects may be forged, and servers with "
            "a secret refuse them; they were checked against damage. If they are to be trusted, a copy gets the secret"
        )
        fix = shlex.join([*copy, "--secret-key-file", "FILE"])
        yield Finding(Kind.UNAUTHENTICATED, name, Reason.WRONG_SECRET, detail, fix)
    if secrets.encryption_key is not None and facts.encryption_key_id is None:
        detail = (
            f"not encrypted: its {count} objects are in clear (codec {facts.codec}), and servers with a key miss them; "
            "they were checked against damage. A copy is encrypted"
        )
        fix = shlex.join([*copy, "--encryption-key-file", "FILE"])
        yield Finding(Kind.UNENCRYPTED, name, Reason.WRONG_ENCRYPTION_KEY, detail, fix)


def _start_server(store: Store) -> str:
    extra = f'{{"url": "{store.url}"}}'
    config = f'{{"kv_connector": "TPLayoutConnector", "kv_role": "kv_both", "kv_connector_extra_config": {extra}}}'
    return shlex.join(["vllm", "serve", "MODEL", "--kv-transfer-config", config])


def _foreign(store: Store, catalog: Catalog) -> Iterator[Finding]:
    for info in catalog.foreign:
        fix = fix_of(store, Kind.FOREIGN, [info.key])
        yield Finding(Kind.FOREIGN, info.key, Reason.BAD_NAME, "no name that tplayout writes", fix, info.size)


def _strangers(store: Store) -> Iterator[Finding]:
    for info in store.strangers():
        name = os.fsencode(info.key).decode("utf-8", "replace")
        detail = "a name, or a kind of file, that no store verb takes: move it by hand"
        fix = _by_hand(store, name)
        yield Finding(Kind.FOREIGN, name, Reason.BAD_NAME, detail, fix, info.size, by_hand=True)


def _by_hand(store: Store, name: str) -> str:
    """The command that takes away what no key can name."""
    if store.url.startswith("file://"):
        return shlex.join(["rm", "--", f"{store.url.removeprefix('file://')}/{name}"])
    if store.url.startswith("s3://"):
        return shlex.join(["aws", "s3", "rm", f"{store.url}/{name}"])
    return shlex.join(
        ["python", "-c", f"import fsspec; fs, path = fsspec.url_to_fs({f'{store.url}/{name}'!r}); fs.rm(path)"]
    )


def _temporaries(store: Store, least_age: float, below: str) -> Iterator[Finding]:
    now = time.time()
    for info in store.temporaries():
        if not info.key.startswith(below):
            continue
        if info.modified is not None and now - info.modified >= least_age:
            detail = f"left by a writer that died {(now - info.modified) / 3600:.0f} h ago"
            fix = fix_of(store, Kind.TEMPORARY)
            yield Finding(Kind.TEMPORARY, info.key, Kind.TEMPORARY, detail, fix, info.size)


def _gaps(store: Store, catalog: Catalog, sound: Mapping[str, _Sound], report: Report) -> Iterator[Finding]:
    """One finding for each gap: what lies behind it."""
    faulty = {finding.name for finding in report.findings}
    for space in catalog.namespaces.values():
        if space.document is None:
            continue
        geometry = space.document.identity.geometry
        parents = {key: parent for key, (parent, _) in sound[space.name].items()}
        groups = {key: found for key, (_, found) in sound[space.name].items()}
        chunks = by_key(stored for stored in space.objects if stored.name not in faulty)
        for gap, keys in sorted(unreachable(geometry, groups, parents).items()):
            behind = [stored for key in keys for stored in chunks.get(key, ())]
            if not behind:
                continue
            names = tuple(sorted(stored.name for stored in behind))
            why = "lacks a group" if gap in groups else _why(space.name, gap, faulty, len(geometry.groups))
            detail = (
                f"{len(names)} objects wait for chunk {gap.hex()}, which {why}; when the prompt is served again, "
                "it is stored again and they are of use"
            )
            fix = fix_of(store, Kind.UNREACHABLE)
            nbytes = sum(stored.size for stored in behind)
            yield Finding(Kind.UNREACHABLE, names[0], Kind.UNREACHABLE, detail, fix, nbytes, None, names)


def _why(namespace: str, key: bytes, faulty: Collection[str], groups: int) -> str:
    damaged = any(object_name(namespace, key, group) in faulty for group in range(groups))
    return "is damaged" if damaged else "is missing"
