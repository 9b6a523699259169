"""How far a prefix can be served from what is stored. Knows no store: it asks about (chunk, group) pairs.

Serving n chunks takes every chunk of the groups that attend to everything, and of each window group the chunks
that hold what the next token attends to; older ones may be missing.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from tplayout.format.geometry import Geometry, window_start
from tplayout.format.keys import ChunkId

Place = tuple[int, int]  # index of a chunk in its prefix, index of a group

_FIRST_BATCH = 16
_MOST_BATCH = 1024


@dataclass(frozen=True)
class Prefix:
    """The longest part of a prompt that can be served. tokens: how many; chunks: theirs, in order."""

    tokens: int
    chunks: tuple[ChunkId, ...]


def needed(geometry: Geometry, count: int) -> Iterator[Place]:
    """The objects that serve `count` chunks, from the first chunk on."""
    starts = _starts(geometry, count)
    for chunk in range(count):
        for group in range(len(geometry.groups)):
            if chunk >= starts.get(group, 0):
                yield chunk, group


def servable(
    geometry: Geometry,
    count: int,
    exist: Callable[[Sequence[Place]], Sequence[bool]],
    sound: Callable[[Place], bool] | None = None,
) -> int:
    """How many of the first `count` chunks can be served.

    exist: which objects are there; each is asked about at most once, in batches that grow. sound: whether an
    object is intact; asked once about each that counts, and a damaged one is as good as missing.
    """
    known: dict[Place, bool] = {}

    def ask(places: Iterable[Place]) -> None:
        new = [place for place in places if place not in known]
        if new:
            known.update(zip(new, exist(new), strict=True))

    checked: set[Place] = set()
    while True:
        count = _without_gap(geometry, count, known, ask)
        count = _with_windows(geometry, count, known, ask)
        if sound is None:
            return count
        for place in needed(geometry, count):
            if place not in checked and not sound(place):
                known[place] = False
                break
            checked.add(place)
        else:
            return count


def _starts(geometry: Geometry, count: int) -> dict[int, int]:
    """Window group -> the first of its chunks that serve `count` chunks."""
    size = geometry.chunk_tokens
    return {
        index: window_start(count * size, group.window) // size
        for index, group in enumerate(geometry.groups)
        if group.window is not None
    }


def _without_gap(
    geometry: Geometry, count: int, known: dict[Place, bool], ask: Callable[[Iterable[Place]], None]
) -> int:
    """Chunks before the first that lacks a group which is needed everywhere."""
    groups = [index for index, group in enumerate(geometry.groups) if group.window is None]
    start, batch = 0, _FIRST_BATCH
    while groups and start < count:
        stop = min(count, start + batch)
        ask((chunk, group) for chunk in range(start, stop) for group in groups)
        for chunk in range(start, stop):
            if not all(known[chunk, group] for group in groups):
                return chunk
        start, batch = stop, min(2 * batch, _MOST_BATCH)
    return count


def _with_windows(
    geometry: Geometry, count: int, known: dict[Place, bool], ask: Callable[[Iterable[Place]], None]
) -> int:
    """The largest number of chunks up to `count` of which all windows at the end are there."""
    low, batch = count, 1
    while count:
        starts = _starts(geometry, count)
        first = min(starts.values(), default=count)
        if first < low:
            bottom = max(0, min(low - batch, first))
            ask((chunk, group) for chunk in range(bottom, low) for group in starts)
            low, batch = bottom, min(2 * (low - bottom), _MOST_BATCH)
        gaps = [chunk for group, start in starts.items() for chunk in range(start, count) if not known[chunk, group]]
        if not gaps:
            return count
        count = max(gaps)  # every larger number would need the missing one too
    return 0
