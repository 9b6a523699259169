"""`tplayout ls`: what people and programs get to see."""

from pathlib import Path

import pytest

from tests.support.filled_store import cache_with_a_gap, fill, identity, layout_of_group
from tests.support.tool import ask, call, refused
from tplayout.cache import Cache


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return cache_with_a_gap(tmp_path / "store")


def test_ls_shows_namespaces(cache):
    result = call("ls", cache.store.url)
    assert result.exit_code == 0
    line = result.stdout.splitlines()[1]
    assert line.startswith(f"{cache.namespace}  my \ufffd[31mmodel  F16")
    assert "2 layers x 2 heads x (k2 v2)" in line
    (space,) = ask("ls", cache.store.url)["namespaces"]
    assert (space["namespace"], space["chunks"], space["bytes"]) == (
        cache.namespace,
        7,
        7 * layout_of_group(cache).nbytes,
    )
    assert space["groups"][0]["dtype"] == "F16"
    assert space["oldest"].endswith("Z")


def test_ls_shows_how_a_namespace_is_stored(cache):
    keyed = Cache.open(cache.store, identity(weights="files:77"), codec="shuffle-zstd", secret=b"0123456789abcdef")
    fill(keyed, range(8))
    lines = call("ls", cache.store.url).stdout.splitlines()
    (plain,) = [line for line in lines if line.startswith(cache.namespace)]
    (packed,) = [line for line in lines if line.startswith(keyed.namespace)]
    assert "  none  " in plain
    assert "  shuffle-zstd, secret  " in packed
    assert "codec    shuffle-zstd; digests blake3-keyed, secret " in call("ls", cache.store.url, keyed.namespace).stdout


def test_ls_shows_a_namespace_that_cannot_be_read(cache):
    cache.store.put(f"{cache.namespace}/namespace.json", b"{")
    result = call("ls", cache.store.url)
    assert "(namespace.json is damaged)" in result.stdout
    (space,) = ask("ls", cache.store.url)["namespaces"]
    assert (space["model"], "not-json" in space["fault"]) == (None, True)
    assert call("ls", cache.store.url, cache.namespace).exit_code == 1


def test_ls_shows_prefixes_as_a_tree(cache):
    result = call("ls", cache.store.url, cache.namespace[:6])
    assert result.exit_code == 0
    lines = [line.split() for line in result.stdout.splitlines() if ".." in line]
    assert [line[0] for line in lines if line[0] != "└"] == ["0..8", "?..?+4"]
    assert sorted(line[1] for line in lines if line[0] == "└") == ["8..12", "8..20"]
    assert "gap: waits for" in result.stdout
    document = ask("ls", cache.store.url, cache.namespace)
    assert sorted(prefix["tokens"] for prefix in document["prefixes"]) == [4, 4, 8, 12]
    assert {prefix["start_token"] for prefix in document["prefixes"]} == {None, 0, 8}
    assert document["damaged"] == []


def test_an_empty_store_is_no_error(tmp_path):
    result = call("ls", str(tmp_path))
    assert (result.exit_code, result.stdout) == (0, "")
    assert "holds no namespace" in result.stderr
    assert ask("ls", str(tmp_path))["namespaces"] == []


def test_what_is_no_store_is_said_to_be_something_else(cache, tmp_path):
    (tmp_path / "file").write_text("mine")
    assert "is a file" in refused("ls", tmp_path / "file")
    for verb in ("ls", "verify", "du"):
        line = refused(verb, f"{cache.store.url}/{cache.namespace}")
        assert f"is a namespace of the store {cache.store.url}: name that, and {cache.namespace}" in line


@pytest.mark.parametrize(("namespace", "code"), [("ffff", 1), ("xyz", 2), ("../..", 2)])
def test_a_namespace_that_is_not_there(cache, namespace, code):
    assert call("ls", cache.store.url, namespace).exit_code == code
