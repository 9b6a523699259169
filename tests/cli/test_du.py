"""`tplayout du`: bytes by namespace, age and prefix."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.support.filled_store import fill, identity, layout_of_group, name_of
from tplayout.cache import Cache
from tplayout.cli.main import main


def run(*arguments: str) -> Result:
    return CliRunner().invoke(main, [*arguments])


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    cache = Cache.open(tmp_path / "store", identity(), model="my \x1b[31mmodel")
    fill(cache, range(20))
    chunks = fill(cache, [*range(8), *range(50, 62)])
    cache.store.delete([name_of(cache, chunks[3])])
    return cache


def test_du_by_namespace_age_and_prefix(cache):
    nbytes = layout_of_group(cache).nbytes
    cache.store.put("foreign.txt", b"12345")
    by_namespace = json.loads(run("du", cache.store.url, "--json").stdout)
    assert [(row["name"], row["objects"]) for row in by_namespace["rows"]] == [(cache.namespace, 7), ("foreign", 1)]
    assert by_namespace["bytes"] == 7 * nbytes + 5
    by_age = json.loads(run("du", cache.store.url, "--by", "age", "--json").stdout)
    assert by_age["rows"][0] == {"younger_than": "1h", "objects": 7, "bytes": 7 * nbytes}
    by_prefix = json.loads(run("du", cache.store.url, "--by", "prefix", "--json").stdout)
    assert [(row["chunks"], row["tokens"], row["start_token"]) for row in by_prefix["rows"]] == [
        (6, 20, 0),
        (1, 4, None),
    ]


@pytest.mark.parametrize("by", ["namespace", "age", "prefix"])
def test_du_for_people(cache, by):
    result = run("du", cache.store.url, "--by", by, "--top", "1")
    assert result.exit_code == 0
    assert "7 objects" in result.stderr
    assert len(result.stdout.splitlines()) == {"namespace": 2, "age": 7, "prefix": 2}[by]
