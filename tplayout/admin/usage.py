"""What takes the bytes of a store: namespaces, prefixes, ages."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass

from tplayout.admin.catalog import Catalog, Namespace, Stored
from tplayout.admin.prefixes import Links, Segment, tree

# Upper ends of the buckets in seconds, with the names that the JSON has.
AGES = ((3600, "1h"), (86400, "1d"), (7 * 86400, "7d"), (30 * 86400, "30d"), (365 * 86400, "1y"))
OLDER, UNKNOWN = "older", "unknown"


@dataclass
class Share:
    """A part of a store. newest: seconds since the epoch, None if the store does not say."""

    name: str
    objects: int
    nbytes: int
    newest: float | None = None


@dataclass
class PrefixShare:
    """All prefixes that begin with one chunk. first: its key; tokens: of the longest; start is None behind a gap."""

    namespace: str
    first: bytes
    start: int | None
    chunks: int
    tokens: int
    nbytes: int
    newest: float | None


def by_namespace(catalog: Catalog) -> list[Share]:
    """The namespaces and then what is none ("foreign", "tools": quarantine and the like), largest first."""
    shares = [
        Share(space.name, len(space.objects), space.nbytes, space.times()[1]) for space in catalog.namespaces.values()
    ]
    shares.sort(key=lambda share: -share.nbytes)
    for name, infos in (("foreign", catalog.foreign), ("tools", catalog.tools)):
        if infos:
            shares.append(Share(name, len(infos), sum(info.size for info in infos)))
    return shares


def by_age(objects: Iterable[Stored], now: float | None = None) -> list[Share]:
    """Bytes of objects younger than each of AGES (and not of the one before), then older, then unknown."""
    now = time.time() if now is None else now
    shares = {name: Share(name, 0, 0) for name in (*(name for _, name in AGES), OLDER, UNKNOWN)}
    for stored in objects:
        share = shares[_bucket(stored.modified, now)]
        share.objects += 1
        share.nbytes += stored.size
    if not shares[UNKNOWN].objects:
        del shares[UNKNOWN]
    return list(shares.values())


def by_prefix(namespace: Namespace, links: Links) -> list[PrefixShare]:
    """The first chunks of a namespace's prefixes with all that continues them, largest first."""
    geometry = namespace.known().identity.geometry
    shares: list[PrefixShare] = []
    ends: list[int] = []  # chunks before the end of the segment at each depth
    for segment in tree(geometry, namespace.objects, links.parents):
        if segment.depth == 0:
            shares.append(PrefixShare(namespace.name, segment.first, segment.start, 0, 0, 0, None))
        del ends[segment.depth :]
        ends.append((ends[-1] if ends else 0) + segment.chunks)
        _add(shares[-1], segment, ends[-1] * geometry.chunk_tokens)
    return sorted(shares, key=lambda share: -share.nbytes)


def _add(share: PrefixShare, segment: Segment, tokens: int) -> None:
    share.chunks += segment.chunks
    share.nbytes += segment.nbytes
    share.tokens = max(share.tokens, tokens)
    if segment.newest is not None:
        share.newest = max(segment.newest, share.newest or 0.0)


def _bucket(modified: float | None, now: float) -> str:
    if modified is None:
        return UNKNOWN
    return next((name for limit, name in AGES if now - modified < limit), OLDER)
