"""vLLM's native file-system tier (vLLM 0.32): one prompt's files as a source, and as a sink for another server.

A file is a row of vLLM's shared offload region: for each worker its layers, for each layer the blocks of the chunk,
padded to 4096 bytes; with `canonical_layout` for each layer the blocks with all heads. config.json lacks the number
and size of heads, and where vLLM takes files for independent of TP (`tp_size` 1 for all) the TP size too: these are
stated, and checked.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from tplayout.admin.local_files import NewFile, ReadFile, os_errors
from tplayout.admin.pages import ORDERS, PagedSource, join_page, page_bytes
from tplayout.admin.transfer import Bits, part_of
from tplayout.admin.vllm_names import base_name, block_hashes, file_name
from tplayout.errors import ConfigError, FormatError, GeometryError, NotFound, Reason
from tplayout.format.geometry import Group
from tplayout.format.sharding import head_range, writes
from tplayout.model import KV_DTYPES

_PAGE = 4096
_MAX_CONFIG = 2**20
_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")


@dataclass(frozen=True)
class Tier:
    """What a run of the tier says of itself. root: where its directories are; fields: of config.json."""

    root: Path
    fields: dict[str, Any]

    @property
    def base(self) -> str:
        """Name of its directory."""
        return base_name(self.fields)

    @property
    def block_tokens(self) -> int:
        """Tokens of the engine's block."""
        return int(self.fields["kv_cache_groups"][0]["tokens_per_block"])

    @property
    def file_tokens(self) -> int:
        """Tokens of a file."""
        return self.block_tokens * int(self.fields["blocks_per_file"])

    @property
    def canonical(self) -> str | None:
        """Page order of canonical_layout, None for the direct layout."""
        text = self.fields.get("canonical_format")
        return None if text is None else str(text).partition("-")[2]

    def hashes(self, tokens: Sequence[int], algorithm: str, seed: str | None) -> list[bytes]:
        """Hashes that name a prompt's files, in order."""
        unit = int(self.fields["tokens_per_hash"])
        each = self.file_tokens // unit
        found = block_hashes(tokens, unit, algorithm, seed)
        return found[each - 1 :: each]


@dataclass(frozen=True)
class Rows:
    """Where everything is in a file. tp_size: of the engine; order: of its pages (see `ORDERS`)."""

    group: Group
    tp_size: int
    order: str
    block_tokens: int
    blocks: int
    canonical: bool

    @property
    def pieces(self) -> list[range]:
        """The heads of each worker's pages, or all in one."""
        if self.canonical:
            return [range(self.group.heads)]
        return [head_range(self.group.heads, self.tp_size, rank) for rank in range(self.tp_size)]

    def offset(self, piece: int, layer: int, block: int) -> int:
        """Of one page in the file."""
        page = self.page(piece)
        return (piece * len(self.group.layers) + layer) * self.blocks * page + block * page

    def page(self, piece: int) -> int:
        """Bytes of a page. Workers have equally many heads, so all are of one size."""
        return page_bytes(self.group, len(self.pieces[piece]), self.block_tokens)

    @property
    def nbytes(self) -> int:
        """Of a whole file: with canonical_layout too a row has room for every worker's own copy."""
        local = max(1, self.group.heads // self.tp_size) * self.tp_size
        used = len(self.group.layers) * self.blocks * page_bytes(self.group, local, self.block_tokens)
        return -(-used // _PAGE) * _PAGE


def find_tiers(directory: Path) -> list[Path]:
    """The config.json files of tiers here or directly below; empty if there are none."""
    if not directory.is_dir():
        return []
    places = [directory, *sorted(path for path in directory.iterdir() if path.is_dir())]
    return [place / "config.json" for place in places if _is_tier(place / "config.json")]


def _is_tier(path: Path) -> bool:
    try:
        return path.is_file() and b'"blocks_per_file"' in path.read_bytes()[:_MAX_CONFIG]
    except OSError:
        return False


def open_tier(config: Path) -> Tier:
    """Read and check a tier's config.json. Raises FormatError, or ConfigError for what is not converted, by name."""
    tier = Tier(config.parent.parent, _read_fields(config))
    if config.parent.name != tier.base:
        detail = f"its content belongs to {tier.base}: it was changed or moved"
        raise FormatError(Reason.WRONG_NAMESPACE, detail, str(config))
    _check_convertible(tier, config)
    if tier.block_tokens % tier.fields["tokens_per_hash"]:
        raise FormatError(Reason.BAD_METADATA, "tokens_per_block is no multiple of tokens_per_hash", str(config))
    return tier


def _read_fields(config: Path) -> dict[str, Any]:
    """What config.json says, with the numbers that are needed."""
    try:
        with os_errors(), ReadFile(config) as file:
            fields: dict[str, Any] = json.loads(file.read(0, min(file.size, _MAX_CONFIG)))
        numbers = [fields[name] for name in ("tokens_per_hash", "blocks_per_file", "tp_size", "pp_size")]
        numbers += [group["tokens_per_block"] for group in fields["kv_cache_groups"]]
        if not all(type(number) is int and number > 0 for number in numbers):
            raise ValueError("numbers must be whole and above 0")
    except KeyError as error:
        detail = f"no config.json of vLLM's tier: it has no {error}"
        raise FormatError(Reason.BAD_METADATA, detail, str(config)) from None
    except (ValueError, TypeError) as error:
        raise FormatError(Reason.BAD_METADATA, f"no config.json of vLLM's tier: {error!r}", str(config)) from None
    return fields


def _check_convertible(tier: Tier, config: Path) -> None:
    """ConfigError for what vLLM can write and this does not convert."""
    fields = tier.fields
    for name in ("pp_size", "pcp_size", "dcp_size"):
        if fields.get(name, 1) != 1:
            raise ConfigError(f"{config}: {name} {fields[name]}: only tensor parallelism is converted")
    groups = len(fields["kv_cache_groups"])
    if groups != 1:
        raise ConfigError(f"{config}: {groups} KV cache groups: models with one are converted")
    if tier.canonical not in (None, "nhd", "hnd") or fields.get("replicated_layout"):
        raise ConfigError(f"{config}: layout {fields.get('canonical_format', 'replicated')} is not known here")
    if tier.canonical and fields.get("parallel_agnostic") is False:
        raise ConfigError(f"{config}: canonical_layout of layers that vLLM could not certify: pages of unknown order")


def rows_of(tier: Tier, group: Group, tp_size: int | None, order: str | None) -> Rows:
    """What a tier's files must be for this model. tp_size, order: as stated, None where config.json tells.

    Raises ConfigError or GeometryError for a statement that is missing or cannot be.
    """
    said = int(tier.fields["tp_size"])
    told = "parallel_agnostic" in tier.fields and tier.fields["parallel_agnostic"] is False
    if told and tp_size not in (None, said):
        raise ConfigError(f"{tier.base}: config.json says tp_size {said}, not {tp_size}")
    if not told and tier.canonical is None and tp_size is None:
        raise ConfigError(f"{tier.base}: vLLM wrote these files without their TP size: state it with --engine-tp")
    order = order or tier.canonical
    if order is None:
        raise ConfigError(f"{tier.base}: the files do not tell their page order: state it with --page-order")
    if tier.canonical is not None and not order.endswith(tier.canonical):
        raise ConfigError(f"{tier.base}: config.json says {tier.canonical}, not {order}")
    size = (tp_size or said) if tier.canonical is None else (tp_size or 1)
    head_range(group.heads, size, 0)
    _check_layers(tier, group)
    return Rows(group, size, order, tier.block_tokens, int(tier.fields["blocks_per_file"]), tier.canonical is not None)


def _check_layers(tier: Tier, group: Group) -> None:
    names = tier.fields["kv_cache_groups"][0]["layer_names"]
    numbers = [int(found[1]) if (found := _LAYER.search(name)) else -1 for name in names]
    if tuple(numbers) != group.layers:
        raise GeometryError(f"{tier.base}: layers {numbers} in the files, {list(group.layers)} in the model")
    dtype = KV_DTYPES.get(str(tier.fields.get("dtype")))
    if dtype != group.dtype:
        raise GeometryError(
            f"{tier.base}: KV of dtype {tier.fields.get('dtype')} in the files, {group.dtype} in the model"
        )


def read_prompt(
    tier: Tier, rows: Rows, tokens: Sequence[int], algorithm: str = "sha256", seed: str | None = None
) -> PagedSource:
    """The files of a prompt, from the first up to the first that is missing.

    Raises NotFound if there is none, FormatError for a file of a size that these rows do not have.
    """
    paths = [tier.root / file_name(tier.base, found) for found in tier.hashes(tokens, algorithm, seed)]
    count = next((number for number, path in enumerate(paths) if not path.is_file()), len(paths))
    if not count:
        raise NotFound(
            f"{tier.root}: no file of this prompt in {tier.base}_r0; other tokens, another hash algorithm or seed "
            "(--hash-algo, --hash-seed), or requests with a salt, adapter or image, which are not converted"
        )
    for path in paths[:count]:
        size = path.stat().st_size
        if size != rows.nbytes:
            reason = Reason.TRUNCATED if size < rows.nbytes else Reason.TRAILING
            stated = f"{rows.group.heads} heads, TP size {rows.tp_size}, blocks of {rows.block_tokens}"
            raise FormatError(reason, f"{size} bytes, {rows.nbytes} with {stated}", str(path))

    def read(page: int, layer: int) -> list[tuple[range, bytes]]:
        number, block = divmod(page, rows.blocks)
        pieces = []
        with os_errors(), ReadFile(paths[number]) as file:
            for piece, heads in enumerate(rows.pieces):
                if rows.canonical or writes(rows.group.heads, rows.tp_size, piece):
                    pieces.append((heads, file.read(rows.offset(piece, layer, block), rows.page(piece))))
        return pieces

    return PagedSource(rows.group, rows.order, rows.block_tokens, count * tier.file_tokens, read)


class TierWriter:
    """Writes a prompt's files for another server, those that are not there; a `Sink` of whole files' tokens."""

    def __init__(self, tier: Tier, rows: Rows, hashes: Sequence[bytes]) -> None:
        """tier: of the server, from its config.json. hashes: of `Tier.hashes`."""
        if rows.order not in ORDERS:
            raise ConfigError(f"page order {rows.order!r} is unknown: {', '.join(ORDERS)}")
        self._rows = rows
        self._tokens = tier.file_tokens
        self._paths = [tier.root / file_name(tier.base, found) for found in hashes]
        self.written = self.present = 0

    def take(self, group: int, tokens: range, bits: Bits) -> None:
        """See `Sink`. tokens: whole files."""
        for start in range(tokens.start, tokens.stop, self._tokens):
            inside = bits[..., start - tokens.start : start - tokens.start + self._tokens, :]
            self._write(self._paths[start // self._tokens], inside)

    def _write(self, path: Path, bits: Bits) -> None:
        rows = self._rows
        if path.is_file() and path.stat().st_size == rows.nbytes:
            self.present += 1
            return
        with os_errors():
            file = NewFile(path, rows.nbytes)
            try:
                for layer in range(len(rows.group.layers)):
                    self._write_layer(file, layer, bits)
                file.publish()
            finally:
                file.discard()
        self.written += 1

    def _write_layer(self, file: NewFile, layer: int, bits: Bits) -> None:
        rows = self._rows
        k, v = (part_of(bits, rows.group, part)[:, layer] for part in (0, 1))
        for block in range(rows.blocks):
            span = slice(block * rows.block_tokens, (block + 1) * rows.block_tokens)
            for piece, heads in enumerate(rows.pieces):
                mine = slice(heads.start, heads.stop)
                page = join_page(np.ascontiguousarray(k[mine, span]), np.ascontiguousarray(v[mine, span]), rows.order)
                file.write(rows.offset(piece, layer, block), page)


def tier_for_tp(tier: Tier, root: Path, tp_size: int) -> Tier:
    """The tier of the same server at another TP size, as vLLM names it."""
    fields = dict(tier.fields)
    if fields.get("parallel_agnostic") is False:
        fields["tp_size"] = tp_size
    return replace(tier, root=root, fields=fields)


def write_config(tier: Tier) -> None:
    """Write a tier's config.json as vLLM does, unless it is there."""
    path = tier.root / tier.base / "config.json"
    if path.exists():
        return
    data = json.dumps(tier.fields, indent=2, sort_keys=True).encode()
    with os_errors():
        file = NewFile(path, len(data))
        try:
            file.write(0, data)
            file.publish()
        finally:
            file.discard()
