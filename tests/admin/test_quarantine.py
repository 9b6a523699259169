"""What is moved aside, what goes home, and what is left alone."""

from pathlib import Path

import pytest

from tests.support.filled_store import fill, flip, identity, name_of, put, rewrite
from tplayout.admin.quarantine import ON_REQUEST, plan, quarantine
from tplayout.admin.verify import verify_store
from tplayout.cache import Cache
from tplayout.storage.base import Store
from tplayout.storage.url import open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def test_a_sound_object_under_a_wrong_name_goes_home(store):
    cache = Cache.open(store, identity())
    first, second = (name_of(cache, chunk) for chunk in fill(cache, range(8)))
    store.put(second, store.get(first))  # the right name is taken
    (move,) = quarantine(store, plan(verify_store(store).findings))
    assert move.to == f"tplayout-quarantine/{second}"
    store.put(second, store.get(first))
    store.delete([first])
    (move,) = quarantine(store, plan(verify_store(store).findings))
    assert (move.name, move.to) == (second, first)
    assert [info.key for info in store.list(f"{cache.namespace}/") if "json" not in info.key] == [first]


def test_what_is_sound_again_is_not_moved(store):
    cache = Cache.open(store, identity())
    (chunk,) = fill(cache, range(4))
    rewrite(store, name_of(cache, chunk), flip(-1))
    report = verify_store(store)
    put(cache, chunk)  # a server stores it again meanwhile
    (move,) = quarantine(store, plan(report.findings, ON_REQUEST))
    assert move.left
    assert verify_store(store).findings == []


def test_what_is_gone_is_no_error(store):
    cache = Cache.open(store, identity())
    (chunk,) = fill(cache, range(4))
    rewrite(store, name_of(cache, chunk), flip(-1))
    report = verify_store(store)
    store.delete([name_of(cache, chunk)])
    (move,) = quarantine(store, plan(report.findings))
    assert move.left
