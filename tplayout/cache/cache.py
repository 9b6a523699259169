"""`Cache`: chunks of one identity in one store, for programs without an engine.

Arrays come in and go out in any sharding; what is stored is the same for all. One call at a time makes each
object: nothing is kept in memory between calls.
"""

from __future__ import annotations

import logging
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from os import PathLike
from types import NoneType
from typing import Any

from tplayout.arguments import check_type
from tplayout.cache.arrays import as_bits, check_kind, from_bits, read_cells, write_cells
from tplayout.cache.codec import Codec
from tplayout.cache.namespace import open_namespace
from tplayout.cache.packing import plain_store
from tplayout.cache.prefix import Place, Prefix, servable
from tplayout.errors import (
    ConfigError,
    FormatError,
    GeometryError,
    NotFound,
    StorageError,
    as_damage,
)
from tplayout.format.chunk import seal, verify, verify_shard
from tplayout.format.digest import CellHasher
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.geometry import Geometry
from tplayout.format.identity import Identity
from tplayout.format.keys import KEY_BYTES, ChunkId, Extras, chain, namespace_name, object_name
from tplayout.format.layout import ChunkLayout, chunk_layout, layouts_of
from tplayout.format.sharding import Shard, check_cover, whole
from tplayout.storage.base import Store

ShardArrays = Mapping[Shard, Any]
ExtrasOf = Callable[[int], Extras]

log = logging.getLogger("tplayout")
_TOUCH_S = 1.0  # noting use must not hold up who uses it


class Cache:
    """The chunks of one identity. `Cache.open` makes one; calls raise StorageError when the store fails them."""

    def __init__(self, store: Store, identity: Identity, hasher: CellHasher, codec: Codec, owned: bool = False) -> None:
        """hasher, codec: of the namespace that exists. owned: `close` closes the store too."""
        self.store = store
        self.identity = identity
        self._hasher = hasher
        self._owned = owned
        self._digest = identity.digest()
        layouts = layouts_of(self.geometry, hasher.name, hasher.key_id)
        self._objects = plain_store(store, self.namespace, layouts, codec)

    @classmethod
    def open(
        cls,
        store: Store | str | PathLike[str],
        identity: Identity,
        *,
        secret: bytes | None = None,
        create: bool = True,
        model: str = "",
        storage_options: Mapping[str, Any] | None = None,
        codec: str | None = None,
        encryption_key: bytes | None = None,
    ) -> Cache:
        """Open the identity's namespace in a store or at a URL, and begin it if it is not there.

        secret: makes the cells' digests authentication; every user of the namespace needs it. create: whether a
        missing namespace is begun (namespace.json is written) or raises NotFound. model: a name for people, kept
        when the namespace is begun. codec: how its objects are stored if it is begun: "none", "shuffle-zstd" (which
        needs `pip install 'tplayout[zstd]'`), or None for what goes with the encryption key. Digest and codec of a
        namespace that exists are adopted. encryption_key: 32 bytes; everything is stored encrypted with it, in the
        codec "aes-256-gcm" (which needs `pip install 'tplayout[encrypt]'`).

        Raises FormatError wrong-secret or wrong-encryption-key when the namespace has another secret or key, or one
        where none is given, or none where one is; NamespaceMismatch naming the field if the document there is another
        identity's; ConfigError for an argument of another type, before anything is read or written.
        """
        check_type("store", store, (Store, str, PathLike), "a Store, or the URL or path of one")
        check_type(
            "identity", identity, Identity, "an Identity: describe_model(path) makes that of a model's directory"
        )
        check_type("secret", secret, (bytes, NoneType), "bytes")
        check_type("create", create, bool, "True or False")
        check_type("model", model, str, "text, the model's name for people")
        check_type("codec", codec, (str, NoneType), "text, or None for what goes with the encryption key")
        check_type("encryption_key", encryption_key, (bytes, NoneType), "32 bytes")
        key = None if encryption_key is None else EncryptionKey(encryption_key)
        if isinstance(store, Store):
            if storage_options is not None:
                raise ConfigError("storage_options go with a URL; this store is open already")
            hasher, opened_codec = open_namespace(store, identity, secret, create, model, codec, key)
            return cls(store, identity, hasher, opened_codec)
        from tplayout.storage.url import open_store

        opened = open_store(store, storage_options)
        try:
            hasher, opened_codec = open_namespace(opened, identity, secret, create, model, codec, key)
            return cls(opened, identity, hasher, opened_codec, owned=True)
        except BaseException:
            opened.close()
            raise

    @property
    def geometry(self) -> Geometry:
        """Chunk size and groups."""
        return self.identity.geometry

    @property
    def namespace(self) -> str:
        """The directory in the store, 32 hex digits."""
        return namespace_name(self._digest)

    def chunks(self, tokens: Iterable[int], extras: Extras | ExtrasOf = ()) -> list[ChunkId]:
        """The full chunks of a prompt, in order; the rest of fewer than chunk_tokens has none.

        extras: what KV depends on besides tokens: (tag, payload) pairs of every chunk, or a function from a chunk's
        index to its pairs (see `prefix_extras`). Raises GeometryError for ids that are not 0 .. 2**31-1, ConfigError
        for extras that are no such pairs.
        """
        try:
            numbers = list(map(operator.index, tokens))
        except TypeError as error:
            raise GeometryError(f"token ids must be integers: {error}") from None
        of_chunk = extras if callable(extras) else lambda index: extras
        return chain(self._digest, numbers, self.geometry.chunk_tokens, of_chunk)

    def longest_prefix(self, tokens: Iterable[int], extras: Extras | ExtrasOf = (), verify: bool = False) -> Prefix:
        """The longest prefix of a prompt that the store can serve, up to its first gap.

        verify: also read and verify the objects that count, logging damaged ones, which are gaps. Without, objects
        are only asked for, and `get` may still find one damaged.
        """
        chunks = self.chunks(tokens, extras)

        def exist(places: Sequence[Place]) -> list[bool]:
            return self.store.exists([self._name(chunks[chunk], group) for chunk, group in places])

        def sound(place: Place) -> bool:
            return self._sound(chunks[place[0]], place[1])

        count = servable(self.geometry, len(chunks), exist, sound if verify else None)
        return Prefix(count * self.geometry.chunk_tokens, tuple(chunks[:count]))

    def put(self, chunk: ChunkId, arrays: ShardArrays | Mapping[int | str, ShardArrays]) -> None:
        """Store a chunk that is given in any sharding; an object that is there is replaced.

        arrays: {group name or index: {Shard: array}}, or {Shard: array} where there is one group. A group's shards
        must tile it exactly (no replicas). Arrays are numpy or torch, [heads, layers, parts, tokens, dim] (for parts of
        unequal width [heads, layers, tokens, dims of all parts]), of the group's dtype, with any strides. Each group
        is an object of its own, so groups may come in several calls, and a window that is gone in none.

        Raises GeometryError for shards that do not tile the group, ConfigError for an array of another dtype or shape,
        FormatError wrong-key for a chunk of another cache. Everything is checked before the first object is stored.
        """
        _check_chunk(chunk)
        by_group = self._by_group(arrays)
        for index, shards in by_group.items():
            check_cover(self.geometry.groups[index], shards)
        bits = {
            index: [(shard, as_bits(array, self._layout(index), shard)) for shard, array in shards.items()]
            for index, shards in by_group.items()
        }
        for index, pieces in bits.items():
            layout, name = self._layout(index), self._name(chunk, index)
            buf = bytearray(layout.nbytes)
            for shard, values in pieces:
                write_cells(buf, layout, shard, values)
            try:
                seal(buf, layout, self._digest, chunk, self._hasher)
            except FormatError as error:
                raise error.at(name) from None
            self._objects.put(name, buf)

    def get(self, chunk: ChunkId, shard: Shard | None = None, group: int | str = 0, as_: str = "numpy") -> Any:
        """A shard of a stored chunk (None: all of the group), verified, as "numpy" or "torch", in memory of its own.

        Reads the shard's bytes only (with a codec also the tables that say where they are). Shape and dtype as in
        `put`; bfloat16 and float8 are ml_dtypes' in numpy. Raises NotFound if it is not stored, FormatError if it is
        damaged or misplaced, GeometryError for a shard or group that the geometry does not have.
        """
        _check_chunk(chunk)
        check_type("shard", shard, (Shard, NoneType), "a Shard (shard_of gives a rank's), or None for all of the group")
        check_kind(as_)
        index = self._index(group)
        layout = self._layout(index)
        shard = whole(layout.group) if shard is None else shard
        name = self._name(chunk, index)
        parts = {span: self._read(name, span) for span in layout.shard_sections(shard)}
        try:
            verify_shard(parts, layout, chunk.key, self._hasher, shard)
        except FormatError as error:
            raise error.at(name) from None
        with suppress(StorageError):
            self.store.touch([name], deadline=_TOUCH_S)
        return from_bits(read_cells(parts, layout, shard), layout.group, as_)

    def close(self) -> None:
        """Close the store if it was opened here. Closing again does nothing."""
        if self._owned:
            self.store.close()

    def __enter__(self) -> Cache:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Cache({self.store.url!r}, namespace {self.namespace})"

    def _name(self, chunk: ChunkId, group: int) -> str:
        return object_name(self.namespace, chunk.key, group)

    def _layout(self, group: int) -> ChunkLayout:
        return chunk_layout(self.geometry, group, self._hasher.name, self._hasher.key_id)

    def _index(self, group: int | str) -> int:
        if not isinstance(group, int):
            return self.geometry.group_index(group)
        if not 0 <= group < len(self.geometry.groups):
            raise GeometryError(f"no group {group} in a geometry of {len(self.geometry.groups)}")
        return group

    def _by_group(self, arrays: ShardArrays | Mapping[int | str, ShardArrays]) -> dict[int, ShardArrays]:
        """arrays with groups by index."""
        names = ", ".join(group.name for group in self.geometry.groups)
        check_type(
            "arrays", arrays, Mapping, "{Shard: array}, or {group: {Shard: array}}; whole(group) is all of a group"
        )
        if not arrays:
            raise ConfigError("put: no arrays given")
        plain = [isinstance(key, Shard) for key in arrays]
        if all(plain):
            if len(self.geometry.groups) > 1:
                raise ConfigError(f"put: there are the groups {names}: give {{group: {{Shard: array}}}}")
            return {0: arrays}  # type: ignore[dict-item]
        if any(plain):
            raise ConfigError("put: give either {Shard: array} or {group: {Shard: array}}, not both in one")
        by_group: dict[int, ShardArrays] = {}
        for key, shards in arrays.items():
            index = self._index(key)  # type: ignore[arg-type]
            if index in by_group:
                raise ConfigError(f"put: group {self.geometry.groups[index].name!r} is given twice, by name and index")
            if not isinstance(shards, Mapping) or not all(isinstance(shard, Shard) for shard in shards):
                raise ConfigError(f"put: group {key!r} must map each Shard to its array")
            by_group[index] = shards
        return by_group

    def _read(self, name: str, span: range) -> bytes:
        try:
            return self._objects.get_range(name, span.start, len(span))
        except StorageError as error:
            raise as_damage(error, name) from None

    def _sound(self, chunk: ChunkId, group: int) -> bool:
        """Whether the object is there and intact."""
        layout, name = self._layout(group), self._name(chunk, group)
        buf = memoryview(bytearray(layout.nbytes))
        try:
            try:
                length = self._objects.get_into(name, buf)
            except StorageError as error:
                raise as_damage(error, name) from None
            verify(buf[:length], layout, self._digest, chunk.key, self._hasher)
        except NotFound:
            return False
        except FormatError as error:
            log.warning("tplayout: damaged object: %s", error.at(name))
            return False
        return True


def _check_chunk(chunk: ChunkId) -> None:
    check_type("chunk", chunk, ChunkId, "a ChunkId, one of those that cache.chunks(tokens) returns")
    for name in ("key", "parent", "extras"):
        value = getattr(chunk, name)
        if not isinstance(value, bytes) or len(value) != KEY_BYTES:
            raise ConfigError(f"chunk: its {name} must be {KEY_BYTES} bytes; take it from cache.chunks(tokens)")
