"""Chunk objects that the benchmarks store and fetch: their geometry, names and bytes."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from bench.measure import Shape
from tplayout.format.chunk import seal, verify
from tplayout.format.digest import CellHasher, make_hasher
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.identity import Identity
from tplayout.format.keys import ChunkId, chain, object_name
from tplayout.format.layout import chunk_layout
from tplayout.storage import Store


def geometry(shape: Shape) -> Geometry:
    """One group of bfloat16."""
    parts = (Part("k", shape.dim), Part("v", shape.dim))
    group = Group("full", "full", tuple(range(shape.layers)), shape.heads, parts, "BF16")
    return Geometry(shape.tokens, (group,))


def identity(shape: Shape) -> Identity:
    """Of a model that has no files."""
    return Identity("files:bench", {}, "bfloat16", None, geometry(shape))


class Objects:
    """Sealed objects in memory, of the chunks of one prompt."""

    def __init__(self, shape: Shape, count: int, hasher: CellHasher | None = None) -> None:
        """hasher: None for the default without a secret."""
        self.hasher = hasher or make_hasher()
        self.identity = identity(shape)
        self.layout = chunk_layout(self.identity.geometry, 0, self.hasher.name, self.hasher.key_id)
        self.namespace = self.identity.digest()
        self.chunks = chain(self.namespace, range(count * shape.tokens), shape.tokens)
        self.names = [self.name(chunk) for chunk in self.chunks]
        cells = os.urandom(self.layout.nbytes)
        self.buffers = [memoryview(bytearray(cells)) for _ in self.chunks]
        self.each(self.seal)

    def name(self, chunk: ChunkId) -> str:
        """Of a chunk's object."""
        return object_name(self.identity.namespace, chunk.key, 0)

    def each(self, work: Callable[[int], object], pool: ThreadPoolExecutor | None = None) -> None:
        """work(index) for all objects, one after the other, or as many at a time as the pool has threads."""
        list((map if pool is None else pool.map)(work, range(len(self.chunks))))

    def seal(self, index: int) -> None:
        """Complete an object."""
        seal(self.buffers[index], self.layout, self.namespace, self.chunks[index], self.hasher)

    def verify(self, index: int) -> None:
        """Verify an object; raises FormatError."""
        verify(self.buffers[index], self.layout, self.namespace, self.chunks[index].key, self.hasher)

    def put(self, store: Store, index: int) -> None:
        """Store an object."""
        store.put(self.names[index], self.buffers[index])

    def get(self, store: Store, index: int) -> None:
        """Fetch an object into its buffer."""
        store.get_into(self.names[index], self.buffers[index])
