"""Moving what verification found out of the way: to `tplayout-quarantine/` in the same store, where no server looks.

A sound object under a wrong name goes to its right name, if nothing is there.

An object is looked at once more before it is moved: a server may have stored a sound one meanwhile. The copy is
complete before the original is deleted, so that an interruption leaves two and never none.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tplayout.admin.catalog import NO_SECRETS, QUARANTINE, Namespace, Secrets, read_document
from tplayout.admin.check import Kind
from tplayout.admin.parallel import are_there
from tplayout.admin.progress import Progress, silent
from tplayout.admin.verify import Finding, verify_store
from tplayout.errors import NotFound, StorageError, StorageErrorKind
from tplayout.storage.base import Store

ALWAYS = (Kind.DAMAGED, Kind.TRUNCATED, Kind.MISNAMED)
ON_REQUEST = (Kind.FOREIGN, Kind.TEMPORARY, Kind.UNREACHABLE)
_LEAST = 64 << 20  # bytes that are moved through memory whatever the geometry


@dataclass(frozen=True)
class Move:
    """What was done with one object. to: its new name; None if it was deleted (temporaries) or left, see why."""

    name: str
    to: str | None
    nbytes: int
    why: str = ""

    @property
    def left(self) -> bool:
        """True if it is where it was."""
        return bool(self.why)


def plan(findings: Iterable[Finding], also: Collection[Kind] = ()) -> list[Finding]:
    """The findings that a quarantine would act on. also: kinds of ON_REQUEST."""
    chosen = [finding for finding in findings if finding.kind in ALWAYS or finding.kind in also]
    return [finding for finding in chosen if not finding.by_hand]


def quarantine(
    store: Store,
    findings: Iterable[Finding],
    *,
    secrets: Secrets = NO_SECRETS,
    deep: bool = True,
    jobs: int = 8,
    progress: Progress = silent,
) -> list[Move]:
    """Move what the findings name, temporaries are deleted. Raises StorageError when the store fails.

    secrets, deep: as they were in the verification that found them.
    """
    chosen = list(findings)
    again = [finding.name for finding in chosen if finding.kind in ALWAYS]
    fresh = _still_faulty(store, again, secrets, deep, jobs)
    most = _most_bytes(store, fresh)
    moves: list[Move] = []
    names = sum(len(_names(finding)) for finding in chosen)
    for finding in chosen:
        for name, nbytes in _names(finding):
            if finding.kind is Kind.TEMPORARY:
                store.remove_temporaries([name])
                moves.append(Move(name, None, nbytes))
            elif finding.kind in ALWAYS and name not in fresh:
                moves.append(Move(name, None, nbytes, "it is sound now, or gone"))
            else:
                moves.append(_move(store, name, nbytes, most))
            progress(len(moves), names, sum(move.nbytes for move in moves))
    homes = {finding.name: finding.home for finding in fresh.values() if finding.home is not None}
    return [_home(store, move, homes[move.name]) if move.name in homes and move.to else move for move in moves]


def _home(store: Store, move: Move, home: str) -> Move:
    """Take a sound object out of quarantine to the name that it should have, unless that is taken."""
    if move.to is None or store.exists([home])[0]:
        return move
    store.put(home, store.get(move.to))
    store.delete([move.to])
    return Move(move.name, home, move.nbytes)


def _names(finding: Finding) -> list[tuple[str, int]]:
    each = finding.nbytes // len(finding.objects) if finding.objects else 0
    return [(name, each) for name in finding.objects] or [(finding.name, finding.nbytes)]


def _most_bytes(store: Store, names: Iterable[str]) -> int:
    """What one object may have to be moved: twice what the geometry of any of these objects' namespaces allows."""
    most = _LEAST
    for name in {name.partition("/")[0] for name in names}:
        namespace = Namespace(name)
        if read_document(store, namespace) and namespace.document is not None:
            most = max(most, 2 * namespace.most_bytes())
    return most


def _still_faulty(
    store: Store,
    names: Sequence[str],
    secrets: Secrets,
    deep: bool,
    jobs: int,
) -> dict[str, Finding]:
    there = [name for name, found in zip(names, are_there(store, names), strict=True) if found]
    if not there:
        return {}
    report = verify_store(store, secrets=secrets, deep=deep, only=there, jobs=jobs)
    return {finding.name: finding for finding in report.findings if finding.kind in ALWAYS}


def _move(store: Store, name: str, nbytes: int, most: int) -> Move:
    to = f"{QUARANTINE}/{name}"
    try:
        data = store.get(name, max_bytes=most)
    except NotFound:
        return Move(name, None, nbytes, "it is gone")
    except StorageError as error:
        if error.kind is not StorageErrorKind.TOO_LARGE:
            raise
        return Move(name, None, nbytes, f"it has more than {most} bytes: move it by hand")
    store.put(to, data)
    store.delete([name])
    return Move(name, to, len(data))
