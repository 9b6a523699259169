"""Sets of per-rank shard files as a source or sink of one prefix; a directory holds the files of one."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from tplayout.admin.local_files import NewFile, ReadFile, os_errors
from tplayout.admin.shard_files import (
    MARK,
    ShardHeader,
    read_shard_header,
    rows_of,
    shard_head,
    tensor_name,
)
from tplayout.admin.transfer import Bits, part_of
from tplayout.errors import ConfigError, FormatError, GeometryError, NotFound
from tplayout.format.geometry import Geometry, Group
from tplayout.format.keys import KEY_BYTES, NO_EXTRAS, pack_tokens
from tplayout.format.sharding import check_cover, writes


@dataclass(frozen=True)
class _Member:
    header: ShardHeader
    file: ReadFile
    spans: dict[str, int]  # tensor name -> where it starts in the file


class ShardSet:
    """The files of one prefix, opened and checked against each other; a `Source`."""

    def __init__(self, directory: Path) -> None:
        """Raises FormatError that names the file, GeometryError for ranks that are missing or do not fit together."""
        self.directory = directory
        self._members: list[_Member] = []
        try:
            for path in shard_files(directory):
                self._members.append(_open(path))
            self._check()
        except BaseException:
            self.close()
            raise

    @property
    def header(self) -> ShardHeader:
        """Of the first file; what all files have in common is equal."""
        return self._members[0].header

    @property
    def geometry(self) -> Geometry:
        """Of all files."""
        return self.header.geometry

    def tokens(self) -> list[int]:
        """Token ids of the prefix."""
        return _tokens(self._members[0])

    def extras(self) -> list[bytes]:
        """For each full chunk the digest of its extras."""
        return _extras(self._members[0])

    def fill(self, group: int, tokens: range, out: Bits) -> bool:
        """See `Source`. Of several replicas of a head the first rank's is taken."""
        shape = self.geometry.groups[group]
        chunk = tokens.start // self.geometry.chunk_tokens
        if chunk in self.header.absent.get(shape.name, ()):
            return False
        rows = rows_of(shape, self.geometry.chunk_tokens, tokens)
        for member in self._members:
            rank = member.header.rank
            if writes(shape.heads, rank.tp_size, rank.tp_rank):
                self._fill_from(member, shape, rows, out)
        return True

    def _fill_from(self, member: _Member, group: Group, rows: range, out: Bits) -> None:
        shard = member.header.rank.shard(group)
        heads = slice(shard.heads.start, shard.heads.stop)
        for position in shard.layers:
            for number, part in enumerate(group.parts):
                name = tensor_name(self.geometry, group, group.layers[position], part.name)
                row = len(shard.heads) * part.dim * group.element_bytes
                data = member.file.read(member.spans[name] + rows.start * row, len(rows) * row)
                values = np.frombuffer(data, out.dtype).reshape(len(rows), len(shard.heads), part.dim)
                part_of(out, group, number)[heads, position] = values.transpose(1, 0, 2)

    def _check(self) -> None:
        first = self._members[0].header
        tokens, extras = self.tokens(), self.extras()
        pack_tokens(tokens)
        for member in self._members[1:]:
            header = member.header
            for what, ours, theirs in (
                ("geometry", first.geometry, header.geometry),
                ("identity", first.identity, header.identity),
                ("tp_size", first.rank.tp_size, header.rank.tp_size),
                ("pp_size", first.rank.pp_size, header.rank.pp_size),
                ("number of tokens", first.tokens, header.tokens),
                ("absent", first.absent, header.absent),
            ):
                if ours != theirs:
                    where = f"{member.file.path.name} and {self._members[0].file.path.name}"
                    raise GeometryError(f"{self.directory}: {where} are not of one set, they differ in {what}")
            if (_tokens(member), _extras(member)) != (tokens, extras):
                raise GeometryError(f"{self.directory}: {member.file.path.name} has other tokens or extras")
        places = [(member.header.rank.tp_rank, member.header.rank.pp_rank) for member in self._members]
        wanted = [(tp, pp) for pp in range(first.rank.pp_size) for tp in range(first.rank.tp_size)]
        for tp, pp in wanted:
            if places.count((tp, pp)) != 1:
                fault = "there twice" if (tp, pp) in places else "missing"
                raise GeometryError(f"{self.directory}: the file of TP rank {tp}, PP rank {pp} is {fault}")
        for group in first.geometry.groups:
            ranks = [member.header.rank for member in self._members]
            shards = [rank.shard(group) for rank in ranks if writes(group.heads, rank.tp_size, rank.tp_rank)]
            check_cover(group, shards)

    def close(self) -> None:
        """Close the files."""
        for member in self._members:
            member.file.close()

    def __enter__(self) -> ShardSet:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def _open(path: Path) -> _Member:
    with os_errors():
        file = ReadFile(path)
    try:
        header = file.safetensors_header()
        return _Member(
            read_shard_header(header, str(path)),
            file,
            {name: tensor.start for name, tensor in header.tensors.items()},
        )
    except BaseException:
        file.close()
        raise


def _tokens(member: _Member) -> list[int]:
    data = member.file.read(member.spans["tokens"], 4 * member.header.tokens)
    return [int(token) for token in np.frombuffer(data, "<i4")]


def _extras(member: _Member) -> list[bytes]:
    count = member.header.tokens // member.header.geometry.chunk_tokens
    if not member.header.extras:
        return [NO_EXTRAS] * count
    data = member.file.read(member.spans["extras"], count * KEY_BYTES)
    return [data[at : at + KEY_BYTES] for at in range(0, len(data), KEY_BYTES)]


def shard_files(directory: Path) -> list[Path]:
    """The safetensors files of a directory, sorted. Raises NotFound if there are none."""
    files = sorted(directory.glob("*.safetensors")) if directory.is_dir() else []
    if not files:
        raise NotFound(f"{directory}: no per-rank shard files (*.safetensors) here")
    return files


def is_shard_file(path: Path) -> bool:
    """Whether a file says that it is a per-rank shard."""
    with contextlib.suppress(FormatError, OSError), ReadFile(path) as file:
        return MARK in file.safetensors_header().metadata
    return False


def find_shard_sets(directory: Path) -> list[Path]:
    """Directories with shard files: this one, or those directly in it. Empty if there are none."""
    places = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())] if directory.is_dir() else []
    return [place for place in places if any(map(is_shard_file, sorted(place.glob("*.safetensors"))[:1]))]


class ShardWriter:
    """Writes the files of one prefix that are not there yet; a `Sink`. `publish` makes them visible, all or none."""

    def __init__(
        self,
        directory: Path,
        headers: Sequence[ShardHeader],
        tokens: Sequence[int],
        extras: Sequence[bytes],
    ) -> None:
        """headers: one a rank. A file that is there with the same header, tokens and extras is left alone."""
        self.present = 0
        self._files: list[tuple[ShardHeader, NewFile, Mapping[str, range]]] = []
        packed, digests = pack_tokens(tokens), b"".join(extras)
        try:
            for header in headers:
                path = directory / header.rank.file_name
                head = shard_head(header)
                info = head.header + packed + (digests if header.extras else b"")
                if _starts_with(path, info, head.nbytes):
                    self.present += 1
                    continue
                with os_errors():
                    file = NewFile(path, head.nbytes)
                    self._files.append((header, file, head.spans))
                    file.write(0, info)
        except BaseException:
            self.discard()
            raise

    @property
    def missing(self) -> int:
        """Files that will be written."""
        return len(self._files)

    def take(self, group: int, tokens: range, bits: Bits) -> None:
        """See `Sink`."""
        for header, file, spans in self._files:
            shape = header.geometry.groups[group]
            shard = header.rank.shard(shape)
            rows = rows_of(shape, header.geometry.chunk_tokens, tokens)
            heads = slice(shard.heads.start, shard.heads.stop)
            for position in shard.layers:
                for number, part in enumerate(shape.parts):
                    span = spans[tensor_name(header.geometry, shape, shape.layers[position], part.name)]
                    values = np.ascontiguousarray(part_of(bits, shape, number)[heads, position].transpose(1, 0, 2))
                    row = values.nbytes // len(rows)
                    with os_errors():
                        file.write(span.start + rows.start * row, values.reshape(-1).view("u1").data)

    def publish(self) -> None:
        """Give all files their names."""
        with os_errors():
            for _, file, _ in self._files:
                file.publish()

    def discard(self) -> None:
        """Remove what was not published."""
        for _, file, _ in self._files:
            file.discard()


def _starts_with(path: Path, info: bytes, size: int) -> bool:
    try:
        with ReadFile(path) as file:
            return file.size == size and file.read(0, len(info)) == info
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError as error:
        raise ConfigError(f"{path} is in the way: {error.strerror}") from None
