"""Stores, identities and synthetic KV that the cache's tests share."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.shapes import Shapes
from tplayout.cache import Cache
from tplayout.format.geometry import Group
from tplayout.format.identity import Identity
from tplayout.format.sharding import Shard, shard_of, writes
from tplayout.storage.base import Store
from tplayout.storage.url import open_store

TOKENS = list(range(100, 123))  # five chunks of four, and three tokens more


class Kit(Shapes):
    """What tests build caches and KV from."""

    TOKENS = TOKENS

    @staticmethod
    def kv(group: Group, chunk_tokens: int = 4, seed: int = 0) -> np.ndarray[Any, Any]:
        """Random BITS of a whole group, NaNs with payloads among them, as unsigned integers."""
        shape = (group.heads, len(group.layers), *group.cell_shape(chunk_tokens))
        width = group.element_bytes
        return np.random.default_rng(seed).integers(0, 256**width, shape, dtype=f"u{width}")

    @staticmethod
    def numpy(bits: np.ndarray[Any, Any], group: Group) -> np.ndarray[Any, Any]:
        import ml_dtypes

        names: dict[str, Any] = {"F32": "f4", "F16": "f2", "U8": "u1", "BF16": ml_dtypes.bfloat16}
        names |= {"F8_E4M3": ml_dtypes.float8_e4m3fn, "F8_E5M2": ml_dtypes.float8_e5m2}
        return bits.view(names[group.dtype])

    @staticmethod
    def torch(bits: np.ndarray[Any, Any], group: Group) -> Any:
        import torch

        names = {"F32": "float32", "F16": "float16", "U8": "uint8", "BF16": "bfloat16"}
        names |= {"F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2"}
        raw = torch.from_numpy(bits.copy().view({1: "u1", 2: "i2", 4: "i4"}[group.element_bytes]))
        return raw.view(getattr(torch, names[group.dtype]))

    @staticmethod
    def bits(array: Any) -> bytes:
        """The bytes of an array or tensor in row-major order."""
        if not isinstance(array, np.ndarray):
            import torch

            return array.contiguous().view(torch.uint8).numpy().tobytes()
        return array.tobytes()

    @staticmethod
    def writers(group: Group, tp: int, stages: tuple[range, ...] | None = None) -> list[Shard]:
        """The shards of the ranks that write."""
        stages = stages or (range(max(group.layers) + 1),)
        ranks = [rank for rank in range(tp) if writes(group.heads, tp, rank)]
        return [shard_of(group, tp, rank, layers) for rank in ranks for layers in stages]

    @staticmethod
    def cut(array: Any, shard: Shard) -> Any:
        """A shard of a whole group's array: a view, usually not contiguous."""
        return array[shard.heads.start : shard.heads.stop, shard.layers.start : shard.layers.stop]

    @classmethod
    def fill(cls, cache: Cache, count: int = 5, tp: int = 1, seed: int = 0) -> None:
        """Put the first chunks of TOKENS with all groups."""
        for chunk in cache.chunks(TOKENS)[:count]:
            arrays: dict[int | str, Any] = {}
            for index, group in enumerate(cache.geometry.groups):
                whole = cls.numpy(cls.kv(group, cache.geometry.chunk_tokens, seed + 64 * chunk.index + index), group)
                arrays[group.name] = {shard: cls.cut(whole, shard) for shard in cls.writers(group, tp)}
            cache.put(chunk, arrays)


@pytest.fixture(scope="session")
def kit() -> type[Kit]:
    return Kit


@pytest.fixture(params=["file", "memory"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """An empty store."""
    place = tmp_path / "store"
    return f"file://{place}" if request.param == "file" else f"memory://{str(place).strip('/')}"


@pytest.fixture
def store(url: str) -> Iterator[Store]:
    with open_store(url) as opened:
        yield opened


@pytest.fixture
def one_group(kit: type[Kit]) -> Identity:
    """4 heads x 3 layers, one group."""
    return kit.identity(kit.group())


@pytest.fixture
def windowed(kit: type[Kit]) -> Identity:
    """A full group, and one whose window is two chunks less a token."""
    return kit.identity(kit.group(layers=(0, 2)), kit.group("window-7", "window", layers=(1, 3), window=7))


@pytest.fixture
def damage(store: Store) -> Callable[[str, int], None]:
    """Flip one bit of an object."""

    def flip(name: str, offset: int) -> None:
        data = bytearray(store.get(name))
        data[offset] ^= 1
        store.put(name, data)

    return flip
