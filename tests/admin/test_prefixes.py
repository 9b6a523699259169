"""Prefix trees: forks, gaps, missing groups; links that are read from objects."""

from pathlib import Path

import pytest

from tests.support.filled_store import fill, flip, group, identity, layout_of_group, name_of, put, rewrite
from tplayout.admin.catalog import scan
from tplayout.admin.prefixes import Segment, read_links, tree, unreachable
from tplayout.cache import Cache
from tplayout.cache.prefix import servable
from tplayout.storage.base import Store
from tplayout.storage.url import open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def segments(store: Store) -> list[Segment]:
    (space,) = scan(store).namespaces.values()
    links = read_links(store, space)
    return tree(space.known().identity.geometry, space.objects, links.parents)


def test_prompts_that_share_a_beginning_fork(store):
    cache = Cache.open(store, identity())
    one = fill(cache, range(20))
    other = fill(cache, [*range(8), *range(50, 62)])
    alone = fill(cache, range(100, 104))
    drawn = segments(store)
    places = {(segment.first, segment.last): (segment.start, segment.depth, segment.chunks) for segment in drawn}
    assert places == {
        (one[0].key, one[1].key): (0, 0, 2),
        (one[2].key, one[4].key): (2, 1, 3),
        (other[2].key, other[4].key): (2, 1, 3),
        (alone[0].key, alone[0].key): (0, 0, 1),
    }
    trunk = next(index for index, segment in enumerate(drawn) if segment.first == one[0].key)
    assert [segment.depth for segment in drawn[trunk : trunk + 3]] == [0, 1, 1]
    nbytes = layout_of_group(cache).nbytes
    assert {segment.nbytes for segment in drawn} == {nbytes, 2 * nbytes, 3 * nbytes}
    assert all(segment.oldest is not None and segment.waits_for is None for segment in drawn)


def test_a_gap_starts_a_segment_of_its_own(store):
    cache = Cache.open(store, identity())
    chunks = fill(cache, range(24))
    store.delete([name_of(cache, chunks[3])])
    first, behind = segments(store)
    assert (first.start, first.chunks) == (0, 3)
    assert (behind.start, behind.chunks, behind.waits_for) == (None, 2, chunks[3].key)


def test_chunks_that_lack_a_group_are_told_apart(store):
    cache = Cache.open(store, identity(group(), group("other", layers=(2, 3)), group("w", "window", (4,), window=4)))
    chunks = fill(cache, range(16))
    store.delete([name_of(cache, chunks[2], 1), name_of(cache, chunks[0], 2)])
    assert [(segment.chunks, segment.lacks) for segment in segments(store)] == [(2, ()), (1, ("other",)), (1, ())]


def test_what_does_not_give_its_key_has_no_place(store):
    cache = Cache.open(store, identity())
    chunks = fill(cache, range(12))
    rewrite(store, name_of(cache, chunks[1]), flip(layout_of_group(cache).tokens_range.start))
    rewrite(store, name_of(cache, chunks[2]), lambda data: b"")
    (space,) = scan(store).namespaces.values()
    links = read_links(store, space)
    assert links.parents == {chunks[0].key: chunks[0].parent}
    assert {stored.name for stored in links.damaged} == {name_of(cache, chunk) for chunk in chunks[1:]}
    assert links.ids[chunks[0].key] == chunks[0]


def test_long_prefixes_need_no_recursion(store):
    cache = Cache.open(store, identity(chunk_tokens=1))
    tokens = list(range(1500))
    chunks = cache.chunks(tokens)
    parents = {chunk.key: chunk.parent for chunk in chunks}
    assert unreachable(cache.geometry, {key: [0] for key in parents}, parents) == {}
    del parents[chunks[0].key]
    behind = unreachable(cache.geometry, {key: [0] for key in parents}, parents)
    assert {key: len(keys) for key, keys in behind.items()} == {chunks[0].key: 1499}


def test_where_all_groups_are_windows_a_long_run_needs_no_beginning(store):
    cache = Cache.open(store, identity(group("w", "window", window=8)))
    chunks = cache.chunks(range(40))
    there = {chunk.key: [0] for chunk in chunks if chunk.index not in (0, 4, 6)}
    parents = {chunk.key: chunk.parent for chunk in chunks if chunk.key in there}
    behind = unreachable(cache.geometry, there, parents)  # 1..3 and 7..9 fill the window, 5 does not
    assert behind == {chunks[4].key: [chunks[5].key]}


@pytest.mark.parametrize(("window", "long_enough"), [(1, 1), (2, 1), (5, 1), (6, 2), (9, 2), (10, 3), (13, 3)])
def test_a_run_is_as_long_as_servers_need_it(store, window, long_enough):
    """With chunks of 4 tokens. The next token is in its window too, and is computed anyway."""
    cache = Cache.open(store, identity(group("w", "window", window=window)))
    chunks = fill(cache, range(40))
    parents = {chunk.key: chunk.parent for chunk in chunks}
    for run in (1, 2, 3):
        there = {chunk.key: [0] for chunk in chunks[10 - run :]}
        exist = {(index, 0) for index in range(10 - run, 10)}
        served = servable(cache.geometry, 10, lambda places, exist=exist: [place in exist for place in places])
        assert (served == 10) == (run >= long_enough)
        assert (unreachable(cache.geometry, there, parents) == {}) == (served == 10)


def test_the_scan_sorts_names(store):
    cache = Cache.open(store, identity())
    (chunk,) = fill(cache, range(4))
    put(cache, chunk)
    store.put("tplayout-quarantine/x", b"1")
    store.put(f"{cache.namespace}/namespace.json.bak", b"22")
    catalog = scan(store)
    assert [info.key for info in catalog.tools] == ["tplayout-quarantine/x"]
    assert [info.key for info in catalog.foreign] == [f"{cache.namespace}/namespace.json.bak"]
    (space,) = catalog.namespaces.values()
    assert (space.chunks, catalog.objects, space.nbytes) == (1, 1, layout_of_group(cache).nbytes)
