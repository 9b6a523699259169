"""Wrong arguments of `Cache` are refused by name, before anything is stored."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tplayout.cache import Cache
from tplayout.errors import ConfigError, FormatError, GeometryError, Reason
from tplayout.format.identity import Identity
from tplayout.format.keys import ChunkId
from tplayout.format.sharding import Shard, whole
from tplayout.storage.base import Store


@pytest.fixture
def cache(store: Store, one_group: Identity) -> Cache:
    return Cache.open(store, one_group, model="synthetic")


def stored(store: Store) -> Iterator[str]:
    return (info.key for info in store.list() if not info.key.endswith(".json"))


def test_shards_must_tile_the_group(cache: Cache, store: Store, kit: Any) -> None:
    (group,), chunk = cache.geometry.groups, cache.chunks(kit.TOKENS)[0]
    array = kit.numpy(kit.kv(group), group)
    halves = kit.writers(group, 2)
    with pytest.raises(GeometryError, match="6 cells missing, the first is head 2, layer 0"):
        cache.put(chunk, {halves[0]: kit.cut(array, halves[0])})
    both = [*halves, Shard(range(1, 2), range(3))]
    with pytest.raises(GeometryError, match="3 cells written twice, the first is head 1, layer 0"):
        cache.put(chunk, {shard: kit.cut(array, shard) for shard in both})
    with pytest.raises(GeometryError, match="has 4 heads"):
        cache.put(chunk, {Shard(range(8), range(3)): array})
    assert list(stored(store)) == []


def test_nothing_is_stored_unless_all_is_right(store: Store, windowed: Identity, kit: Any) -> None:
    cache = Cache.open(store, windowed)
    full, window = windowed.geometry.groups
    right, wrong = kit.numpy(kit.kv(full), full), np.zeros((4, 2, 2, 4, 8), "i1")
    arrays = {"full": {whole(full): right}, "window-7": {whole(window): wrong}}
    chunk = cache.chunks(kit.TOKENS)[0]
    with pytest.raises(ConfigError, match=r"group 'window-7'.*dtype is int8"):
        cache.put(chunk, arrays)
    assert list(stored(store)) == []


def test_forms_of_arrays(cache: Cache, store: Store, windowed: Identity, kit: Any) -> None:
    (group,), chunk = cache.geometry.groups, cache.chunks(kit.TOKENS)[0]
    array = kit.numpy(kit.kv(group), group)
    for arrays in ({whole(group): array}, {0: {whole(group): array}}, {"full": {whole(group): array}}):
        cache.put(chunk, arrays)
    for arrays, match in (
        ({}, "no arrays"),
        ({whole(group): array, 0: {}}, "not both"),
        ({0: {whole(group): array}, "full": {whole(group): array}}, "'full' is given twice"),
        ({0: array}, "group 0 must map each Shard"),
        ({0: {0: array}}, "group 0 must map each Shard"),
    ):
        with pytest.raises(ConfigError, match=match):
            cache.put(chunk, arrays)  # type: ignore[arg-type]
    two = Cache.open(store, windowed)
    with pytest.raises(ConfigError, match="groups full, window-7: give"):
        two.put(two.chunks(kit.TOKENS)[0], {whole(group): array})


@pytest.mark.parametrize("group", [1, -1, "window", None])
def test_groups_that_are_not_there(cache: Cache, kit: Any, group: Any) -> None:
    chunk = cache.chunks(kit.TOKENS)[0]
    with pytest.raises(GeometryError, match="no group"):
        cache.get(chunk, group=group)
    with pytest.raises(GeometryError, match="no group"):
        cache.put(chunk, {group: {}})


def test_shards_that_are_not_there(cache: Cache, kit: Any) -> None:
    with pytest.raises(GeometryError, match="'full' does not hold"):
        cache.get(cache.chunks(kit.TOKENS)[0], Shard(range(3, 5), range(3)))


def test_as_other_things(cache: Cache, kit: Any) -> None:
    with pytest.raises(ConfigError, match="as_ is 'jax', must be 'numpy' or 'torch'"):
        cache.get(cache.chunks(kit.TOKENS)[0], as_="jax")


def test_chunks_of_another_cache(cache: Cache, store: Store, kit: Any) -> None:
    (group,) = cache.geometry.groups
    other = Cache.open(store, kit.identity(kit.group(), weights="files:02"))
    with pytest.raises(FormatError) as caught:
        cache.put(other.chunks(kit.TOKENS)[0], {whole(group): kit.numpy(kit.kv(group), group)})
    assert caught.value.reason is Reason.WRONG_KEY
    assert list(stored(store)) == []


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("store", 5),
        ("store", None),
        ("identity", "./my-model"),
        ("identity", None),
        ("secret", "sixteen characters or more"),
        ("secret", 16),
        ("create", "no"),
        ("model", None),
        ("model", 5),
        ("codec", 5),
        ("encryption_key", "32 characters"),
        ("encryption_key", 32),
    ],
)
def test_arguments_of_open_are_refused_by_name_before_anything_is_written(
    store: Store, one_group: Identity, argument: str, value: Any
) -> None:
    given = {"store": store, "identity": one_group, argument: value}
    with pytest.raises(ConfigError, match=f"^{argument} must be ") as caught:
        Cache.open(**given)
    assert "characters" not in str(caught.value)
    assert list(store.list()) == []
    Cache.open(store, one_group).close()  # and nothing is in the way of who does it right


@pytest.mark.parametrize("chunk", [0, None, b"k" * 32, [], "key"])
def test_what_is_no_chunk(cache: Cache, store: Store, kit: Any, chunk: Any) -> None:
    (group,) = cache.geometry.groups
    array = kit.numpy(kit.kv(group), group)
    for call in (lambda: cache.get(chunk), lambda: cache.put(chunk, {whole(group): array})):
        with pytest.raises(ConfigError, match=r"^chunk must be a ChunkId, one of those that cache\.chunks"):
            call()
    assert list(stored(store)) == []


@pytest.mark.parametrize("wrong", [{"key": "k"}, {"parent": b"short"}, {"extras": 5}])
def test_a_chunk_made_by_hand(cache: Cache, kit: Any, wrong: Any) -> None:
    right = cache.chunks(kit.TOKENS)[0]
    fields = {"key": right.key, "parent": right.parent, "tokens": right.tokens, "extras": right.extras, **wrong}
    with pytest.raises(ConfigError, match=f"^chunk: its {next(iter(wrong))} must be 32 bytes"):
        cache.get(ChunkId(**fields))


@pytest.mark.parametrize("arrays", [np.zeros((4, 3)), [np.zeros((4, 3))], None, "arrays"])
def test_arrays_without_their_shards(cache: Cache, kit: Any, arrays: Any) -> None:
    with pytest.raises(ConfigError, match=r"^arrays must be \{Shard: array\}"):
        cache.put(cache.chunks(kit.TOKENS)[0], arrays)


@pytest.mark.parametrize("shard", [5, range(2), "all"])
def test_what_is_no_shard(cache: Cache, kit: Any, shard: Any) -> None:
    with pytest.raises(ConfigError, match=r"^shard must be a Shard"):
        cache.get(cache.chunks(kit.TOKENS)[0], shard)


@pytest.mark.parametrize(
    "extras", ["tenant", 5, None, [5], [("salt",)], [("salt", "text")], [(b"salt", b"x")], lambda index: "tenant"]
)
def test_what_are_no_extras(cache: Cache, kit: Any, extras: Any) -> None:
    for call in (cache.chunks, cache.longest_prefix):
        with pytest.raises(ConfigError, match=r"^extras must be pairs"):
            call(kit.TOKENS, extras)
