"""Verification that stops and goes on: what the journal holds, and journals that are of something else."""

import json
import os
from pathlib import Path

import pytest

from tests.support.filled_store import fill, flip, identity, layout_of_group, name_of, rewrite
from tplayout.admin.verify import verify_store
from tplayout.cache import Cache
from tplayout.errors import ConfigError, Unavailable
from tplayout.storage.base import Store
from tplayout.storage.url import open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


class Breaking:
    """Makes a store fail after some whole reads."""

    def __init__(self, store: Store, reads: int) -> None:
        self._get_into, self._left = store.get_into, reads
        self.reads = 0
        store.get_into = self  # type: ignore[method-assign,assignment]

    def __call__(self, key, buf, **options):
        self.reads += 1
        if self.reads > self._left:
            raise Unavailable("the network is gone")
        return self._get_into(key, buf, **options)


def test_an_interrupted_run_goes_on(store, tmp_path):
    cache = Cache.open(store, identity())
    names = [name_of(cache, chunk) for chunk in fill(cache, range(400))]
    layout = layout_of_group(cache)
    rewrite(store, min(names), flip(layout.nbytes - 1))
    rewrite(store, max(names), flip(layout.nbytes - 1))
    journal = str(tmp_path / "journal")
    broken = open_store(tmp_path / "store")
    Breaking(broken, 60)
    with pytest.raises(Unavailable):
        verify_store(broken, journal_path=journal, jobs=1)
    with open(journal, "a") as stream:
        stream.write('{"piece": "cut o')  # as kill -9 leaves it
    counted = Breaking(store, 1000)
    seen: list[tuple[int, int | None]] = []
    report = verify_store(
        store, journal_path=journal, jobs=1, progress=lambda done, total, nbytes: seen.append((done, total))
    )
    assert 40 <= counted.reads < 60
    assert seen[-1] == (100, 100)
    assert report.checked == 100
    assert {finding.name for finding in report.damage} == {min(names), max(names)}
    assert {len(note.objects) for note in report.notes} <= set(range(1, 100))
    assert not os.path.exists(journal)


def test_a_journal_of_something_else_is_refused(store, tmp_path):
    fill(Cache.open(store, identity()), range(8))
    journal = tmp_path / "journal"
    journal.write_text("my shopping list\n")
    with pytest.raises(ConfigError, match="no journal"):
        verify_store(store, journal_path=str(journal))
    assert journal.read_text() == "my shopping list\n"
    journal.write_text(f'{{"tplayout_journal": 1, "url": "{store.url}", "deep": false}}\n')
    with pytest.raises(ConfigError, match="deep"):
        verify_store(store, journal_path=str(journal))


def test_a_journal_whose_pieces_are_none_is_refused(store, tmp_path):
    fill(Cache.open(store, identity()), range(8))
    journal = tmp_path / "journal"
    task = {"url": store.url, "deep": True, "namespace": None, "only": []}
    for result in (None, {"no": 1}):
        lines = [{"tplayout_journal": 1, **task}, {"piece": "x", "result": result}]
        journal.write_text("".join(json.dumps(line) + "\n" for line in lines))
        with pytest.raises(ConfigError, match="begin anew"):
            verify_store(store, journal_path=str(journal))
