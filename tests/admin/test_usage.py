"""Bytes by namespace, prefix and age."""

from pathlib import Path

from tests.support.filled_store import fill, identity, layout_of_group
from tplayout.admin.catalog import Stored, scan
from tplayout.admin.prefixes import read_links
from tplayout.admin.usage import by_age, by_namespace, by_prefix
from tplayout.cache import Cache
from tplayout.storage.url import open_store


def test_namespaces_largest_first_and_what_is_none(tmp_path: Path):
    store = open_store(tmp_path)
    small, large = Cache.open(store, identity()), Cache.open(store, identity(weights="files:01"))
    fill(small, range(4))
    fill(large, range(12))
    store.put("mine.txt", b"123")
    store.put("tplayout-quarantine/a", b"1234567")
    nbytes = layout_of_group(small).nbytes
    assert [(share.name, share.objects, share.nbytes) for share in by_namespace(scan(store))] == [
        (large.namespace, 3, 3 * nbytes),
        (small.namespace, 1, nbytes),
        ("foreign", 1, 3),
        ("tools", 1, 7),
    ]


def test_prefixes_add_up_what_continues_them(tmp_path: Path):
    store = open_store(tmp_path)
    cache = Cache.open(store, identity())
    first = fill(cache, range(20))[0]
    fill(cache, [*range(8), *range(50, 70)])
    fill(cache, range(100, 104))
    (space,) = scan(store).namespaces.values()
    nbytes = layout_of_group(cache).nbytes
    large, small = by_prefix(space, read_links(store, space))
    assert (large.first, large.chunks, large.tokens, large.nbytes) == (first.key, 10, 28, 10 * nbytes)
    assert (small.chunks, small.tokens, small.start) == (1, 4, 0)
    assert large.newest is not None


def test_ages():
    times = [999.0, 1001.0, -10 * 86400, -500 * 86400, None]
    objects = [Stored(str(time), b"", 0, 10, time) for time in times]
    shares = {share.name: share.objects for share in by_age(objects, now=1000.0)}
    assert shares == {"1h": 2, "1d": 0, "7d": 0, "30d": 1, "1y": 0, "older": 1, "unknown": 1}
    assert "unknown" not in {share.name for share in by_age([], now=0)}
