"""One namespace as another: another chunk size, another KV dtype.

Prefixes are cut anew from their token ids; what is shared is written once. Digests of extras are carried over where
they mean the same in a chunk of another size.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from tplayout.admin.catalog import NO_SECRETS, Secrets
from tplayout.admin.chains import Index, build_index
from tplayout.admin.convert import Report, chunks_of, path_to, skip_gaps
from tplayout.admin.namespaces import OpenNamespace, begin_copy
from tplayout.admin.progress import Parts
from tplayout.admin.transfer import Bits, Place, cells_of, store_prefix
from tplayout.admin.values import Converter, Losses, converted_group, converter, is_lossless
from tplayout.admin.work import SIMPLY, Work
from tplayout.errors import ConfigError, FormatError, GeometryError, NotFound
from tplayout.format.geometry import Geometry
from tplayout.format.identity import Identity
from tplayout.format.keys import NO_EXTRAS, ChunkId, chain_of_digests
from tplayout.storage.base import Store


@dataclass
class Rechunked(Report):
    """A report with what the change of dtype cost, by group name.

    read: bytes in the source of each object that was read, by name.
    """

    losses: dict[str, Losses] = field(default_factory=dict)
    read: dict[str, int] = field(default_factory=dict)


def changed_identity(identity: Identity, chunk_tokens: int | None = None, dtype: str | None = None) -> Identity:
    """The identity of the same model with another chunk size or KV dtype (safetensors' name).

    Raises GeometryError for what no geometry can be, ConfigError for a dtype that values cannot be converted to.
    """
    old = identity.geometry
    groups = old.groups if dtype is None else tuple(converted_group(group, dtype) for group in old.groups)
    geometry = Geometry(chunk_tokens or old.chunk_tokens, groups)
    for group in groups:
        if group.kind == "state" and geometry.chunk_tokens % old.chunk_tokens:
            raise GeometryError(
                f"group {group.name!r} holds the state after every {old.chunk_tokens} tokens: chunks of "
                f"{geometry.chunk_tokens} need states that are not stored; choose a multiple of {old.chunk_tokens}"
            )
    return replace(identity, geometry=geometry)


def rechunk(
    origin: OpenNamespace,
    store: Store,
    identity: Identity,
    lossy: bool = False,
    secrets: Secrets = NO_SECRETS,
    keys: Sequence[bytes] | None = None,
    index: Index | None = None,
    work: Work = SIMPLY,
    codec: str | None = None,
) -> Rechunked:
    """The prefixes of a namespace as chunks of `identity`, see `changed_identity`. A job holds two chunks.

    lossy: whether precision may be lost; what it cost is measured and reported. keys: last chunks of the prefixes, None
    for all. index: of the namespace, where it is known. codec: that the target must have; None for that which it has,
    or the source's. secrets: of the target, see `begin_copy`. Raises ConfigError if precision would be lost and may
    not, and as `begin_namespace`.
    """
    pairs = list(zip(origin.identity.geometry.groups, identity.geometry.groups, strict=True))
    for old, new in pairs:
        if not lossy and not is_lossless(old, new):
            raise ConfigError(
                f"group {old.name!r}: {old.dtype} to {new.dtype} loses precision: add --lossy to allow it, and the "
                "error is measured"
            )
    target = begin_copy(origin, store, identity, secrets, codec, work.dry_run)
    report = Rechunked(namespace=target.name)
    done: set[Place] = set()
    converters = [converter(old, new) for old, new in pairs]
    report.losses = {
        new.name: one.losses for (_, new), one in zip(pairs, converters, strict=True) if one.losses is not None
    }
    index = index or build_index(origin)
    paths = list(index.prefixes()) if keys is None else [path_to(index, key) for key in keys]
    skip_gaps(index, report)
    counts = [len(path) * origin.chunk_tokens // target.chunk_tokens * len(pairs) for path in paths]
    parts = Parts(work.progress, sum(counts))
    for path, objects in zip(paths, counts, strict=True):
        part = parts.part(objects)
        chunks = chunks_of(index, path)
        tokens = [token for chunk in chunks for token in chunk.tokens]
        extras = carried_extras(chunks, target.chunk_tokens)
        if extras is None:
            report.skipped[path[-1].hex()] = "its extras cannot be carried over to chunks of another size"
            continue
        sizes = [{group: info.size for group, info in index.chunks[key].objects.items()} for key in path]
        source = _Chunks(origin, chunks, sizes, converters, report)
        ids = chain_of_digests(target.digest, tokens, target.chunk_tokens, extras)
        report.tally.add(store_prefix(source, ids, target, work.telling(part), done))
        report.prefixes += 1
        report.rest += len(tokens) % target.chunk_tokens
    report.bytes_read = sum(report.read.values())
    return report


def carried_extras(chunks: Sequence[ChunkId], chunk_tokens: int) -> list[bytes] | None:
    """The extras digest of each chunk of another size; None if that cannot be known.

    With the same size they stay. Else all must be equal: then they are those of the request (adapter, salt), while an
    item's position would differ from chunk to chunk. A single chunk cannot show that, unless it has no extras.
    """
    size = len(chunks[0].tokens)
    digests = [chunk.extras for chunk in chunks]
    if size == chunk_tokens:
        return digests
    count = len(chunks) * size // chunk_tokens
    if set(digests) == {NO_EXTRAS} or (len(chunks) > 1 and len(set(digests)) == 1):
        return digests[:1] * count
    return None


class _Chunks:
    """A stored prefix as a `Source` for chunks of another size and dtype. Each thread keeps the object it read last."""

    def __init__(
        self,
        origin: OpenNamespace,
        chunks: Sequence[ChunkId],
        sizes: Sequence[Mapping[int, int]],
        converters: Sequence[Converter],
        report: Rechunked,
    ) -> None:
        """sizes: of each chunk's objects as they are stored, by group."""
        self._origin = origin
        self._chunks = chunks
        self._sizes = sizes
        self._converters = converters
        self._report = report
        self._held = threading.local()

    def fill(self, group: int, tokens: range, out: Bits) -> bool:
        """See `Source`."""
        size = self._origin.chunk_tokens
        state = self._origin.identity.geometry.groups[group].kind == "state"
        first = (tokens.stop - 1) // size if state else tokens.start // size
        for number in range(first, (tokens.stop - 1) // size + 1):
            cells = self._cells(number, group)
            if cells is None:
                return False
            if state:
                self._converters[group](cells, out)
                continue
            start, stop = max(tokens.start, number * size), min(tokens.stop, (number + 1) * size)
            inside = cells[..., start - number * size : stop - number * size, :]
            self._converters[group](inside, out[..., start - tokens.start : stop - tokens.start, :])
        return True

    def _cells(self, number: int, group: int) -> Bits | None:
        """The cells of one stored object, verified; None if it is missing or damaged."""
        if getattr(self._held, "place", None) != (number, group):
            layout = self._origin.layout(group)
            if getattr(self._held, "group", None) != group:
                self._held.buf = bytearray(layout.nbytes)
            self._held.place, self._held.group = None, group
            try:
                self._origin.read(self._chunks[number].key, group, self._held.buf)
            except NotFound:
                return None
            except FormatError as error:
                self._report.tally.damaged[error.where] = str(error)
                return None
            self._held.place = (number, group)
            name = self._origin.object_name(self._chunks[number].key, group)
            self._report.read[name] = self._sizes[number].get(group, 0)
        return cells_of(self._held.buf, self._origin.layout(group))
