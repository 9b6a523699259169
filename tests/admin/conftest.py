"""A small namespace with known KV that the tools' tests share."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.shapes import Shapes
from tplayout.admin.catalog import Secrets
from tplayout.admin.namespaces import OpenNamespace, begin_namespace
from tplayout.admin.transfer import store_prefix
from tplayout.format.identity import Identity
from tplayout.format.keys import Extras, chain
from tplayout.storage.base import Store
from tplayout.storage.url import open_store

TOKENS = list(range(100, 120))  # five chunks of four


class Whole:
    """The KV of a whole prefix: for each group an array [heads, layers, parts, tokens, dim] of bits; a `Source`."""

    def __init__(self, identity: Identity, tokens: int, seed: int = 0) -> None:
        self.arrays = []
        for index, group in enumerate(identity.geometry.groups):
            shape = (group.heads, len(group.layers), *group.cell_shape(tokens))
            if group.dtype.startswith("F"):  # finite values of ordinary size
                values = np.random.default_rng(seed + 64 * index).standard_normal(shape, dtype="f4")
                self.arrays.append(bits_of(values, group.dtype))
            else:
                self.arrays.append(np.random.default_rng(seed + index).integers(0, 256, shape, "u1"))

    def fill(self, group: int, tokens: range, out: np.ndarray[Any, Any]) -> bool:
        out[...] = self.arrays[group][..., tokens.start : tokens.stop, :]
        return True


def bits_of(values: np.ndarray[Any, Any], dtype: str) -> np.ndarray[Any, Any]:
    import ml_dtypes

    names: dict[str, Any] = {"F32": "f4", "F16": "f2", "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}
    cast = values.astype(names[dtype])
    return cast.view(f"u{cast.itemsize}")


class Kit(Shapes):
    """What tests build namespaces from."""

    TOKENS = TOKENS
    Whole = Whole

    @staticmethod
    def fill(
        store: Store,
        identity: Identity,
        tokens: Sequence[int] = TOKENS,
        seed: int = 0,
        extras: Extras = (),
        secret: bytes | None = None,
        codec: str | None = None,
    ) -> tuple[OpenNamespace, Whole]:
        """Store the KV of a prompt; the namespace and the KV."""
        target = begin_namespace(store, identity, "a-model", Secrets(secret), codec)
        whole = Whole(identity, len(tokens), seed)
        chunks = chain(target.digest, tokens, target.chunk_tokens, lambda index: extras)
        store_prefix(whole, chunks, target)
        return target, whole

    @staticmethod
    def content(store: Store) -> dict[str, bytes]:
        """Every object of a store."""
        return {info.key: store.get(info.key) for info in store.list()}

    @staticmethod
    def tree(directory: Path) -> dict[str, bytes]:
        """Every file below a directory."""
        return {str(p.relative_to(directory)): p.read_bytes() for p in sorted(directory.rglob("*")) if p.is_file()}


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit


@pytest.fixture
def make_store(tmp_path: Path) -> Iterator[Callable[[str], Store]]:
    """Stores in directories of those names."""
    opened = []

    def make(name: str = "store") -> Store:
        opened.append(open_store(tmp_path / name))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def store(make_store: Callable[[str], Store]) -> Store:
    return make_store("store")
