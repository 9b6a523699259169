"""What an object says it is, against what its name says."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tplayout.cache.chunk_ids import read_id
from tplayout.errors import StorageError
from tplayout.format.chunk import write_info
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.keys import chain
from tplayout.format.layout import chunk_layout
from tplayout.storage.base import Store
from tplayout.storage.url import open_store

DIGEST = bytes(range(32))
GEOMETRY = Geometry(4, (Group("full", "full", (0, 1), 2, (Part("k", 8), Part("v", 8)), "F16"),))
LAYOUT = chunk_layout(GEOMETRY, 0, "xxh3-128")
FIRST, SECOND = chain(DIGEST, [1, 2, 3, 4, 5, 6, 7, 8], 4)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with open_store(tmp_path) as opened:
        for chunk in (FIRST, SECOND):
            data = bytearray(LAYOUT.nbytes)
            write_info(data, LAYOUT, chunk)
            opened.put(chunk.key.hex(), data)
        yield opened


def test_tokens_parent_and_key_are_those_that_were_written(store: Store) -> None:
    assert read_id(store, LAYOUT, DIGEST, FIRST.key.hex(), FIRST.key) == FIRST
    found = read_id(store, LAYOUT, DIGEST, SECOND.key.hex(), SECOND.key)
    assert found is not None
    assert (found.tokens, found.parent, found.index) == (SECOND.tokens, FIRST.key, -1)


def test_what_is_gone_cut_short_or_misnamed_says_nothing(store: Store) -> None:
    assert read_id(store, LAYOUT, DIGEST, "missing", FIRST.key) is None
    assert read_id(store, LAYOUT, DIGEST, SECOND.key.hex(), FIRST.key) is None
    store.put("short", bytes(100))
    assert read_id(store, LAYOUT, DIGEST, "short", FIRST.key) is None


def test_a_store_that_fails_is_no_damage(store: Store) -> None:
    store.close()
    with pytest.raises(StorageError):
        read_id(store, LAYOUT, DIGEST, FIRST.key.hex(), FIRST.key)
