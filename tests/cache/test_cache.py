"""Putting chunks from any sharding, getting them in any, and what happens when something is wrong."""

import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load

from tplayout.cache import Cache
from tplayout.errors import ConfigError, FormatError, GeometryError, NotFound, Reason, Unavailable
from tplayout.format.geometry import DTYPE_BYTES, Group, Part
from tplayout.format.identity import Identity
from tplayout.format.keys import EXTRA_SALT, object_name, prefix_extras
from tplayout.format.sharding import Shard, pp_layer_ranges, shard_of, whole
from tplayout.storage.base import Store
from tplayout.storage.url import open_store

Damage = Callable[[str, int], None]


@pytest.fixture
def cache(store: Store, one_group: Identity) -> Cache:
    return Cache.open(store, one_group, model="synthetic")


def name_of(cache: Cache, chunk: Any, group: int = 0) -> str:
    return object_name(cache.namespace, chunk.key, group)


# -- round trips -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("form", ["numpy", "torch"])
def test_any_sharding_to_any_sharding(store: Store, kit: Any, dtype: str, form: str) -> None:
    heads, layers = 12, (0, 1, 2, 3, 4)
    scales = ((1.0, 1.0),) * 5 if dtype.startswith("F8") else None
    group = kit.group(dtype=dtype, heads=heads, layers=layers, scales=scales)
    cache = Cache.open(store, kit.identity(group))
    chunks = cache.chunks(kit.TOKENS)
    shardings = [(tp, pp) for tp in (1, 3, 4, 24) for pp in (1, 2)]
    for chunk, (tp, pp) in zip(chunks, [(1, 1), (3, 2), (4, 1), (12, 2), (24, 1)], strict=True):
        bits = kit.kv(group, seed=chunk.index)
        array = kit.numpy(bits, group) if form == "numpy" else kit.torch(bits, group)
        writers = kit.writers(group, tp, tuple(pp_layer_ranges(5, pp)))
        cache.put(chunk, {shard: kit.cut(array, shard) for shard in writers})
        assert kit.bits(cache.get(chunk, as_=form)) == bits.tobytes()
        for read_tp, read_pp in shardings:
            for rank in range(0, read_tp, 5):
                for stage in pp_layer_ranges(5, read_pp):
                    shard = shard_of(group, read_tp, rank, stage)
                    found = cache.get(chunk, shard, as_=form)
                    assert found.dtype == array.dtype
                    assert kit.bits(found) == kit.cut(bits, shard).tobytes()
    assert cache.longest_prefix(kit.TOKENS, verify=True).tokens == 20


def test_several_groups(store: Store, kit: Any) -> None:
    groups = (
        kit.group(layers=(0, 3)),
        kit.group("window-5", "window", layers=(1, 4), heads=2, dtype="BF16", window=5),
        kit.group("latent", "latent", heads=1, layers=(2,), parts=(Part("latent", 24), Part("rope", 8)), dtype="F32"),
        kit.group("state", "state", heads=6, layers=(5, 6), parts=(Part("conv", 3), Part("ssm", 16)), dtype="F32"),
    )
    cache = Cache.open(store, kit.identity(*groups))
    kit.fill(cache, tp=2)
    prefix = cache.longest_prefix(kit.TOKENS, verify=True)
    assert prefix.tokens == 20
    assert prefix.chunks == tuple(cache.chunks(kit.TOKENS))
    for chunk in prefix.chunks:
        for index, group in enumerate(groups):
            bits = kit.kv(group, seed=64 * chunk.index + index)
            assert kit.bits(cache.get(chunk, group=group.name)) == bits.tobytes()
            for rank in range(2):
                shard = shard_of(group, 2, rank)
                assert kit.bits(cache.get(chunk, shard, index, "torch")) == kit.cut(bits, shard).tobytes()


@pytest.mark.parametrize("heads", [4, 2])
def test_stores_written_at_any_tp_are_identical(tmp_path: Path, kit: Any, heads: int) -> None:
    """Written at TP=1, 2 and 4 from the same KV, the stores are byte-identical, file for file."""
    identity = kit.identity(kit.group(heads=heads), kit.group("window-7", "window", heads=heads, window=7))
    trees: list[dict[str, bytes]] = []
    for tp in (1, 2, 4):
        root = tmp_path / f"tp{tp}"
        with Cache.open(f"file://{root}", identity, model="synthetic") as cache:
            kit.fill(cache, tp=tp)
        files = [path for path in root.rglob("*") if path.is_file()]
        trees.append({str(path.relative_to(root)): path.read_bytes() for path in files})
    assert len(trees[0]) == 1 + 5 * 2
    assert f"{identity.namespace}/namespace.json" in trees[0]
    assert trees[0] == trees[1] == trees[2]


def test_replicas_are_stored_once_and_read_by_all(cache: Cache, store: Store, kit: Any) -> None:
    """2 heads at TP=4: ranks 0 and 2 write, each rank reads its head."""
    group = kit.group(heads=2)
    cache = Cache.open(store, kit.identity(group))
    chunk, bits = cache.chunks(kit.TOKENS)[0], kit.kv(group)
    writers = kit.writers(group, 4)
    assert [shard.heads for shard in writers] == [range(1), range(1, 2)]
    array = kit.numpy(bits, group)
    cache.put(chunk, {shard: kit.cut(array, shard) for shard in writers})
    for rank in range(4):
        assert kit.bits(cache.get(chunk, shard_of(group, 4, rank))) == bits[rank // 2 : rank // 2 + 1].tobytes()


def test_elements_are_where_the_safetensors_library_finds_them(cache: Cache, store: Store, kit: Any) -> None:
    kit.fill(cache, 1, tp=4)
    (group,), chunk = cache.geometry.groups, cache.chunks(kit.TOKENS)[0]
    tensors = load(store.get(name_of(cache, chunk)))
    for head in range(4):
        assert tensors[f"h{head}.kv"].tobytes() == kit.kv(group)[head].tobytes()
    assert tensors["tokens"].tolist() == kit.TOKENS[:4]


def test_arrays_are_fresh_and_writable(cache: Cache, kit: Any) -> None:
    kit.fill(cache, 1)
    chunk = cache.chunks(kit.TOKENS)[0]
    for as_ in ("numpy", "torch"):
        cache.get(chunk, as_=as_)[...] = 0
        assert kit.bits(cache.get(chunk, as_=as_)) == kit.kv(cache.geometry.groups[0]).tobytes()


def test_only_the_shards_bytes_are_read(store: Store, kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    group = kit.group(heads=8, layers=tuple(range(16)), parts=(Part("k", 64), Part("v", 64)))
    cache = Cache.open(store, kit.identity(group, chunk_tokens=16))
    chunk = cache.chunks(range(16))[0]
    array = kit.numpy(kit.kv(group, 16), group)
    cache.put(chunk, {whole(group): array})
    read: list[int] = []
    plain = type(store).get_range

    def counting(self: Store, key: str, start: int, length: int, **kwargs: Any) -> bytes:
        read.append(length)
        return plain(self, key, start, length, **kwargs)

    monkeypatch.setattr(type(store), "get_range", counting)
    found = cache.get(chunk, shard_of(group, 4, 1))
    assert len(read) == 1
    assert found.nbytes < read[0] < found.nbytes + 2 * 4096  # digests, and the padding between the heads


def test_putting_again_repairs(cache: Cache, damage: Damage, kit: Any) -> None:
    kit.fill(cache, 1)
    chunk = cache.chunks(kit.TOKENS)[0]
    damage(name_of(cache, chunk), -1)
    assert cache.longest_prefix(kit.TOKENS, verify=True).tokens == 0
    kit.fill(cache, 1)
    assert cache.longest_prefix(kit.TOKENS, verify=True).tokens == 4


# -- prefixes --------------------------------------------------------------------------------------------------------


def test_chunks_of_any_sequence_of_integers(cache: Cache, kit: Any) -> None:
    chunks = cache.chunks(kit.TOKENS)
    assert [chunk.index for chunk in chunks] == [0, 1, 2, 3, 4]
    assert [chunk.tokens for chunk in chunks][-1] == tuple(kit.TOKENS[16:20])
    for tokens in (tuple(kit.TOKENS), iter(kit.TOKENS), np.array(kit.TOKENS), torch.tensor(kit.TOKENS)):
        assert cache.chunks(tokens) == chunks
    assert cache.chunks([1, 2, 3]) == []


@pytest.mark.parametrize("tokens", [[1.0] * 4, "text", [-1] * 4, [2**31] * 4, [None] * 4])
def test_tokens_that_are_none(cache: Cache, tokens: Any) -> None:
    with pytest.raises(GeometryError, match="token id"):
        cache.chunks(tokens)


def test_extras_part_prefixes(cache: Cache, kit: Any) -> None:
    plain = cache.chunks(kit.TOKENS)
    salted = cache.chunks(kit.TOKENS, [(EXTRA_SALT, b"tenant")])
    assert {chunk.key for chunk in plain}.isdisjoint(chunk.key for chunk in salted)
    assert cache.chunks(kit.TOKENS, prefix_extras(4, salt="tenant")) == salted
    kit.fill(cache)
    assert cache.longest_prefix(kit.TOKENS, [(EXTRA_SALT, b"tenant")]).tokens == 0


def test_longest_prefix_ends_at_the_first_gap(cache: Cache, store: Store, kit: Any) -> None:
    assert cache.longest_prefix(kit.TOKENS).tokens == 0
    kit.fill(cache)
    chunks = cache.chunks(kit.TOKENS)
    assert cache.longest_prefix(kit.TOKENS).chunks == tuple(chunks)
    assert cache.longest_prefix([*kit.TOKENS[:9], 0, *kit.TOKENS[10:]]).tokens == 8
    store.delete([name_of(cache, chunks[3])])
    assert cache.longest_prefix(kit.TOKENS).chunks == tuple(chunks[:3])
    store.delete([name_of(cache, chunks[0])])
    assert cache.longest_prefix(kit.TOKENS) == cache.longest_prefix([])


def test_windows_that_are_gone(store: Store, windowed: Identity, kit: Any) -> None:
    """A window of 7 tokens and chunks of 4: of n chunks only the last two need their window part."""
    cache = Cache.open(store, windowed)
    kit.fill(cache)
    chunks = cache.chunks(kit.TOKENS)
    for gone, tokens in ((0, 20), (1, 20), (2, 20), (4, 0)):  # chunk 3 alone serves nothing: all before it is gone
        store.delete([name_of(cache, chunks[gone], 1)])
        assert cache.longest_prefix(kit.TOKENS).tokens == tokens


def test_chunks_may_lack_their_window_part(store: Store, windowed: Identity, kit: Any) -> None:
    cache = Cache.open(store, windowed)
    full, window = windowed.geometry.groups
    for chunk in cache.chunks(kit.TOKENS):
        cache.put(chunk, {"full": {whole(full): kit.numpy(kit.kv(full), full)}})
    assert cache.longest_prefix(kit.TOKENS).tokens == 0
    for chunk in cache.chunks(kit.TOKENS)[1:3]:
        cache.put(chunk, {1: {whole(window): kit.numpy(kit.kv(window), window)}})
    assert cache.longest_prefix(kit.TOKENS).tokens == 12


def test_damage_is_a_gap_when_verified(
    cache: Cache, damage: Damage, kit: Any, caplog: pytest.LogCaptureFixture
) -> None:
    kit.fill(cache)
    name = name_of(cache, cache.chunks(kit.TOKENS)[2])
    damage(name, cache._layout(0).cell_range(3, 2).stop - 1)
    assert cache.longest_prefix(kit.TOKENS).tokens == 20
    with caplog.at_level(logging.WARNING, "tplayout"):
        assert cache.longest_prefix(kit.TOKENS, verify=True).tokens == 8
    assert name in caplog.text
    assert Reason.DIGEST_MISMATCH in caplog.text


@pytest.mark.parametrize("verify", [False, True])
def test_a_store_that_fails_is_not_a_miss(
    cache: Cache, kit: Any, verify: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    kit.fill(cache)

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise Unavailable("down")

    monkeypatch.setattr(cache.store, "get_into" if verify else "exists", fail)
    with pytest.raises(Unavailable):
        cache.longest_prefix(kit.TOKENS, verify=verify)


# -- damage ----------------------------------------------------------------------------------------------------------


def test_what_is_not_stored(cache: Cache, kit: Any) -> None:
    chunk = cache.chunks(kit.TOKENS)[0]
    with pytest.raises(NotFound, match=chunk.key.hex()):
        cache.get(chunk)


def test_flipped_bits(cache: Cache, damage: Damage, kit: Any) -> None:
    kit.fill(cache, 1)
    chunk = cache.chunks(kit.TOKENS)[0]
    layout = cache._layout(0)
    name, (group,) = name_of(cache, chunk), cache.geometry.groups
    for span in (layout.cell_range(2, 1), layout.digest_range(2, 1)):
        damage(name, span.start)
        for shard in (None, Shard(range(2, 3), range(1, 2)), shard_of(group, 4, 2)):
            with pytest.raises(FormatError, match=f"{name}.*head 2, layer 1") as caught:
                cache.get(chunk, shard)
            assert caught.value.reason is Reason.DIGEST_MISMATCH
        for shard in (Shard(range(2, 3), range(1)), shard_of(group, 4, 3)):
            assert kit.bits(cache.get(chunk, shard)) == kit.cut(kit.kv(group), shard).tobytes()
        damage(name, span.start)


@pytest.mark.parametrize("keep", [0, 1, 4095, 8192, -1])
def test_truncated_objects(cache: Cache, store: Store, kit: Any, keep: int) -> None:
    kit.fill(cache, 1)
    chunk = cache.chunks(kit.TOKENS)[0]
    name = name_of(cache, chunk)
    data = store.get(name)
    store.put(name, data[: keep % len(data)])
    if keep >= 0:
        with pytest.raises(FormatError, match=name) as caught:
            cache.get(chunk)
        assert caught.value.reason is Reason.TRUNCATED
    assert cache.longest_prefix(kit.TOKENS, verify=True).tokens == 0


def test_objects_with_bytes_behind(cache: Cache, store: Store, kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    kit.fill(cache, 1)
    name = name_of(cache, cache.chunks(kit.TOKENS)[0])
    store.put(name, store.get(name) + b"\0")
    assert cache.longest_prefix(kit.TOKENS, verify=True).tokens == 0
    assert Reason.TRAILING in caplog.text


def test_objects_under_another_name(cache: Cache, store: Store, kit: Any, caplog: pytest.LogCaptureFixture) -> None:
    kit.fill(cache, 2)
    first, second = cache.chunks(kit.TOKENS)[:2]
    store.put(name_of(cache, second), store.get(name_of(cache, first)))
    with pytest.raises(FormatError) as caught:
        cache.get(second)
    assert caught.value.reason is Reason.DIGEST_MISMATCH
    assert cache.longest_prefix(kit.TOKENS, verify=True).tokens == 4
    assert Reason.WRONG_KEY in caplog.text


def test_swapped_heads(cache: Cache, store: Store, kit: Any) -> None:
    kit.fill(cache, 1)
    chunk, layout = cache.chunks(kit.TOKENS)[0], cache._layout(0)
    data = bytearray(store.get(name_of(cache, chunk)))
    one, two = (slice(layout.head_section(h).start, layout.head_section(h).stop) for h in (1, 2))
    data[one], data[two] = data[two], data[one]
    store.put(name_of(cache, chunk), data)
    with pytest.raises(FormatError, match="head 1"):
        cache.get(chunk)


def test_forged_without_the_secret(store: Store, one_group: Identity, kit: Any) -> None:
    """Somebody without the secret replaces an object by a sound one of his own."""
    keyed = Cache.open(store, one_group, secret=b"the secret of the house")
    kit.fill(keyed, 1)
    with open_store("memory://forger") as elsewhere:
        forged = Cache.open(elsewhere, one_group)
        kit.fill(forged, 1, seed=1)
        chunk = keyed.chunks(kit.TOKENS)[0]
        store.put(name_of(keyed, chunk), elsewhere.get(name_of(forged, chunk)))
    with pytest.raises(FormatError):
        keyed.get(chunk)
    assert keyed.longest_prefix(kit.TOKENS, verify=True).tokens == 0


# -- codecs ----------------------------------------------------------------------------------------------------------


def assert_holds_all(kit: Any, reader: Cache, group: Group) -> None:
    """What `kit.fill` has put, in any sharding, bit for bit."""
    assert reader.longest_prefix(kit.TOKENS, verify=True).tokens == 20
    for chunk in reader.chunks(kit.TOKENS):
        wanted = kit.numpy(kit.kv(group, seed=64 * chunk.index), group)
        assert kit.bits(reader.get(chunk)) == wanted.tobytes()
        for shard in (*kit.writers(group, 4), Shard(range(1, 3), range(1, 2))):
            assert kit.bits(reader.get(chunk, shard)) == kit.cut(wanted, shard).tobytes()


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_a_packed_namespace_gives_what_a_plain_one_gives(kit: Any, store: Store, dtype: str) -> None:
    """Begun in a codec, adopted by who opens it, any sharding on both sides."""
    group = kit.group(dtype=dtype)
    identity = kit.identity(group)
    writer = Cache.open(store, identity, codec="shuffle-zstd")
    assert writer.namespace == identity.namespace
    kit.fill(writer, tp=2)
    reader = Cache.open(store, identity)
    assert_holds_all(kit, reader, group)
    stored = store.get(object_name(reader.namespace, reader.chunks(kit.TOKENS)[0].key, 0))
    assert b'"codec":"shuffle-zstd"' in stored[:4096]


def test_kv_of_small_entropy_takes_less_room(kit: Any, store: Store) -> None:
    group = kit.group(dtype="BF16", parts=(Part("k", 128), Part("v", 128)))
    cache = Cache.open(store, kit.identity(group, chunk_tokens=32), codec="shuffle-zstd")
    (chunk,) = cache.chunks(range(32))
    shape = (group.heads, len(group.layers), *group.cell_shape(32))
    values = np.random.default_rng(0).standard_normal(shape, dtype="f4").astype(ml_dtypes.bfloat16)
    cache.put(chunk, {whole(group): values})
    assert len(store.get(object_name(cache.namespace, chunk.key, 0))) < 0.75 * values.nbytes
    assert cache.get(chunk).tobytes() == values.tobytes()


def test_codecs_that_cannot_be_used_are_wrong_use(
    kit: Any, store: Store, one_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="none, shuffle-zstd"):
        Cache.open(store, one_group, codec="zip")
    assert list(store.list()) == []
    Cache.open(store, one_group, codec="shuffle-zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"pip install 'tplayout\[zstd\]'"):
        Cache.open(store, one_group)


# -- encryption ------------------------------------------------------------------------------------------------------

KEY = bytes(range(32))


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
def test_an_encrypted_namespace_gives_what_a_plain_one_gives(kit: Any, store: Store, dtype: str) -> None:
    """Begun by who has a key, adopted by who opens it with that, any sharding on both sides."""
    group = kit.group(dtype=dtype)
    identity = kit.identity(group)
    writer = Cache.open(store, identity, encryption_key=KEY)
    assert writer.namespace == identity.namespace
    kit.fill(writer, tp=2)
    assert_holds_all(kit, Cache.open(store, identity, encryption_key=KEY), group)


@settings(deadline=None, max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data(), secret=st.sampled_from([None, b"a secret of some length"]))
def test_any_sharding_of_an_encrypted_chunk(kit: Any, data: st.DataObject, secret: bytes | None) -> None:
    """Put in one, got in another: bit for bit."""
    heads, layers = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 4))
    group = kit.group(heads=heads, layers=tuple(range(layers)))
    identity = kit.identity(group)
    store = open_store(f"memory://any-{os.urandom(8).hex()}")
    cache = Cache.open(store, identity, encryption_key=KEY, secret=secret)
    (chunk,) = cache.chunks(range(4))
    values = kit.numpy(kit.kv(group, seed=heads * layers), group)
    cut = data.draw(st.integers(0, heads)), data.draw(st.integers(0, layers))
    rectangles = [
        Shard(range(*head), range(*layer))
        for head in ((0, cut[0]), (cut[0], heads))
        for layer in ((0, cut[1]), (cut[1], layers))
    ]
    shards = [shard for shard in rectangles if shard.cells]
    cache.put(chunk, {shard: kit.cut(values, shard) for shard in shards})
    first = data.draw(st.integers(0, heads - 1)), data.draw(st.integers(0, layers - 1))
    last = data.draw(st.integers(first[0] + 1, heads)), data.draw(st.integers(first[1] + 1, layers))
    wanted = Shard(range(first[0], last[0]), range(first[1], last[1]))
    assert kit.bits(cache.get(chunk, wanted)) == kit.cut(values, wanted).tobytes()


def test_nothing_plain_reaches_the_store(kit: Any, store: Store, one_group: Any) -> None:
    """[M46] Nor a temporary of it: what is given to the store is sealed already."""
    cache = Cache.open(store, one_group, encryption_key=KEY)
    kit.fill(cache)
    data = b"".join(store.get(info.key) for info in store.list())
    (group,) = one_group.geometry.groups
    for chunk in cache.chunks(kit.TOKENS):
        bits = kit.numpy(kit.kv(group, seed=64 * chunk.index), group).tobytes()
        hidden = [bits[start : start + 16] for start in range(0, len(bits) - 16, 16)]
        assert not [text for text in (np.array(chunk.tokens, "<i4").tobytes(), *hidden) if text in data]
        assert chunk.parent not in data
    assert KEY not in data
    assert KEY.hex().encode() not in data


@pytest.mark.parametrize(
    ("begun", "opened", "words"),
    [
        ({"encryption_key": KEY}, {}, "is needed, none is given"),
        ({"encryption_key": KEY}, {"encryption_key": bytes(32)}, "is needed, "),
        ({}, {"encryption_key": KEY}, "codec none takes no encryption key"),
        ({"codec": "shuffle-zstd"}, {"encryption_key": KEY}, "codec shuffle-zstd takes no encryption key"),
    ],
)
def test_another_encryption_key_is_refused_by_name(
    store: Store, one_group: Any, begun: dict[str, Any], opened: dict[str, Any], words: str
) -> None:
    """[M47] Who has a key never reads what is not encrypted with it."""
    Cache.open(store, one_group, **begun)
    before = {info.key: store.get(info.key) for info in store.list()}
    with pytest.raises(FormatError, match=words) as caught:
        Cache.open(store, one_group, **opened)
    assert caught.value.reason is Reason.WRONG_ENCRYPTION_KEY
    assert {info.key: store.get(info.key) for info in store.list()} == before


def test_a_swapped_document_makes_nobody_believe_plain_objects(store: Store, one_group: Any, kit: Any) -> None:
    """[M47] Somebody who may write puts a plain namespace in an encrypted one's place, with KV of his own."""
    cache = Cache.open(store, one_group, encryption_key=KEY)
    kit.fill(cache)
    (chunk, *_) = cache.chunks(kit.TOKENS)
    name = object_name(cache.namespace, chunk.key, 0)
    forger = open_store("memory://forger")
    forged = Cache.open(forger, one_group)
    kit.fill(forged)
    store.put(name, forger.get(name))
    with pytest.raises(FormatError) as caught:
        cache.get(chunk)
    assert caught.value.reason is Reason.WRONG_CODEC
    store.put(f"{cache.namespace}/namespace.json", forger.get(f"{cache.namespace}/namespace.json"))
    with pytest.raises(FormatError) as caught:
        Cache.open(store, one_group, encryption_key=KEY)
    assert caught.value.reason is Reason.WRONG_ENCRYPTION_KEY


@pytest.mark.parametrize(
    "arguments",
    [
        {"encryption_key": bytes(16)},
        {"encryption_key": KEY, "codec": "shuffle-zstd"},
        {"encryption_key": KEY, "codec": "none"},
        {"codec": "aes-256-gcm"},
    ],
)
def test_keys_that_cannot_be_used_are_wrong_use(store: Store, one_group: Any, arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="encrypt"):
        Cache.open(store, one_group, **arguments)
    assert list(store.list()) == []


@pytest.mark.parametrize("how", [{"codec": "shuffle-zstd"}, {"encryption_key": KEY}], ids=["packed", "encrypted"])
def test_damage_in_what_is_not_plain_is_an_error_or_a_miss(
    kit: Any, store: Store, damage: Any, one_group: Any, how: dict[str, Any]
) -> None:
    cache = Cache.open(store, one_group, **how)
    kit.fill(cache)
    first, second = cache.chunks(kit.TOKENS)[:2]
    name = object_name(cache.namespace, second.key, 0)
    damage(name, len(store.get(name)) - 1)
    with pytest.raises(FormatError) as caught:
        cache.get(second)
    assert caught.value.where == name
    assert cache.get(first).shape[0] == 4
    assert cache.longest_prefix(kit.TOKENS, verify=True).tokens == 4
    with pytest.raises(NotFound):
        cache.get(cache.chunks([9, 9, 9, 9])[0])


def test_without_the_cipher_s_library_the_way_out_is_named(
    store: Store, one_group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match=r"pip install 'tplayout\[encrypt\]'"):
        Cache.open(store, one_group, encryption_key=KEY)
    assert list(store.list()) == []
