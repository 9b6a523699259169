"""With a secret, what others have put into a store is refused wherever it is read: by the Python API and by the tools.

The attacker may read and write the store, and knows the format, the tokens, another namespace's secret and this one's
key id; only not the secret.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.documents import namespace_document
from tests.support.tool import call
from tplayout.cache import Cache
from tplayout.errors import FormatError
from tplayout.format.chunk import write_digests, write_info
from tplayout.format.digest import CellHasher, make_hasher
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.identity import Identity
from tplayout.format.keys import ChunkId, object_name
from tplayout.format.layout import ChunkLayout, chunk_layout
from tplayout.format.sharding import shard_of, whole
from tplayout.storage.base import Store

SECRET, OTHER = b"our own secret, 24 bytes", b"somebody else's, 24 bytes"
GROUP = Group("full", "full", (0, 1, 2), 4, (Part("k", 8), Part("v", 8)), "F16")
IDENTITY = Identity("files:00", {}, "float16", None, Geometry(4, (GROUP,)))
ELSEWHERE = Identity("files:01", {}, "float16", None, Geometry(4, (GROUP,)))
TOKENS = list(range(16))


class Victim:
    """A keyed namespace of four chunks, the second of which the attacker replaces."""

    def __init__(self, url: Path, codec: str = "none") -> None:
        self.url = url
        self.cache = Cache.open(url, IDENTITY, secret=SECRET, codec=codec)
        self.chunks = self.cache.chunks(TOKENS)
        for chunk in self.chunks:
            self.cache.put(chunk, {whole(GROUP): kv(chunk.index)})
        self.store: Store = self.cache.store
        self.names = [object_name(IDENTITY.namespace, chunk.key, 0) for chunk in self.chunks]
        self.target = self.names[1]

    def forged(self, layout: ChunkLayout, hasher: CellHasher, chunk: ChunkId | None = None, seed: int = 99) -> bytes:
        """A whole object with KV of the attacker's, its digests by `hasher`, its header as in `layout`."""
        data = bytearray(layout.nbytes)
        for head in range(GROUP.heads):
            for position in range(len(GROUP.layers)):
                span = layout.cell_range(head, position)
                data[span.start : span.stop] = kv(seed)[head, position].tobytes()
        chunk = chunk or self.chunks[1]
        write_info(data, layout, chunk)
        write_digests(data, layout, chunk.key, hasher)
        return bytes(data)


def kv(seed: int) -> "np.ndarray[Any, Any]":
    return np.random.default_rng(seed).standard_normal((4, 3, 2, 4, 8)).astype("f2")


class Pretender:
    """Digests of another hasher under our name and key id."""

    def __init__(self, hasher: CellHasher) -> None:
        ours = make_hasher(None, SECRET)
        self._hasher, self.name, self.size, self.key_id = hasher, ours.name, ours.size, ours.key_id

    def cell(self, *coordinates: Any) -> bytes:
        return self._hasher.cell(*coordinates)


def keyed_layout() -> ChunkLayout:
    """That of the victim's objects."""
    return chunk_layout(IDENTITY.geometry, 0, "blake3-keyed", make_hasher(None, SECRET).key_id)


def without_a_key(victim: Victim) -> None:
    hasher = make_hasher()
    victim.store.put(victim.target, victim.forged(chunk_layout(IDENTITY.geometry, 0, hasher.name), hasher))


def with_another_key(victim: Victim) -> None:
    hasher = make_hasher(None, OTHER)
    layout = chunk_layout(IDENTITY.geometry, 0, hasher.name, hasher.key_id)
    victim.store.put(victim.target, victim.forged(layout, hasher))


def with_another_key_under_our_id(victim: Victim) -> None:
    victim.store.put(victim.target, victim.forged(keyed_layout(), Pretender(make_hasher(None, OTHER))))


def with_unkeyed_digests_under_our_header(victim: Victim) -> None:
    victim.store.put(victim.target, victim.forged(keyed_layout(), Pretender(make_hasher("blake3"))))


def another_chunk_under_its_name(victim: Victim) -> None:
    victim.store.put(victim.target, victim.store.get(victim.names[2]))


def another_chunk_with_its_tokens(victim: Victim) -> None:
    """The token ids and the parent of the wanted chunk, and all else of another."""
    layout = keyed_layout()
    data = bytearray(victim.store.get(victim.names[2]))
    write_info(data, layout, victim.chunks[1])
    victim.store.put(victim.target, data)


def one_cell_of_another_chunk(victim: Victim) -> None:
    """With its digest, which is authentic for another place."""
    layout = keyed_layout()
    data, other = bytearray(victim.store.get(victim.target)), victim.store.get(victim.names[2])
    for span in (layout.cell_range(1, 1), layout.digest_range(1, 1)):
        data[span.start : span.stop] = other[span.start : span.stop]
    victim.store.put(victim.target, data)


def a_head_in_another_s_place(victim: Victim) -> None:
    layout = keyed_layout()
    data = bytearray(victim.store.get(victim.target))
    for of in (layout.cell_range, layout.digest_range):
        one, two = of(0, 1), of(2, 1)
        data[one.start : one.stop], data[two.start : two.stop] = data[two.start : two.stop], data[one.start : one.stop]
    victim.store.put(victim.target, data)


def from_another_namespace_of_the_same_key(victim: Victim) -> None:
    """The same tokens, authentic there: another model's KV."""
    with Cache.open(victim.url, ELSEWHERE, secret=SECRET) as other:
        chunk = other.chunks(TOKENS)[1]
        other.put(chunk, {whole(GROUP): kv(50)})
        victim.store.put(victim.target, victim.store.get(object_name(ELSEWHERE.namespace, chunk.key, 0)))


ATTACKS = [
    without_a_key,
    with_another_key,
    with_another_key_under_our_id,
    with_unkeyed_digests_under_our_header,
    another_chunk_under_its_name,
    another_chunk_with_its_tokens,
    one_cell_of_another_chunk,
    a_head_in_another_s_place,
    from_another_namespace_of_the_same_key,
]


@pytest.fixture
def victim(tmp_path: Path) -> Victim:
    return Victim(tmp_path / "store")


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_the_python_api_refuses_it(victim: Victim, attack: Callable[[Victim], None]) -> None:
    attack(victim)
    with Cache.open(victim.url, IDENTITY, secret=SECRET) as cache:
        with pytest.raises(FormatError):
            cache.get(victim.chunks[1])
        for rank in range(4):
            shard = shard_of(GROUP, 4, rank)
            try:
                assert np.array_equal(cache.get(victim.chunks[1], shard), kv(1)[shard.heads.start : shard.heads.stop])
            except FormatError:
                continue  # of an object with some cells of its own the rest may be read
        assert cache.longest_prefix(TOKENS, verify=True).tokens == 4
        for index in (0, 2, 3):
            assert np.array_equal(cache.get(victim.chunks[index]), kv(index))


@pytest.mark.parametrize("attack", ATTACKS, ids=lambda attack: attack.__name__)
def test_the_tools_name_it_and_hand_it_to_nobody(
    victim: Victim, attack: Callable[[Victim], None], tmp_path: Path
) -> None:
    attack(victim)
    key = tmp_path / "key"
    key.write_bytes(SECRET)
    own, target = ["--secret-key-file", str(key)], tmp_path / "target"
    only = ["--namespace", IDENTITY.namespace]
    found = call("verify", victim.url, *own, *only)
    assert found.exit_code == 1
    assert found.stdout.count(victim.target) >= 1
    assert victim.names[0] not in found.stdout
    assert call("inspect", victim.url, victim.target, *own).exit_code == 1
    assert call("cp", victim.url, target, *own, *only).exit_code == 1
    bundle = tmp_path / "bundle"
    if call("export", victim.url, bundle, *own, *only).exit_code == 0:  # up to there, as if it were missing
        assert Path(victim.target).name.encode() not in bundle.read_bytes()
    else:
        assert not bundle.exists()
    assert call("convert", victim.url, tmp_path / "shards", "--tp", "1", *own, *only).exit_code == 1
    assert call("verify", target, *own).exit_code == 0
    copied = {path.name for path in target.rglob("*.safetensors")}
    assert Path(victim.target).name not in copied
    assert Path(victim.names[0]).name in copied


def test_a_document_without_the_key_is_refused(victim: Victim) -> None:
    """The attacker takes the namespace over: neither a reader nor a writer with the secret goes along."""
    name = f"{IDENTITY.namespace}/namespace.json"
    for facts in (
        {"digest": "xxh3-128", "key_id": None, "codec": "none"},
        {"digest": "blake3-keyed", "key_id": make_hasher(None, OTHER).key_id, "codec": "none"},
    ):
        victim.store.put(name, namespace_document(IDENTITY, facts, "m"))
        with pytest.raises(FormatError, match="wrong-secret"):
            Cache.open(victim.url, IDENTITY, secret=SECRET)
    victim.store.delete([name])
    with Cache.open(victim.url, IDENTITY, secret=SECRET) as again:
        assert np.array_equal(again.get(victim.chunks[1]), kv(1))


def test_without_a_secret_nothing_keyed_is_taken_for_unkeyed(victim: Victim) -> None:
    with pytest.raises(FormatError, match="wrong-secret"):
        Cache.open(victim.url, IDENTITY)
