"""`tplayout inspect`: namespaces, chunks sound and damaged, statistics and picture, as text and JSON."""

import json
from functools import partial
from pathlib import Path

import pytest

from tests.support.filled_store import fill, flip, identity, layout_of_group, name_of, rewrite
from tests.support.tool import ask, call
from tplayout.cache import Cache

run, asked = partial(call, "inspect"), partial(ask, "inspect")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache.open(tmp_path / "store", identity(), model="tiny")


def test_namespaces_in_full(cache):
    fill(cache, range(8))
    result = run(cache.store.url)
    assert result.exit_code == 0
    assert f"namespace {cache.namespace}" in result.stdout
    assert "config        rope_theta = 10000" in result.stdout
    (space,) = asked(cache.store.url)["namespaces"]
    assert space["identity"] == json.loads(json.dumps(cache.identity.to_json()))
    assert space["layouts"][0]["bytes"] == layout_of_group(cache).nbytes


def test_a_sound_chunk(cache):
    _, chunk = fill(cache, range(8))
    result = run(cache.store.url, chunk.key.hex()[:8])
    assert result.exit_code == 0
    assert "tokens    4 5 6 7\n" in result.stdout
    assert result.stdout.endswith("  sound\n")
    document = asked(cache.store.url, chunk.key.hex()[:8], "--cell", "1:0")
    assert (document["sound"], document["tokens"], document["fault"]) == (True, [4, 5, 6, 7], None)
    assert (document["parent"], document["first_chunk"], document["has_extras"]) == (chunk.parent.hex(), False, False)
    assert [one["ok"] for one in document["cells"]] == [True] * 4
    assert [one["part"] for one in document["statistics"]] == ["k", "v"]


def test_a_damaged_chunk_is_shown_and_the_answer_is_no(cache, tmp_path):
    (chunk,) = fill(cache, range(4))
    rewrite(cache.store, name_of(cache, chunk), flip(layout_of_group(cache).cell_range(1, 1).start))
    picture = tmp_path / "chunk.png"
    arguments = [cache.store.url, name_of(cache, chunk), "--cell", "1:1", "--cells", "--heatmap", str(picture)]
    result = run(*arguments)
    assert result.exit_code == 1
    assert "4, 1 damaged\n            head 1, layer 1\n" in result.stdout
    assert "DAMAGED   digest-mismatch" in result.stdout
    assert picture.read_bytes().startswith(b"\x89PNG")
    document = asked(*arguments, code=1)
    assert (document["sound"], document["fault"]["reason"]) == (False, "digest-mismatch")
    assert document["heatmap"] == str(picture)


@pytest.mark.parametrize(
    ("options", "code"),
    [
        (["--cell", "1:1"], 2),
        (["ffffffffffff"], 1),
        (["no"], 2),
        (["KEY", "--cell", "1"], 2),
        (["KEY", "--cell", "9:9"], 2),
        (["KEY", "--group", "7"], 1),
        (["KEY", "--group", "none"], 2),
    ],
)
def test_wrong_use_and_what_is_not_there(cache, options, code):
    (chunk,) = fill(cache, range(4))
    arguments = [chunk.key.hex() if option == "KEY" else option for option in options]
    result = run(cache.store.url, *arguments)
    assert (result.exit_code, result.stdout) == (code, "")
