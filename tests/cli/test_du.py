"""`tplayout du`: bytes by namespace, age and prefix."""

from pathlib import Path

import pytest

from tests.support.filled_store import cache_with_a_gap, layout_of_group
from tests.support.tool import ask, call
from tplayout.cache import Cache


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return cache_with_a_gap(tmp_path / "store")


def test_du_by_namespace_age_and_prefix(cache):
    nbytes = layout_of_group(cache).nbytes
    cache.store.put("foreign.txt", b"12345")
    by_namespace = ask("du", cache.store.url)
    assert [(row["name"], row["objects"]) for row in by_namespace["rows"]] == [(cache.namespace, 7), ("foreign", 1)]
    assert by_namespace["bytes"] == 7 * nbytes + 5
    by_age = ask("du", cache.store.url, "--by", "age")
    assert by_age["rows"][0] == {"younger_than": "1h", "objects": 7, "bytes": 7 * nbytes}
    by_prefix = ask("du", cache.store.url, "--by", "prefix")
    assert [(row["chunks"], row["tokens"], row["start_token"]) for row in by_prefix["rows"]] == [
        (6, 20, 0),
        (1, 4, None),
    ]


@pytest.mark.parametrize("by", ["namespace", "age", "prefix"])
def test_du_for_people(cache, by):
    result = call("du", cache.store.url, "--by", by, "--top", "1")
    assert result.exit_code == 0
    assert "7 objects" in result.stderr
    assert len(result.stdout.splitlines()) == {"namespace": 2, "age": 7, "prefix": 2}[by]
