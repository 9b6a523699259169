"""LMCache's file-system adapter (LMCache 0.5.6, multi-process mode): one prompt's files as a source.

One file a chunk and rank: `<model>@0x<rank>@<group>@<chunk hash>.data`, raw bytes [layer, token, local head, 2*dim] of
raw slots, without header or checksum. TP size and rank are in the name; the engine's block size and backend, which
decide what a slot is, are told nowhere and must be stated.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from tplayout.admin.example_connector import BACKENDS
from tplayout.admin.local_files import ReadFile, os_errors
from tplayout.admin.pages import PagedSource, page_bytes, pages_of_slots
from tplayout.errors import ConfigError, FormatError, NotFound, Reason
from tplayout.format.geometry import Group
from tplayout.format.sharding import head_range, writes

DEFAULT_CHUNK_TOKENS = 256
_NAME = re.compile(r"(?P<model>[^@]+)@0x(?P<rank>[0-9a-f]{8})@(?P<group>[0-9a-f]+)@(?P<hash>[0-9a-f]{64})\.data")
_FIRST = blake3(bytes(12)).digest()  # what a prompt's first chunk follows: the hash of token 0 behind eight zero bytes


@dataclass(frozen=True)
class Chunk:
    """A file by its name. world, rank: TP size and rank."""

    path: Path
    model: str
    world: int
    rank: int
    hash: str


def is_lmcache_directory(directory: Path) -> bool:
    """Whether a directory looks like the adapter's."""
    return directory.is_dir() and any(_NAME.fullmatch(path.name) for path in directory.glob("*.data"))


def chunk_hashes(tokens: Sequence[int], chunk_tokens: int) -> list[str]:
    """Hashes of a prompt's full chunks, hex."""
    hashes, parent = [], _FIRST
    for start in range(0, len(tokens) - chunk_tokens + 1, chunk_tokens):
        own = tokens[start : start + chunk_tokens]
        parent = blake3(parent + struct.pack(f">{chunk_tokens}I", *own)).digest()
        hashes.append(parent.hex())
    return hashes


def read_prompt(
    directory: Path,
    group: Group,
    tokens: Sequence[int],
    block_tokens: int,
    backend: str,
    chunk_tokens: int = DEFAULT_CHUNK_TOKENS,
    tp_size: int | None = None,
) -> PagedSource:
    """A prompt's files, from the first chunk up to the first of which a rank is missing.

    chunk_tokens: LMCache's chunk size. tp_size: where the directory holds the prompt for several. Raises NotFound if
    there is nothing, ConfigError if it is not clear what is meant, FormatError for a file of another size.
    """
    if backend not in BACKENDS or chunk_tokens % block_tokens:
        raise ConfigError(
            f"backend {backend!r} must be one of {', '.join(BACKENDS)}, and LMCache's chunks of {chunk_tokens} tokens "
            f"a multiple of the engine's blocks of {block_tokens}"
        )
    hashes = chunk_hashes(tokens, chunk_tokens)
    files = [chunk for path in directory.glob("*.data") if (chunk := _chunk(path)) and chunk.hash in set(hashes)]
    world = _world(directory, files, tp_size, chunk_tokens)
    places = {(chunk.hash, chunk.rank): chunk.path for chunk in files if chunk.world == world}
    ranks = {rank: head_range(group.heads, world, rank) for rank in range(world) if writes(group.heads, world, rank)}
    whole = [all((each, rank) in places for rank in ranks) for each in hashes]
    count = whole.index(False) if False in whole else len(whole)
    if not count:
        raise NotFound(f"{directory}: the first chunk of this prompt lacks ranks of TP size {world}")
    for each in hashes[:count]:
        for rank, heads in ranks.items():
            _check_size(places[each, rank], group, len(heads), chunk_tokens)
    blocks = chunk_tokens // block_tokens

    def read(page: int, layer: int) -> list[tuple[range, bytes]]:
        number, block = divmod(page, blocks)
        pieces = []
        for rank, heads in ranks.items():
            length = page_bytes(group, len(heads), block_tokens)
            with os_errors(), ReadFile(places[hashes[number], rank]) as file:
                data = file.read((layer * blocks + block) * length, length)
            pieces.append((heads, pages_of_slots(data, group, len(heads), block_tokens)))
        return pieces

    return PagedSource(group, BACKENDS[backend], block_tokens, count * chunk_tokens, read)


def _chunk(path: Path) -> Chunk | None:
    """What a file's name says; None for files of other kinds and of other cache groups."""
    match = _NAME.fullmatch(path.name)
    if match is None or int(match["group"], 16):
        return None
    rank = bytes.fromhex(match["rank"])
    return Chunk(path, match["model"].replace("-SEP-", "/"), rank[0], rank[1], match["hash"])


def _world(directory: Path, files: Sequence[Chunk], tp_size: int | None, chunk_tokens: int) -> int:
    models = sorted({chunk.model for chunk in files})
    worlds = sorted({chunk.world for chunk in files})
    if not files:
        raise NotFound(
            f"{directory}: nothing of this prompt in chunks of {chunk_tokens} tokens; other tokens, another chunk size "
            "(--engine-chunk-tokens), or a cache salt, which is not converted"
        )
    if len(models) > 1:
        raise ConfigError(f"{directory} holds this prompt for {', '.join(models)}: move one model's files elsewhere")
    if tp_size is None and len(worlds) > 1:
        raise ConfigError(f"{directory} holds this prompt for TP sizes {worlds}: state one with --engine-tp")
    world = worlds[0] if tp_size is None else tp_size
    if world not in worlds:
        raise ConfigError(f"{directory} holds this prompt for TP size {worlds}, not {world}")
    return world


def _check_size(path: Path, group: Group, heads: int, chunk_tokens: int) -> None:
    size, wanted = path.stat().st_size, len(group.layers) * page_bytes(group, heads, chunk_tokens)
    if size != wanted:
        reason = Reason.TRUNCATED if size < wanted else Reason.TRAILING
        what = f"{len(group.layers)} layers, {heads} heads and {chunk_tokens} tokens of {group.dtype}"
        raise FormatError(reason, f"{size} bytes, {wanted} with {what}", str(path))
