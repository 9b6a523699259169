"""When an object was last used: noted where the store can, and by touching alone."""

import os
import time

import pytest

from tplayout.errors import StorageError
from tplayout.storage.url import open_store

OLD = 1_600_000_000.0


@pytest.fixture
def store(tmp_path):
    with open_store(tmp_path / "store") as opened:
        opened.put("a/b", b"content")
        os.utime(tmp_path / "store" / "a" / "b", (OLD, OLD))
        yield opened


def info(store):
    (found,) = store.list()
    return found


def test_touching_tells_the_last_use_and_changes_nothing_else(store):
    assert store.notes_use
    assert (info(store).modified, info(store).used) == (OLD, OLD)
    before = time.time()
    store.touch(["a/b", "missing", "a", "missing/c"])
    assert info(store).modified == OLD
    assert before - 1 <= info(store).used <= time.time() + 1
    assert store.get("a/b") == b"content"


def test_reading_is_no_use(store):
    """A tool that reads everything must not make everything look used."""
    store.get("a/b")
    store.get_into("a/b", bytearray(7))
    store.get_range("a/b", 1, 2)
    store.exists(["a/b"])
    assert info(store).used == OLD


def test_names_are_checked(store):
    with pytest.raises(StorageError):
        store.touch(["../x"])


def test_a_link_is_not_followed(store, tmp_path):
    (tmp_path / "outside").write_bytes(b"x")
    os.utime(tmp_path / "outside", (OLD, OLD))
    (tmp_path / "store" / "link").symlink_to(tmp_path / "outside")
    store.touch(["link"])
    assert os.stat(tmp_path / "outside").st_atime == OLD


def test_other_stores_do_not_note_it(tmp_path):
    with open_store(f"memory://{str(tmp_path).strip('/')}") as store:
        store.put("a", b"x")
        store.touch(["a", "missing"])
        assert not store.notes_use
        assert info(store).used is None
