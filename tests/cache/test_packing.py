"""tplayout/cache/packing.py: a store of plain objects in front of packed or encrypted ones."""

from collections.abc import Sequence
from typing import Any

import pytest

from tools.fault_store import Fault, FaultStore
from tplayout.cache import Cache
from tplayout.cache.codec import make_codec
from tplayout.cache.packing import PackingStore, plain_store
from tplayout.errors import FormatError, GeometryError, NotFound, Reason, StorageError, StorageErrorKind, StorageTimeout
from tplayout.format.chunk import seal, verify
from tplayout.format.digest import make_hasher
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.keys import chain, object_name
from tplayout.format.layout import ChunkLayout, chunk_layout
from tplayout.format.sharding import whole
from tplayout.storage.base import Store

NAMESPACE = bytes(range(32))
NAME = NAMESPACE.hex()[:32]
KEY = EncryptionKey(bytes(32))


class World:
    """A sealed object, its name, and the store that packs, or encrypts."""

    def __init__(self, kit: Any, store: Store, codec: str) -> None:
        self.hasher = make_hasher()
        geometry = kit.identity(kit.group(), kit.group("window-7", "window", window=7, layers=(3,))).geometry
        self.layouts: Sequence[ChunkLayout] = [chunk_layout(geometry, index, self.hasher.name) for index in (0, 1)]
        self.layout = self.layouts[0]
        self.chunk = chain(NAMESPACE, range(4), 4)[0]
        self.name = object_name(NAME, self.chunk.key, 0)
        self.buf = bytearray(self.layout.nbytes)
        for head in range(4):
            span = self.layout.kv_range(head, range(3))
            self.buf[span.start : span.stop] = bytes(head * 7 % 5 if i % 2 else i % 256 for i in range(len(span)))
        seal(self.buf, self.layout, NAMESPACE, self.chunk, self.hasher)
        self.inner = store
        if codec == "aes-256-gcm":
            self.codec = make_codec(codec, self.hasher, KEY.id, KEY)
            self.open = {"encryption_key": bytes(32)}
        else:
            self.codec = make_codec(codec, self.hasher)
            self.open = {"codec": codec}
        self.plain = plain_store(store, NAME, self.layouts, self.codec)


@pytest.fixture(params=["shuffle-zstd", "aes-256-gcm"])
def world(kit: Any, store: Store, request: pytest.FixtureRequest) -> World:
    return World(kit, store, request.param)


def test_the_codec_none_needs_no_other_store(world: World) -> None:
    assert plain_store(world.inner, NAME, world.layouts, make_codec("none", world.hasher)) is world.inner
    assert isinstance(world.plain, PackingStore)


def test_what_is_put_is_packed_and_what_is_got_is_plain(world: World) -> None:
    world.plain.put(world.name, world.buf)
    stored = world.inner.get(world.name)
    assert stored != world.buf
    assert world.codec.unpack(stored, world.layout, world.chunk.key) == world.buf
    assert world.plain.get(world.name) == world.buf
    buf = bytearray(len(world.buf) + 5)
    assert world.plain.get_into(world.name, buf) == len(world.buf)
    assert buf == world.buf + bytes(5)
    for start in range(0, len(world.buf), 511):
        length = min(513, len(world.buf) - start)
        assert world.plain.get_range(world.name, start, length) == world.buf[start : start + length]


def test_listings_tell_what_is_stored(world: World) -> None:
    world.plain.put(world.name, world.buf)
    (info,) = world.plain.list()
    assert info == next(world.inner.list())
    assert info.size == len(world.inner.get(world.name))
    assert world.plain.exists([world.name, world.name.replace(".0.", ".1.")]) == [True, False]
    world.plain.touch([world.name])
    world.plain.delete([world.name])
    assert list(world.inner.list()) == []
    assert list(world.plain.temporaries()) == list(world.plain.strangers()) == []


@pytest.mark.parametrize(
    "name",
    ["notes.txt", f"{NAME}/namespace.json", object_name("ab" * 16, bytes(32), 0), object_name(NAME, bytes(32), 2)],
)
def test_other_files_pass_as_they_are(world: World, name: str) -> None:
    """Another namespace's objects too, and groups that the geometry does not have."""
    world.plain.put(name, b"some bytes")
    assert world.inner.get(name) == b"some bytes"
    buf = bytearray(10)
    assert world.plain.get_into(name, buf) == 10
    assert bytes(buf) == world.plain.get(name, max_bytes=10) == b"some bytes"
    assert world.plain.get_range(name, 5, 5) == b"bytes"


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda good, plain: good[:-1], Reason.TRUNCATED),
        (lambda good, plain: good[:100], Reason.TRUNCATED),
        (lambda good, plain: good + b"\0", Reason.TRAILING),
        (lambda good, plain: good[:-1] + bytes([good[-1] ^ 1]), Reason.DIGEST_MISMATCH),
        (lambda good, plain: plain, Reason.WRONG_CODEC),
    ],
)
def test_damage_is_named_with_the_object(world: World, change: Any, reason: Reason) -> None:
    world.plain.put(world.name, world.buf)
    world.inner.put(world.name, change(world.inner.get(world.name), bytes(world.buf)))
    calls = (
        lambda: world.plain.get(world.name),
        lambda: world.plain.get_into(world.name, bytearray(len(world.buf))),
    )
    for call in calls:
        with pytest.raises(FormatError) as caught:
            call()
        assert (caught.value.reason, caught.value.where) == (reason, world.name)


def test_a_range_of_a_plain_object_says_wrong_codec(world: World) -> None:
    """The whole object is read to say what is wrong."""
    world.plain.put(world.name, world.buf)
    good = world.inner.get(world.name)
    world.inner.put(world.name, good[:2000])
    with pytest.raises(StorageError) as short:
        world.plain.get_range(world.name, world.layout.sections, 100)
    assert short.value.kind is StorageErrorKind.SHORT_READ
    world.inner.put(world.name, world.buf)
    with pytest.raises(FormatError) as caught:
        world.plain.get_range(world.name, world.layout.sections, 100)
    assert (caught.value.reason, caught.value.where) == (Reason.WRONG_CODEC, world.name)


def test_an_encrypted_object_under_another_name_is_refused(kit: Any, store: Store) -> None:
    """[M26] [M44] Whole, or a range of it."""
    world = World(kit, store, "aes-256-gcm")
    world.plain.put(world.name, world.buf)
    other = object_name(NAME, bytes(32), 0)
    world.inner.put(other, world.inner.get(world.name))
    for call in (
        lambda: world.plain.get(other),
        lambda: world.plain.get_range(other, world.layout.sections, 100),
        lambda: world.plain.get_range(other, world.layout.data_start, 16),
    ):
        with pytest.raises(FormatError) as caught:
            call()
        assert (caught.value.reason, caught.value.where) == (Reason.DIGEST_MISMATCH, other)


def test_groups_that_cannot_be_encrypted_are_refused_at_once(store: Store) -> None:
    """[M48]"""
    group = Group("g", "full", (0,), 1, (Part("k", 2**14), Part("v", 2**14)), "U8")
    layouts = [chunk_layout(Geometry(2**16, (group,)), 0, "xxh3-128")]
    with pytest.raises(GeometryError, match="too large to be encrypted"):
        plain_store(store, NAME, layouts, make_codec("aes-256-gcm", make_hasher(), KEY.id, KEY))


def test_missing_objects_and_small_buffers(world: World) -> None:
    for call in (
        lambda: world.plain.get(world.name),
        lambda: world.plain.get_into(world.name, bytearray(len(world.buf))),
        lambda: world.plain.get_range(world.name, 0, 10),
    ):
        with pytest.raises(NotFound):
            call()
    world.plain.put(world.name, world.buf)
    for small in (
        lambda: world.plain.get(world.name, max_bytes=len(world.buf) - 1),
        lambda: world.plain.get_into(world.name, bytearray(len(world.buf) - 1)),
    ):
        with pytest.raises(StorageError) as caught:
            small()
        assert caught.value.kind is StorageErrorKind.TOO_LARGE
    with pytest.raises(StorageError) as short:
        world.plain.get_range(world.name, len(world.buf) - 1, 2)
    assert short.value.kind is StorageErrorKind.SHORT_READ


def test_deadlines_reach_the_store_below(world: World) -> None:
    world.plain.put(world.name, world.buf)
    broken = FaultStore(world.inner)
    plain = plain_store(broken, NAME, world.layouts, world.codec)
    broken.inject(Fault.HANG, "get")
    with pytest.raises(StorageTimeout):
        plain.get(world.name, deadline=0.05)
    broken.inject(Fault.FLIPPED_BIT, "get")
    with pytest.raises(FormatError):
        verify(plain.get(world.name), world.layout, NAMESPACE, world.chunk.key, world.hasher)
    plain.close()
    with pytest.raises(StorageError, match="closed"):
        world.inner.get(world.name)


def test_whole_caches_on_faulty_stores(kit: Any, world: World) -> None:
    """Whatever breaks below, what a cache returns is what was put."""
    identity = kit.identity(kit.group())
    Cache.open(world.inner, identity, **world.open)
    faults = set(Fault) - {Fault.HANG}
    broken = FaultStore(world.inner, seed=3, rate=0.2, delay_s=0.0, faults=faults, verbs=("put", "get_range"))
    cache = Cache.open(broken, identity, **world.open)
    group = identity.geometry.groups[0]
    outcomes = []
    for number in range(60):
        (chunk,) = cache.chunks(range(number, number + 4))
        values = kit.numpy(kit.kv(group, seed=number), group)
        try:
            cache.put(chunk, {whole(group): values})
            assert kit.bits(cache.get(chunk)) == kit.bits(values)
            outcomes.append(True)
        except (FormatError, StorageError):
            outcomes.append(False)
    assert set(outcomes) == {True, False}
