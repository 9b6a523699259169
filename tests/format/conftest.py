"""Small geometries and objects that the format tests share; nothing here is random."""

from collections.abc import Callable

import pytest

from tplayout.format.chunk import seal
from tplayout.format.digest import CellHasher, make_hasher
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.keys import ChunkId, chain
from tplayout.format.layout import ChunkLayout, chunk_layout

NAMESPACE = bytes(range(32))
SECRET = b"a secret of some length"


class Sealed:
    """One sealed object and what is needed to check it."""

    def __init__(self, geometry: Geometry, group_index: int, hasher: CellHasher, chunk: ChunkId) -> None:
        self.namespace = NAMESPACE
        self.geometry = geometry
        self.hasher = hasher
        self.chunk = chunk
        self.layout: ChunkLayout = chunk_layout(geometry, group_index, hasher.name, hasher.key_id)
        self.buf = bytearray(b"\xff" * self.layout.nbytes)
        count = 0
        for head in range(self.layout.group.heads):
            for layer in range(len(self.layout.group.layers)):
                span = self.layout.cell_range(head, layer)
                self.buf[span.start : span.stop] = bytes((count + i) % 251 for i in range(len(span)))
                count += len(span)
        seal(self.buf, self.layout, NAMESPACE, chunk, hasher)


@pytest.fixture(scope="session")
def tiny() -> Geometry:
    """Two groups: 2 heads x layers 0, 2 x (K, V) x 4 tokens x dim 2 of F16, and a window group."""
    parts = (Part("k", 2), Part("v", 2))
    full = Group("full", "full", (0, 2), 2, parts, "F16")
    window = Group("window", "window", (1, 3), 2, parts, "F16", window=8)
    return Geometry(4, (full, window))


@pytest.fixture(scope="session")
def make_sealed(tiny: Geometry) -> Callable[..., Sealed]:
    """A factory of sealed objects of `tiny`, or of another geometry."""

    def make(
        geometry: Geometry = tiny, group_index: int = 0, secret: bytes | None = None, digest: str | None = None
    ) -> Sealed:
        chunk = chain(NAMESPACE, range(1, geometry.chunk_tokens + 1), geometry.chunk_tokens)[0]
        return Sealed(geometry, group_index, make_hasher(digest, secret), chunk)

    return make
