"""Conversions between a namespace and what holds the KV of single prefixes; the report that all of them give."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from tplayout.admin.catalog import NO_SECRETS, Secrets
from tplayout.admin.chains import SMALL_READS, Index, build_index
from tplayout.admin.local_files import ReadFile
from tplayout.admin.namespaces import OpenNamespace, begin_namespace
from tplayout.admin.parallel import in_order
from tplayout.admin.progress import Parts
from tplayout.admin.shard_files import Rank, ShardHeader, ranks_of, read_shard_header
from tplayout.admin.shards import ShardSet, ShardWriter, find_shard_sets, is_shard_file, shard_files
from tplayout.admin.transfer import Place, Tally, read_prefix, store_prefix
from tplayout.admin.work import SIMPLY, Work
from tplayout.errors import ConfigError, GeometryError, NamespaceMismatch, NotFound, TPLayoutError
from tplayout.format.geometry import Geometry
from tplayout.format.identity import Identity
from tplayout.format.keys import NO_EXTRAS, ChunkId, chain_of_digests
from tplayout.format.sharding import pp_layer_ranges
from tplayout.storage.base import Store


@dataclass
class Report:
    """What a conversion did. prefixes: how many; files: written, and there already (where files are written).

    rest: tokens behind a prefix's last full chunk, which have no place in a store. skipped: what could not be
    converted, by name, with the reason. namespace: that was written or read. bytes_read: what the objects that were
    read take in SRC, from one store to another.
    """

    prefixes: int = 0
    tally: Tally = field(default_factory=Tally)
    files_written: int = 0
    files_present: int = 0
    rest: int = 0
    skipped: dict[str, str] = field(default_factory=dict)
    namespace: str = ""
    bytes_read: int = 0

    @property
    def complete(self) -> bool:
        """Whether everything was converted."""
        return not self.skipped and not self.tally.damaged


def import_shards(
    directories: Sequence[Path],
    store: Store,
    identity: Identity | None = None,
    model: str = "",
    secrets: Secrets = NO_SECRETS,
    work: Work = SIMPLY,
) -> Report:
    """Per-rank shard sets, one directory a prefix, into a store.

    identity: of the model, where the files do not hold one. Raises ConfigError if neither is known, and
    NamespaceMismatch naming the first field in which they differ; as `ShardSet` for files that do not fit.
    """
    report = Report()
    done: set[Place] = set()
    parts = Parts(work.progress, sum(map(_objects_in, directories)))
    for directory in directories:
        with ShardSet(directory) as shards:
            own = _identity_of(shards, identity)
            target = begin_namespace(store, own, model or shards.header.model, secrets, dry_run=work.dry_run)
            tokens = shards.tokens()
            chunks = chain_of_digests(target.digest, tokens, target.chunk_tokens, shards.extras())
            part = parts.part(len(chunks) * len(own.geometry.groups))
            report.tally.add(store_prefix(shards, chunks, target, work.telling(part), done))
            report.prefixes += 1
            report.rest += len(tokens) % target.chunk_tokens
            report.namespace = target.name
    return report


def _objects_in(directory: Path) -> int:
    """How many objects a shard set will give, by its first file; 0 for what is none, as opening it will tell."""
    with suppress(TPLayoutError, OSError), ReadFile(shard_files(directory)[0]) as file:
        header = read_shard_header(file.safetensors_header(), str(file.path))
        return header.tokens // header.geometry.chunk_tokens * len(header.geometry.groups)
    return 0


def _identity_of(shards: ShardSet, stated: Identity | None) -> Identity:
    theirs = shards.header.identity
    if stated is None:
        if theirs is None:
            raise ConfigError(
                f"{shards.directory}: the files hold no identity: name the model's directory with --model"
            )
        return theirs
    if theirs is not None:
        for field_name, ours, other in stated.diff(theirs):
            raise NamespaceMismatch(field_name, ours, other)
    if stated.geometry != shards.geometry:
        raise NamespaceMismatch("geometry", stated.geometry.to_json(), shards.geometry.to_json())
    return stated


def stages_of(geometry: Geometry, pp_size: int, partition: Sequence[int] | None = None) -> list[range]:
    """Layer numbers of each pipeline stage of a model with this geometry. Raises GeometryError."""
    layers = 1 + max(layer for group in geometry.groups for layer in group.layers)
    if partition is None and pp_size > layers:
        raise GeometryError(f"PP size {pp_size} is more than the model's {layers} layers: each stage needs one")
    return pp_layer_ranges(layers, pp_size, partition)


def export_shards(
    origin: OpenNamespace,
    directory: Path,
    tp_size: int,
    stages: Sequence[range],
    keys: Sequence[bytes] | None = None,
    index: Index | None = None,
    work: Work = SIMPLY,
) -> Report:
    """Prefixes of a namespace as per-rank shard sets: directory/<first 32 hex digits of the last chunk's key>/.

    keys: last chunks of the prefixes; None for the longest prefixes that have no gap. index: of the namespace, where it
    is known. A prefix with a damaged object
    is skipped and named. Raises GeometryError if the TP size does not divide the heads, ConfigError if the directory
    holds shards of another TP or PP size.
    """
    ranks = ranks_of(origin.identity.geometry, tp_size, stages)
    _check_same_split(directory, {rank.file_name for rank in ranks})
    index = index or build_index(origin)
    report = Report(namespace=origin.name)
    paths = list(index.prefixes()) if keys is None else [path_to(index, key) for key in keys]
    skip_gaps(index, report)
    groups = len(origin.identity.geometry.groups)
    parts = Parts(work.progress, sum(map(len, paths)) * groups)
    for path in paths:
        part = parts.part(len(path) * groups)
        report.prefixes += 1
        if work.dry_run:
            report.files_written += len(ranks)
        else:
            _export_prefix(index, path, directory, ranks, report, work.telling(part))
    return report


def _export_prefix(
    index: Index, path: Sequence[bytes], directory: Path, ranks: Sequence[Rank], report: Report, work: Work
) -> None:
    """One prefix as a shard set, unless an object of it is damaged. path: keys from the first chunk on."""
    origin, chunks = index.namespace, chunks_of(index, path)
    absent = _absent(index, path)
    has_extras = any(chunk.extras != NO_EXTRAS for chunk in chunks)
    identity, length = origin.identity, len(chunks) * origin.chunk_tokens
    headers = [
        ShardHeader(rank, identity.geometry, length, identity, origin.document.model, absent, has_extras)
        for rank in ranks
    ]
    tokens = [token for chunk in chunks for token in chunk.tokens]
    writer = ShardWriter(directory / path[-1].hex()[:32], headers, tokens, [chunk.extras for chunk in chunks])
    try:
        report.files_present += writer.present
        if not writer.missing:
            return
        tally = read_prefix(origin, chunks, writer, work)
        report.tally.add(tally)
        if tally.damaged:
            report.skipped[path[-1].hex()] = f"{len(tally.damaged)} damaged objects"
            return
        writer.publish()
        report.files_written += writer.missing
    finally:
        writer.discard()


def _check_same_split(directory: Path, names: Collection[str]) -> None:
    """Files of two splits side by side would be of no set."""
    for place in find_shard_sets(directory):
        for path in sorted(place.glob("*.safetensors")):
            if path.name not in names and is_shard_file(path):
                raise ConfigError(f"{path} is a shard of another TP or PP size: name another DST, or an empty one")


def skip_gaps(index: Index, report: Report) -> None:
    """Say in the report what no prefix reaches, and what is damaged."""
    report.tally.damaged |= index.reasons()
    for key in index.cut_off():
        report.skipped[key.hex()] = "a chunk before it is missing"


def path_to(index: Index, key: bytes) -> list[bytes]:
    """Keys from the first chunk to this one. Raises NotFound if it is not stored, or not reachable."""
    path = index.path(key)
    if not path:
        raise NotFound(f"{index.namespace.store.url}: no prefix that ends with chunk {key.hex()} and has no gap")
    return path


def chunks_of(index: Index, path: Sequence[bytes]) -> list[ChunkId]:
    """The chunks of a prefix with tokens, extras and positions. path: keys from the first chunk on."""
    found = in_order(index.chunk_id, path, SMALL_READS)
    return [ChunkId(chunk.key, chunk.parent, chunk.tokens, chunk.extras, number) for number, chunk in enumerate(found)]


def _absent(index: Index, path: Sequence[bytes]) -> dict[str, tuple[int, ...]]:
    """Group name -> positions of the chunks that lack the group."""
    absent = {}
    for number, group in enumerate(index.namespace.identity.geometry.groups):
        gone = tuple(at for at, key in enumerate(path) if number not in index.chunks[key].objects)
        if gone:
            absent[group.name] = gone
    return absent
