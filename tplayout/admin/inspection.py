"""One chunk object from the inside: header, ids, every cell's digest, statistics of its values.

Works on damaged objects too, as far as they can be read: that is when somebody looks.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from tplayout.admin.catalog import QUARANTINE, Namespace, Secrets, Stored, hasher_of, key_of, scan
from tplayout.cache.arrays import from_bits
from tplayout.cache.codec import Codec, check_key, make_codec, require
from tplayout.errors import ConfigError, FormatError, NotFound, Reason, StorageError, StorageErrorKind
from tplayout.format.chunk import read_chunk_id, verify
from tplayout.format.digest import CellHasher
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.header import MAX_HEADER_BYTES, header_size, parse_header
from tplayout.format.keys import ChunkId, parse_object_name
from tplayout.format.layout import ChunkLayout, stated_layout
from tplayout.storage.base import ObjectInfo, Store

if TYPE_CHECKING:
    from numpy.typing import NDArray

MAX_BYTES = 4 << 30  # where nobody says what an object may have

_KEY = re.compile(r"[0-9a-f]{4,64}")


@dataclass(frozen=True)
class Cell:
    """One cell's digest as the object holds it. layer: the model's number. ok: None if nobody could tell."""

    head: int
    layer: int
    digest: bytes
    ok: bool | None


@dataclass(frozen=True)
class Statistics:
    """Values of one part of a cell, as stored (a quantised cache's scales are not applied). NaNs count only as such."""

    part: str
    minimum: float
    maximum: float
    mean: float
    std: float
    nans: int
    infinities: int


@dataclass(frozen=True)
class Opened:
    """An object that was read whole.

    chunk: what it says it is. fault: why it is not accepted. hasher: None without the secret or namespace.json.
    sealed: it is encrypted and cannot be opened, for want of the key or because it is damaged: data is empty, and
    stored bytes are all that was checked.
    modified: seconds since the epoch. siblings: names of the objects of the chunk's other groups. data: the plain
    object; lost cells of a damaged packed one are zeros. size, codec: of the object as it is stored.
    """

    name: str
    modified: float | None
    data: memoryview
    layout: ChunkLayout
    space: Namespace
    key: bytes
    chunk: ChunkId | None
    fault: FormatError | None
    hasher: CellHasher | None
    size: int
    codec: str
    siblings: tuple[str, ...] = ()
    encryption_key_id: str | None = None
    sealed: bool = False

    @property
    def unsure(self) -> bool:
        """True if the digests of the cells could not be compared, for want of the secret or the key."""
        return self.hasher is None or self.sealed


def find(
    store: Store, chunk: str, namespace: str | None = None, group: str | None = None
) -> tuple[Namespace, Stored, tuple[str, ...]]:
    """The object that is meant, and the names of the chunk's others.

    chunk: an object's name, or the first digits (4 or more) of a chunk's key. group: name or index, None for the first
    that is there. Raises NotFound, ConfigError for what is ambiguous.
    """
    if "/" in chunk:
        return _find_by_name(store, chunk)
    wanted = chunk.lower()
    if not _KEY.fullmatch(wanted):
        raise ConfigError(f"chunk {chunk!r} must be an object's name or the first 4 to 64 hex digits of a key")
    catalog = scan(store, namespace)
    found: dict[tuple[str, bytes], list[Stored]] = {}
    for space in catalog.namespaces.values():
        for stored in space.objects:
            if stored.key.hex().startswith(wanted):
                found.setdefault((space.name, stored.key), []).append(stored)
    if not found:
        is_namespace = any(name.startswith(wanted) for name in catalog.namespaces)
        hint = "it is a namespace: see --namespace" if is_namespace else "`tplayout ls URL NAMESPACE` shows keys"
        raise NotFound(f"{store.url}: no chunk's key begins with {wanted}; {hint}")
    if len(found) > 1:
        some = ", ".join(f"{key.hex()[:16]} in {name[:8]}" for name, key in sorted(found)[:5])
        raise ConfigError(f"{len(found)} chunks begin with {wanted}: {some}; give more digits, or --namespace")
    ((name, _), objects), *_ = found.items()
    space = catalog.namespaces[name]
    chosen = _of_group(space, objects, group)
    return space, chosen, tuple(stored.name for stored in objects if stored is not chosen)


def read(
    store: Store,
    space: Namespace,
    stored: Stored,
    secrets: Secrets,
    siblings: tuple[str, ...] = (),
) -> Opened:
    """Read an object whole and check all of it.

    Raises StorageError; FormatError if not even its header can be read, or if it is encrypted and that is all that can
    be said of it; ConfigError for another key than the namespace's.
    """
    raw = _bytes_of(store, space, stored)
    layout, name, key_id = _layout(space, stored, raw)
    require(name)
    hasher: CellHasher | None = None
    if space.document is not None and (layout.key_id is None or secrets.secret is not None):
        hasher = hasher_of(space.document, secrets.secret)
    codec = make_codec(name, hasher, key_id, _key(space, name, key_id, secrets.encryption_key))
    data, damage = _plain(codec, raw, layout, stored)
    chunk, fault = None, damage or space.fault
    if space.document is not None and data is not None:
        digest = space.document.identity.digest()
        try:
            chunk = read_chunk_id(data, layout, digest)
            if hasher is not None and fault is None:
                verify(data, layout, digest, stored.key, hasher)
        except FormatError as error:
            fault = error
    return Opened(
        stored.name,
        stored.modified,
        memoryview(b"") if data is None else data,
        layout,
        space,
        stored.key,
        chunk,
        fault,
        hasher,
        len(raw),
        name,
        siblings,
        key_id,
        sealed=data is None,
    )


def _bytes_of(store: Store, space: Namespace, stored: Stored) -> memoryview:
    """All of an object; FormatError where it has more than twice what the namespace's geometry allows."""
    most = MAX_BYTES if space.document is None else MAX_HEADER_BYTES + 2 * space.most_bytes()
    try:
        return memoryview(store.get(stored.name, max_bytes=most))
    except StorageError as error:
        if error.kind is StorageErrorKind.TOO_LARGE:
            raise FormatError(Reason.TRAILING, f"more than {most} bytes", stored.name) from None
        raise


def _plain(
    codec: Codec, raw: memoryview, layout: ChunkLayout, stored: Stored
) -> tuple[memoryview | None, FormatError | None]:
    """The plain object, or what is left of it (None for what is encrypted and cannot be opened), and what is wrong."""
    try:
        if codec.closed is not None:
            codec.closed.check(raw, layout, stored.key)
            return None, None
        return codec.unpack(raw, layout, stored.key), None
    except FormatError as error:
        try:
            return codec.salvage(raw, layout, stored.key), error
        except FormatError:
            if codec.encrypts:
                return None, error
            raise error.at(stored.name) from None


def cells(opened: Opened) -> Iterator[Cell]:
    """The digest of every cell that is there, head by head, compared with the cell."""
    layout = opened.layout
    for head in range(layout.group.heads):
        for position, layer in enumerate(layout.group.layers):
            place, span = layout.digest_range(head, position), layout.cell_range(head, position)
            if max(place.stop, span.stop) > len(opened.data):
                return
            digest = bytes(opened.data[place.start : place.stop])
            ok = None
            if opened.hasher is not None:
                cell = opened.data[span.start : span.stop]
                ok = digest == opened.hasher.cell(opened.key, layout.group.name, head, layer, cell)
            yield Cell(head, layer, digest, ok)


def statistics(opened: Opened, head: int, layer: int) -> list[Statistics]:
    """Of each part of one cell. layer: the model's number. ConfigError for a cell that the group does not have."""
    import numpy as np

    group = opened.layout.group
    if not 0 <= head < group.heads or layer not in group.layers:
        there = f"heads 0 to {group.heads - 1}, layers {_numbers(group.layers)}"
        raise ConfigError(f"no cell {head}:{layer} in group {group.name!r}: it has {there}")
    found = []
    for name, values in _parts(opened, head, group.layers.index(layer)):
        finite = values[np.isfinite(values)]
        empty = finite.size == 0
        found.append(
            Statistics(
                name,
                math.nan if empty else float(finite.min()),
                math.nan if empty else float(finite.max()),
                math.nan if empty else float(finite.mean()),
                math.nan if empty else float(finite.std()),
                int(np.isnan(values).sum()),
                int(np.isinf(values).sum()),
            )
        )
    return found


def norms(opened: Opened) -> dict[str, NDArray[Any]]:
    """Part -> [heads, layers] of root mean squares; NaN where values are no numbers or the object ends before."""
    import numpy as np

    group = opened.layout.group
    drawn = {part.name: np.full((group.heads, len(group.layers)), np.nan) for part in group.parts}
    for head in range(group.heads):
        for position in range(len(group.layers)):
            if opened.layout.cell_range(head, position).stop > len(opened.data):
                continue
            for name, values in _parts(opened, head, position):
                with np.errstate(over="ignore", invalid="ignore"):
                    drawn[name][head, position] = np.sqrt(np.mean(np.square(values)))
    return drawn


def _parts(opened: Opened, head: int, position: int) -> Iterator[tuple[str, NDArray[Any]]]:
    """Name and values, as doubles, of the parts of a cell."""
    import numpy as np

    layout, group = opened.layout, opened.layout.group
    span = layout.cell_range(head, position)
    if span.stop > len(opened.data):
        raise FormatError(Reason.TRUNCATED, f"it ends before head {head}, layer {group.layers[position]}", opened.name)
    bits = np.frombuffer(opened.data, f"u{group.element_bytes}", layout.cell_bytes // group.element_bytes, span.start)
    cell = from_bits(bits, group, "numpy").reshape(group.cell_shape(layout.chunk_tokens)).astype("f8")
    start = 0
    for index, part in enumerate(group.parts):
        if cell.ndim == 3:
            yield part.name, cell[index]
        else:
            yield part.name, cell[:, start : start + part.dim]
            start += part.dim


def _find_by_name(store: Store, name: str) -> tuple[Namespace, Stored, tuple[str, ...]]:
    try:
        parsed = parse_object_name(name.removeprefix(f"{QUARANTINE}/"))
    except FormatError:
        raise ConfigError(f"{name!r} is no name of a chunk object: NAMESPACE/XX/KEY.GROUP.safetensors") from None
    info: ObjectInfo | None = next((info for info in store.list(name) if info.key == name), None)
    if info is None:
        raise NotFound(f"{store.url}: {name}: nothing is stored there")
    try:
        (space,) = scan(store, parsed.namespace).namespaces.values()
    except NotFound:
        space = Namespace(parsed.namespace, fault=FormatError(Reason.BAD_NAMESPACE, "namespace.json is missing"))
    return space, Stored(name, parsed.key, parsed.group_index, info.size, info.modified), ()


def _of_group(space: Namespace, objects: list[Stored], group: str | None) -> Stored:
    if group is None:
        return min(objects, key=lambda stored: stored.group)
    index = int(group) if group.isdecimal() else space.known().identity.geometry.group_index(group)
    for stored in objects:
        if stored.group == index:
            return stored
    raise NotFound(f"the chunk has no object of group {group}, only of {', '.join(str(one.group) for one in objects)}")


def _key(
    space: Namespace, codec: str, key_id: str | None, encryption_key: EncryptionKey | None
) -> EncryptionKey | None:
    """The key, where it is given and of use. Raises ConfigError, or FormatError without namespace.json, for another."""
    if encryption_key is None or key_id is None:
        return None
    if space.document is None:
        check_key(codec, key_id, encryption_key)
        return encryption_key
    return key_of(space.document, encryption_key)


def _layout(space: Namespace, stored: Stored, data: memoryview) -> tuple[ChunkLayout, str, str | None]:
    """Layout, codec and id of the encryption key that the namespace says, else those of the object's own header."""
    if space.document is not None and stored.group < len(layouts := space.layouts()):
        return layouts[stored.group], space.document.storage.codec, space.document.storage.encryption_key_id
    try:
        header = parse_header(data[: header_size(data, len(data))], len(data))
        return *stated_layout(header), header.metadata.get("encryption_key_id")
    except FormatError as error:
        raise error.at(stored.name) from None


def _numbers(layers: tuple[int, ...]) -> str:
    whole = layers == tuple(range(layers[0], layers[-1] + 1))
    return f"{layers[0]} to {layers[-1]}" if whole else ", ".join(map(str, layers))
