"""Work in parts tells of itself as one: how much there is in all, and how much of that is done."""

import pytest

from tplayout.admin.convert import export_shards, import_shards
from tplayout.admin.namespaces import open_namespace
from tplayout.admin.progress import Parts
from tplayout.admin.rechunk import changed_identity, rechunk
from tplayout.admin.shards import find_shard_sets
from tplayout.admin.work import Work

Ticks = list[tuple[int, int | None, int]]


def watch(seen: Ticks):
    return lambda done, total, nbytes: seen.append((done, total, nbytes))


def test_parts_follow_one_another():
    seen: Ticks = []
    parts = Parts(watch(seen), 7)
    parts.part(2)(2, 2, 20)
    parts.part(3)  # has nothing to do
    parts.part(2)(1, None, 5)
    assert seen == [(2, 7, 20), (6, 7, 25)]


def test_parts_of_which_only_those_so_far_are_known():
    seen: Ticks = []
    parts = Parts(watch(seen))
    for total in (2, 3):
        tick = parts.part()
        for done in range(1, total + 1):
            tick(done, total, done)
    assert seen == [(1, 2, 1), (2, 2, 2), (3, 5, 3), (4, 5, 4), (5, 5, 5)]


@pytest.mark.parametrize("work", ["to shards", "from shards", "other chunks"])
def test_conversions_of_several_prefixes_know_the_end(kit, store, make_store, tmp_path, work):
    identity = kit.identity(kit.group(), kit.group("window-5", "window", window=5))
    namespace, _ = kit.fill(store, identity)
    kit.fill(store, identity, tokens=range(8))
    namespace = open_namespace(store, namespace.name)
    seen: Ticks = []
    if work == "other chunks":
        rechunk(namespace, make_store("other"), changed_identity(identity, 8), work=Work(progress=watch(seen)))
        total = 2 * (2 + 1)
    else:
        export_shards(namespace, tmp_path / "out", 2, [range(3)], work=Work(progress=watch(seen)))
        total = 2 * (5 + 2)
    if work == "from shards":
        seen.clear()
        import_shards(find_shard_sets(tmp_path / "out"), make_store("back"), work=Work(progress=watch(seen)))
    assert [(done, of) for done, of, _ in seen] == [(done, total) for done in range(1, total + 1)]
    moved = [nbytes for _, _, nbytes in seen]
    assert moved == sorted(moved)
