"""What goes first, what never goes, and that servers may go on meanwhile."""

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from tplayout.admin.chains import build_index
from tplayout.admin.prune import Kept, Limits, carry_out, plan
from tplayout.cache import Cache
from tplayout.errors import ConfigError, NotFound
from tplayout.format.keys import namespace_object, object_name
from tplayout.format.sharding import whole
from tplayout.storage.url import open_store

DAY = 86400.0
NOW = time.time()


def limits(**fields) -> Limits:
    return Limits(grace=0, **fields)


@pytest.fixture
def place(tmp_path) -> Path:
    return tmp_path / "store"


def set_age(place: Path, names, used: float, written: float | None = None) -> None:
    for name in names:
        os.utime(place / name, (NOW - used, NOW - (used if written is None else written)))


def names_of(namespace, keys) -> list[str]:
    groups = range(len(namespace.identity.geometry.groups))
    return [object_name(namespace.name, key, group) for key in keys for group in groups]


@pytest.fixture
def two(kit, store, place):
    """A prefix of five chunks used a day ago, and one of three, that shares two of them, ten days ago."""
    namespace, _ = kit.fill(store, kit.identity())
    kit.fill(store, namespace.identity, [*kit.TOKENS[:8], 1, 2, 3, 4])
    paths = sorted(build_index(namespace).prefixes(), key=len)
    set_age(place, names_of(namespace, paths[0]), 10 * DAY)
    set_age(place, names_of(namespace, paths[1]), 10 * DAY)
    set_age(place, names_of(namespace, paths[1][4:]), 1 * DAY, 10 * DAY)
    return namespace, paths[1], paths[0]


def size_of(namespace) -> int:
    return namespace.layout(0).nbytes


def test_least_recently_used_first_and_tails_before_heads(two, store):
    namespace, long, short = two
    total = sum(info.size for info in store.list())
    for count in range(7):
        decided = plan(store, limits(max_bytes=total - count * size_of(namespace)), now=NOW)
        expected = [short[2], long[4], long[3], long[2], long[1], long[0]][:count]
        assert decided.names == names_of(namespace, expected)
        assert decided.by_use
        assert decided.met
        assert (decided.before, decided.after) == (total, total - count * size_of(namespace))


def test_age_is_since_last_use_of_the_prefix(two, store):
    namespace, _, short = two
    decided = plan(store, limits(max_age=5 * DAY), now=NOW)
    assert decided.names == names_of(namespace, short[2:])
    store.touch(names_of(namespace, short[2:]))
    assert plan(store, limits(max_age=5 * DAY), now=NOW).names == []
    assert len(plan(store, limits(max_age=0.5 * DAY), now=NOW).names) == 3


def test_what_is_kept_stays_with_everything_before_it(two, kit, store):
    namespace, long, short = two
    assert set(plan(store, limits(max_bytes=0), Kept([short[2].hex()[:12]]), now=NOW).names) == set(
        names_of(namespace, long[2:])
    )
    prompt = plan(store, limits(max_bytes=0), Kept(prompts=[kit.TOKENS[:13]]), now=NOW)
    assert set(prompt.names) == set(names_of(namespace, [*long[3:], short[2]]))
    assert not prompt.met
    assert plan(store, limits(max_bytes=0), Kept([namespace.name[:6]]), now=NOW).names == []
    with pytest.raises(ConfigError, match="--keep ffff"):
        plan(store, limits(max_bytes=0), Kept(["f" * 60]), now=NOW)


def test_the_young_stay(two, store, place):
    namespace, long, short = two
    set_age(place, names_of(namespace, short[2:]), 5)
    decided = plan(store, Limits(max_bytes=0, grace=60), now=NOW)
    assert set(decided.names) == set(names_of(namespace, long[2:]))
    assert not decided.met


def test_what_is_behind_a_gap_goes_first(two, store):
    namespace, long, short = two
    store.delete(names_of(namespace, long[3:4]))
    decided = plan(store, limits(max_bytes=1), now=NOW)
    assert decided.names[0] == names_of(namespace, long[4:])[0]
    assert set(decided.names[1:3]) == set(names_of(namespace, [long[2], short[2]]))


def test_all_groups_of_a_chunk_go_together(kit, store):
    kit.fill(store, kit.identity(kit.group(), kit.group("window-5", "window", window=5)))
    total = sum(info.size for info in store.list())
    decided = plan(store, limits(max_bytes=total - 1), now=time.time() + 60)
    assert (decided.chunks, len(decided.names)) == (1, 2)


def test_carrying_out_meets_the_limit_and_leaves_documents(two, store, place):
    namespace, _, _ = two
    limit = 2 * size_of(namespace) + 5000
    carry_out(store, plan(store, limits(max_bytes=limit), now=NOW))
    assert sum(info.size for info in store.list()) <= limit
    carry_out(store, plan(store, limits(max_bytes=0), now=NOW))
    assert [info.key for info in store.list()] == [namespace_object(namespace.name)]


def test_orphan_temporaries_go_when_no_writer_can_live_so_long(two, store, place):
    fan = next(path for path in (place / two[0].name).iterdir() if path.is_dir())
    old, new = fan / f".a.1.{'0' * 16}.tmp", fan / f".a.2.{'0' * 16}.tmp"
    for path, age in ((old, 2 * 3600), (new, 60)):
        path.write_bytes(b"x" * 100)
        os.utime(path, (NOW - age, NOW - age))
    decided = plan(store, Limits(), now=NOW)
    assert [info.key.rpartition("/")[2] for info in decided.temporaries] == [old.name]
    assert decided.names == []
    carry_out(store, decided)
    assert not old.exists()
    assert new.exists()


def test_namespaces_that_cannot_be_read_are_left_alone_and_named(two, kit, store):
    namespace, _, _ = two
    other, _ = kit.fill(store, kit.identity(weights="files:99"))
    store.delete([namespace_object(namespace.name)])
    decided = plan(store, limits(max_bytes=0), now=time.time() + 60)
    assert list(decided.unjudged) == [namespace.name]
    assert all(name.startswith(other.name) for name in decided.names)
    assert not decided.met


def test_only_one_namespace(two, kit, store):
    other, _ = kit.fill(store, kit.identity(weights="files:99"))
    decided = plan(store, limits(max_bytes=0), namespace=other.name[:8], now=time.time() + 60)
    assert len(decided.names) == 5
    assert all(name.startswith(other.name) for name in decided.names)


def test_keyed_stores_need_no_secret(kit, store):
    kit.fill(store, kit.identity(), secret=b"0123456789abcdef")
    assert len(plan(store, limits(max_bytes=0), now=time.time() + 60).names) == 5


def test_stores_that_do_not_note_use_go_by_age(kit, tmp_path):
    with open_store(f"memory://{str(tmp_path).strip('/')}") as store:
        kit.fill(store, kit.identity())
        decided = plan(store, limits(max_bytes=0), now=time.time() + 60)
        assert not decided.by_use
        assert len(decided.names) == 5


def test_pruning_while_others_write_and_read(kit, tmp_path):
    """No request fails, nothing wrong is read, and the limit is met."""
    url = tmp_path / "shared"
    identity = kit.identity()
    (group,) = identity.geometry.groups
    stop, faults = threading.Event(), []

    def value(chunk, shape):
        return np.full(shape, chunk.tokens[0] % 2000, "f2")

    def serve(seed: int) -> None:
        random = np.random.default_rng(seed)
        shape = (group.heads, len(group.layers), *group.cell_shape(4))
        try:
            with Cache.open(url, identity) as cache:
                while not stop.is_set():
                    tokens = [*([int(random.integers(20))] * 4), *map(int, random.integers(0, 20, 12))]
                    prefix = cache.longest_prefix(tokens, verify=True)
                    for chunk in cache.chunks(tokens):
                        if chunk not in prefix.chunks:
                            cache.put(chunk, {whole(group): value(chunk, shape)})
                            continue
                        try:
                            got = cache.get(chunk)
                        except NotFound:
                            break  # a miss
                        assert (got == value(chunk, shape)).all()
        except Exception as error:
            faults.append(repr(error))

    servers = [threading.Thread(target=serve, args=(seed,)) for seed in range(2)]
    for server in servers:
        server.start()
    with open_store(url) as store:
        limit = 20 * 20000
        for _ in range(8):
            time.sleep(0.05)
            carry_out(store, plan(store, limits(max_bytes=limit)))
        stop.set()
        for server in servers:
            server.join()
        assert not faults
        carry_out(store, plan(store, limits(max_bytes=limit)))
        assert 0 < sum(info.size for info in store.list()) <= limit


def test_temporaries_of_other_namespaces_are_not_those_of_one(two, kit, store, place):
    other, _ = kit.fill(store, kit.identity(weights="files:02"))
    orphan = place / other.name / "ab" / ".x.1.0123456789abcdef.tmp"
    orphan.parent.mkdir(exist_ok=True)
    orphan.write_bytes(b"x")
    os.utime(orphan, (0, 0))
    (one,) = {name for name in os.listdir(place) if name != other.name}
    assert plan(store, limits(), namespace=one).temporaries == []
    assert len(plan(store, limits(), namespace=other.name).temporaries) == 1
    assert len(plan(store, limits()).temporaries) == 1


def test_what_lies_in_quarantine_takes_its_bytes_too(two, store):
    before = plan(store, limits()).before
    store.put("tplayout-quarantine/x", bytes(1000))
    assert plan(store, limits()).before == before + 1000
    decided = plan(store, limits(max_bytes=500))
    assert not decided.met
    assert "tplayout-quarantine/x" not in decided.names


def test_the_store_is_listed_once(two, store, monkeypatch):
    listed = []
    listing = store.list

    def count(prefix="", **more):
        listed.append(prefix)
        return listing(prefix, **more)

    monkeypatch.setattr(store, "list", count)
    plan(store, Limits(max_age=1))
    assert listed == [""]
