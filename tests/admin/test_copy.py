"""Copies are verified, resumed and complete; moves delete only what has arrived."""

import pytest

from tplayout.admin.catalog import Secrets
from tplayout.admin.chains import Chunk, Index, build_index
from tplayout.admin.copy import check_apart, copy_namespace, move_namespace, only_of, recode
from tplayout.admin.namespaces import begin_namespace, open_namespace
from tplayout.admin.work import Work
from tplayout.errors import ConfigError, NamespaceMismatch, StorageTimeout
from tplayout.format.geometry import Part
from tplayout.format.keys import ROOT, object_name
from tplayout.storage.url import open_store

SECRET = b"0123456789abcdef"
WIDE = (Part("k", 64), Part("v", 64))


@pytest.fixture
def filled(kit, store):
    namespace, _ = kit.fill(store, kit.identity(kit.group(), kit.group("window-5", "window", window=5)))
    return namespace


@pytest.fixture
def target(make_store):
    return make_store("target")


def flip(store, name: str) -> None:
    data = bytearray(store.get(name))
    data[-5000] ^= 1
    store.put(name, data)


def leaf(namespace) -> bytes:
    (path,) = build_index(namespace).prefixes()
    return path[-1]


@pytest.mark.parametrize("jobs", [1, 4])
def test_a_copy_is_equal_and_a_second_run_moves_nothing(filled, kit, target, jobs):
    report = copy_namespace(filled, target, work=Work(jobs=jobs))
    assert kit.content(target) == kit.content(filled.store)
    assert (report.copied, report.present) == (10, 0)
    again = copy_namespace(filled, target)
    assert (again.copied, again.present, again.nbytes) == (0, 10, 0)


def test_a_copy_that_was_cut_short_goes_on(filled, kit, target):
    class Dies:
        """Fails at the fourth object."""

        def __init__(self):
            self.left = 4

        def put(self, *args, **kwargs):
            self.left -= 1
            if self.left < 0:
                raise StorageTimeout("gone")
            type(target).put(target, *args, **kwargs)

    target.put = Dies().put  # type: ignore[method-assign]
    with pytest.raises(StorageTimeout):
        copy_namespace(filled, target)
    del target.put
    assert copy_namespace(filled, target).present == 3
    assert kit.content(target) == kit.content(filled.store)


def test_damaged_objects_are_named_and_not_copied(filled, kit, target):
    name = sorted(kit.content(filled.store))[0]
    flip(filled.store, name)
    report = copy_namespace(filled, target)
    assert list(report.damaged) == [name]
    assert not report.complete
    assert not target.exists([name])[0]


def test_a_truncated_object_at_the_destination_is_replaced(filled, kit, target):
    copy_namespace(filled, target)
    name = sorted(kit.content(target))[0]
    target.put(name, target.get(name)[:-1])
    assert copy_namespace(filled, target).copied == 1
    flip(target, name)
    assert copy_namespace(filled, target).present == 10
    assert copy_namespace(filled, target, recheck=True).copied == 1
    assert kit.content(target) == kit.content(filled.store)


def test_only_one_prefix(filled, kit, store, target):
    other, _ = kit.fill(store, filled.identity, [*kit.TOKENS[:8], 1, 2, 3, 4])
    index = build_index(other)
    last = next(path[-1] for path in index.prefixes() if len(path) == 3)
    copy_namespace(filled, target, keys=[last])
    copied = build_index(open_namespace(target, filled.name))
    assert set(copied.chunks) == set(index.path(last))


def test_dry_runs_write_nothing(filled, target):
    assert copy_namespace(filled, target, work=Work(dry_run=True)).copied == 10
    assert move_namespace(filled, target, work=Work(dry_run=True)).removed == 10
    assert not list(target.list())


def test_a_target_without_the_secret_that_is_given_is_refused(kit, store, target):
    namespace, _ = kit.fill(store, kit.identity(), secret=SECRET)
    begin_namespace(target, namespace.identity, "")
    with pytest.raises(ConfigError, match=r"written without a secret .* take another store, or leave out the secret"):
        copy_namespace(namespace, target, Secrets(SECRET))


@pytest.mark.parametrize("codec", [None, "shuffle-zstd"])
def test_what_was_written_without_a_secret_is_verified_and_then_keyed(kit, store, make_store, codec):
    """The copy is, bit for bit, what a server with the secret would have written."""
    origin, _ = kit.fill(store, kit.identity(kit.group(parts=WIDE)), codec=codec)
    reference, _ = kit.fill(make_store("reference"), origin.identity, secret=SECRET, codec=codec)
    keyed = make_store("keyed")
    (head, *_) = (path[0] for path in build_index(origin).prefixes())
    flip(store, object_name(origin.name, head, 0))
    report = copy_namespace(origin, keyed, Secrets(SECRET), work=Work(jobs=2))
    assert (report.copied, list(report.damaged)) == (4, [object_name(origin.name, head, 0)])
    expected = kit.content(reference.store)
    del expected[object_name(origin.name, head, 0)]
    assert kit.content(keyed) == expected
    assert copy_namespace(origin, keyed, Secrets(SECRET)).present == 4
    with pytest.raises(ConfigError, match="--secret-key-file"):
        copy_namespace(origin, keyed)


def test_keyed_namespaces_are_copied_with_their_secret(kit, store, target):
    namespace, _ = kit.fill(store, kit.identity(), secret=SECRET)
    assert copy_namespace(namespace, target, Secrets(SECRET)).complete
    assert kit.content(target) == kit.content(store)


def test_a_move_leaves_nothing_behind(filled, kit, target):
    before = kit.content(filled.store)
    report = move_namespace(filled, target)
    assert kit.content(target) == before
    assert not kit.content(filled.store)
    assert (report.copied, report.removed) == (10, 10)


def test_a_move_keeps_what_is_damaged_or_shared(filled, kit, store, target):
    kit.fill(store, filled.identity, [*kit.TOKENS[:8], 1, 2, 3, 4])
    index = build_index(filled)
    long = next(path for path in index.prefixes() if len(path) == 5)
    short = next(path for path in index.prefixes() if len(path) == 3)
    report = move_namespace(filled, target, keys=[long[-1]])
    assert report.removed == 6  # three chunks of two groups
    assert set(build_index(filled).chunks) == set(short)
    assert set(build_index(open_namespace(target, filled.name)).chunks) == set(long)
    name = object_name(filled.name, short[2], 0)
    flip(store, name)
    report = move_namespace(filled, target)
    assert list(report.damaged) == [name]
    assert kit.content(store).keys() == {name, f"{filled.name}/namespace.json"}
    assert name not in kit.content(target)


def test_a_damaged_copy_at_the_destination_does_not_cost_the_original(filled, kit, target):
    before = kit.content(filled.store)
    copy_namespace(filled, target)
    flip(target, object_name(filled.name, leaf(filled), 0))
    move_namespace(filled, target)
    assert kit.content(target) == before


def test_a_store_by_two_names_is_no_destination_of_a_move(filled, kit, tmp_path):
    before = kit.content(filled.store)
    (tmp_path / "alias").symlink_to(tmp_path / "store")
    for other in (tmp_path / "alias", tmp_path / "store"):
        with open_store(other) as same, pytest.raises(ConfigError, match="one store"):
            move_namespace(filled, same)
    assert kit.content(filled.store) == before
    with open_store(tmp_path / "else") as apart:
        check_apart(filled.store, apart)
        assert not list(apart.list())


@pytest.fixture
def packed(kit, make_store):
    """The same as `filled`, packed, in planes that shrink."""
    identity = kit.identity(kit.group(parts=WIDE), kit.group("window-5", "window", window=5))
    namespace, _ = kit.fill(make_store("packed"), identity, codec="shuffle-zstd")
    return namespace


@pytest.mark.parametrize("secret", [None, SECRET])
def test_another_codec_and_back_is_the_same_store(kit, store, make_store, secret):
    """Chunks behind a gap included; the digests are the plain cells', so nothing of the objects changes."""
    origin, _ = kit.fill(store, kit.identity(kit.group(parts=WIDE)), secret=secret)
    first = build_index(origin).path(leaf(origin))[0]
    store.delete([object_name(origin.name, first, 0)])
    there, back = make_store("there"), make_store("back")
    report = recode(origin, there, "shuffle-zstd", Secrets(secret), work=Work(jobs=2))
    assert (report.tally.written, report.complete) == (4, True)
    sizes = {info.key: info.size for info in there.list()}
    del sizes[f"{origin.name}/namespace.json"]
    assert report.tally.nbytes == sum(sizes.values()) < report.bytes_read == 4 * origin.layout(0).nbytes
    packed = open_namespace(there, origin.name, Secrets(secret))
    assert packed.document.storage.codec == "shuffle-zstd"
    again = recode(origin, there, "shuffle-zstd", Secrets(secret))
    assert (again.tally.written, again.tally.present) == (0, 4)
    report = recode(packed, back, "none", Secrets(secret))
    assert report.bytes_read == sum(sizes.values())
    assert kit.content(back) == kit.content(store)


def test_a_copy_keeps_the_codec_unless_the_target_has_another(packed, kit, target, make_store):
    assert copy_namespace(packed, target).copied == 10
    assert kit.content(target) == kit.content(packed.store)
    assert copy_namespace(packed, target).present == 10
    plain, reference = make_store("plain"), make_store("reference")
    begin_namespace(plain, packed.identity, "a-model")
    kit.fill(reference, packed.identity)
    copied = copy_namespace(packed, plain, work=Work(jobs=3))
    assert kit.content(plain) == kit.content(reference)
    assert copied.nbytes == sum(info.size for info in plain.list() if info.key.endswith(".safetensors"))
    moved = move_namespace(open_namespace(plain, packed.name), target)
    assert (moved.present, moved.removed) == (10, 10)
    assert kit.content(target) == kit.content(packed.store)


def test_another_codec_than_the_target_has_is_refused(packed, filled, target):
    begin_namespace(target, packed.identity, "")
    for dry_run in (False, True):
        with pytest.raises(NamespaceMismatch, match="codec"):
            recode(packed, target, "shuffle-zstd", work=Work(dry_run=dry_run))
    with pytest.raises(NamespaceMismatch, match="codec"):
        begin_namespace(packed.store, packed.identity, "", codec="none")
    assert len(list(target.list())) == 1


def test_a_dry_run_of_another_codec_writes_nothing(filled, target):
    report = recode(filled, target, "shuffle-zstd", work=Work(dry_run=True))
    assert (report.tally.written, report.prefixes) == (10, 1)
    assert not list(target.list())


def test_damage_in_a_packed_namespace_is_not_copied(packed, kit, target):
    name = object_name(packed.name, leaf(packed), 0)
    data = bytearray(packed.store.get(name))
    data[-1] ^= 1
    packed.store.put(name, data)
    assert list(copy_namespace(packed, target).damaged) == [name]
    report = recode(packed, target, "shuffle-zstd")
    assert list(report.tally.damaged) == [name]
    assert not report.complete
    assert name not in kit.content(target)


def test_what_other_prefixes_share_is_found_without_going_over_it_for_each(filled):
    looks = 0

    class Counted(dict):
        def __getitem__(self, key):
            nonlocal looks
            looks += 1
            return super().__getitem__(key)

    index = Index(filled, Counted())
    keys = [number.to_bytes(32, "big") for number in range(1, 4001)]
    for before, key in zip([ROOT, *keys], keys, strict=False):
        index.chunks[key] = Chunk(key, before)
    forks = [number.to_bytes(32, "big") for number in range(5001, 7001)]
    for key, before in zip(forks, keys[1000:], strict=False):
        index.chunks[key] = Chunk(key, before)
    assert only_of(index, [keys[-1]]) == set(keys[3000:])
    assert looks < 4 * len(index.chunks)


def test_progress_knows_how_much_there_is(filled, target):
    seen = []
    copy_namespace(filled, target, work=Work(progress=lambda done, total, nbytes: seen.append((done, total))))
    assert seen == [(done, 10) for done in range(1, 11)]
