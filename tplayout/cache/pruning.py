"""In which order chunks go when a store must shrink. Pure: knows chunks, their parents and times, and no store.

Least recently used first. A chunk counts as used when one behind it is, so tails go before heads and no prefix gets
a gap. What lies behind a gap already can serve nobody, and goes before everything else.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from tplayout.format.keys import ROOT


@dataclass(slots=True)
class Chunk:
    """A chunk of one namespace with its objects. names: of the objects; nbytes: of all of them.

    used, written: seconds since the epoch, of the object used or written last; parent: None where nobody can tell.
    stays: must not go. `link` sets what follows: position, in its prefix as far as stored; cut_off: behind a gap.
    """

    key: bytes
    names: list[str] = field(default_factory=list)
    nbytes: int = 0
    used: float = 0.0
    written: float = 0.0
    parent: bytes | None = None
    stays: bool = False
    position: int = 0
    cut_off: bool = False

    def add(self, name: str, nbytes: int, used: float, written: float) -> None:
        """One more object of it."""
        self.names.append(name)
        self.nbytes += nbytes
        self.used = max(self.used, used)
        self.written = max(self.written, written)


def link(chunks: Sequence[Chunk]) -> None:
    """Positions and gaps; then what stays, and when it was used, handed from each chunk to the one before it.

    chunks: all of a namespace.
    """
    by_name = {chunk.key: chunk for chunk in chunks}
    placed: set[bytes] = set()
    for start in chunks:
        path = []
        chunk: Chunk | None = start
        while chunk is not None and chunk.key not in placed:
            path.append(chunk)
            placed.add(chunk.key)
            chunk = by_name.get(chunk.parent or b"")
        for each in reversed(path):
            before = by_name.get(each.parent or b"")
            each.position = before.position + 1 if before else 0
            each.cut_off = before.cut_off if before else each.parent != ROOT
    for chunk in sorted(chunks, key=lambda chunk: chunk.position, reverse=True):
        before = by_name.get(chunk.parent or b"")
        if before is not None:
            before.used = max(before.used, chunk.used)
            before.stays = before.stays or chunk.stays


def victims(chunks: Iterable[Chunk], young: float = float("inf")) -> list[Chunk]:
    """The linked chunks of any namespaces that may go, the first to go first.

    young: a gap before what was written later than this does not count, since it may be about to be filled.
    """
    return sorted(
        (chunk for chunk in chunks if not chunk.stays),
        key=lambda chunk: (not chunk.cut_off or chunk.written > young, chunk.used, -chunk.position, chunk.key),
    )
