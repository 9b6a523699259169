"""Stores for the tests of tools: tiny geometries, real chunk objects, and ways to damage them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tplayout.cache import Cache
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.identity import Identity
from tplayout.format.keys import ChunkId, object_name
from tplayout.format.layout import ChunkLayout, chunk_layout
from tplayout.format.sharding import whole
from tplayout.storage.base import Store

CHUNK = 4


def group(
    name: str = "full", kind: Any = "full", layers: tuple[int, ...] = (0, 1), heads: int = 2, **more: Any
) -> Group:
    """A group of few small cells."""
    parts = more.pop("parts", (Part("k", 2), Part("v", 2)))
    return Group(name, kind, layers, heads, parts, more.pop("dtype", "F16"), **more)


def identity(*groups: Group, chunk_tokens: int = CHUNK, weights: str = "files:00", **more: Any) -> Identity:
    """An identity of one group, unless others are given."""
    fields = {"config": {"rope_theta": 10000.0}, "compute_dtype": "float16", "quantization": None, **more}
    return Identity(weights=weights, geometry=Geometry(chunk_tokens, groups or (group(),)), **fields)


def fill(cache: Cache, tokens: Sequence[int], extras: Any = (), groups: Sequence[int] | None = None) -> list[ChunkId]:
    """Put all chunks of a prompt with KV that is a function of the chunk's key."""
    chunks = cache.chunks(tokens, extras)
    for chunk in chunks:
        put(cache, chunk, groups)
    return chunks


def cache_with_a_gap(path: Path) -> Cache:
    """Two prompts that share two chunks; of the second the last but one is gone. The name of the model is hostile."""
    cache = Cache.open(path, identity(), model="my \x1b[31mmodel")
    fill(cache, range(20))
    chunks = fill(cache, [*range(8), *range(50, 62)])
    cache.store.delete([name_of(cache, chunks[3])])
    return cache


def put(cache: Cache, chunk: ChunkId, groups: Sequence[int] | None = None) -> None:
    """Put one chunk. groups: indices, None for all."""
    random = np.random.default_rng(list(chunk.key))
    arrays: dict[int | str, Any] = {}
    for index, own in enumerate(cache.geometry.groups):
        if groups is None or index in groups:
            shape = (own.heads, len(own.layers), *own.cell_shape(cache.geometry.chunk_tokens))
            arrays[own.name] = {whole(own): random.standard_normal(shape).astype("f2")}
    cache.put(chunk, arrays)


def name_of(cache: Cache, chunk: ChunkId, index: int = 0) -> str:
    """The name of a chunk's object."""
    return object_name(cache.namespace, chunk.key, index)


def layout_of_group(cache: Cache, index: int = 0) -> ChunkLayout:
    """Where everything is in the cache's objects."""
    return chunk_layout(cache.geometry, index, "xxh3-128", None)


def rewrite(store: Store, name: str, change: Callable[[bytearray], Any]) -> None:
    """Replace an object by a changed one. change: alters its argument, or returns other bytes."""
    data = bytearray(store.get(name))
    result = change(data)
    store.put(name, data if result is None else result)


def flip(offset: int, bit: int = 0) -> Callable[[bytearray], None]:
    """Flips one bit."""

    def change(data: bytearray) -> None:
        data[offset] ^= 1 << bit

    return change


def swap(store: Store, first: str, second: str) -> None:
    """Each object under the other's name."""
    one, other = store.get(first), store.get(second)
    store.put(first, other)
    store.put(second, one)


def file_of(url: str, name: str) -> Path:
    """Where a file store keeps a name."""
    return Path(url.removeprefix("file://")) / name
