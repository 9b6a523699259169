"""`tplayout convert` as people call it."""

import json
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from tests.support.sample_stores import TOKENS, content, damage_one, identity, store_prompts
from tests.support.tool import ask, call, refused
from tplayout.admin.chains import build_index
from tplayout.admin.namespaces import begin_namespace
from tplayout.admin.transfer import store_prefix
from tplayout.format.keys import chain
from tplayout.storage.url import open_store


class Values:
    """Element [head, layer, part, token, dim] is a number of its own."""

    def fill(self, group, tokens, out):
        values = np.arange(4 * 2 * 2 * 16 * 8, dtype="f2").reshape(4, 2, 2, 16, 8) / 7
        out.view("f2")[...] = values[:, :, :, tokens.start : tokens.stop]
        return True


@pytest.fixture
def url(tmp_path: Path) -> str:
    with open_store(tmp_path / "store") as store:
        target = begin_namespace(store, identity(), "m")
        store_prefix(Values(), chain(target.digest, TOKENS, 4), target)
    return str(tmp_path / "store")


run, fail = partial(ask, "convert"), partial(refused, "convert")


def test_store_to_shards_to_store(url, tmp_path):
    report = run(url, tmp_path / "four", "--tp", 4)
    assert (report["from"], report["to"], report["files_written"]) == ("store", "shards", 4)
    report = run(f"file://{tmp_path / 'four'}", tmp_path / "back")
    assert (report["from"], report["to"], report["objects_written"]) == ("shards", "store", 4)
    run(tmp_path / "back", tmp_path / "two", "--tp", 2, "--pp", 2, "--pp-partition", "1,1")
    (place,) = (tmp_path / "two").iterdir()
    assert load_file(place / "tp-1-of-2.pp-1-of-2.safetensors")["layers.1.v"].shape == (16, 2, 8)
    assert run(url, tmp_path / "four", "--tp", 4)["files_present"] == 4


def test_uneven_sizes_are_wrong_use(url, tmp_path):
    assert "TP size 3 cannot split 4 KV heads" in fail(url, tmp_path / "out", "--tp", 3)
    assert "split 2 layers" in fail(url, tmp_path / "out", "--tp", 1, "--pp", 2, "--pp-partition", "2,1")


def test_only_some_prefixes(url, tmp_path):
    (tmp_path / "prompt.json").write_text(json.dumps([*TOKENS[:9], 99, 99, 99]))
    report = run(url, tmp_path / "out", "--tp", 1, "--tokens", tmp_path / "prompt.json")
    assert report["prefixes"] == 1
    (file,) = (tmp_path / "out").rglob("*.safetensors")
    assert list(load_file(file)["tokens"]) == TOKENS[:8]
    (tmp_path / "prompt.json").write_text("7 7 7 7")
    assert "nothing of this prompt" in fail(
        url, tmp_path / "out", "--tp", 1, "--tokens", tmp_path / "prompt.json", code=1
    )
    assert "no chunk's key begins" in fail(url, tmp_path / "out", "--tp", 1, "--prefix", "0000000", code=1)


def test_chunk_size_and_dtype(url, tmp_path):
    assert "--lossy" in fail(url, tmp_path / "out", "--dtype", "BF16")
    report = run(url, tmp_path / "out", "--dtype", "BF16", "--lossy", "--chunk-tokens", 8)
    assert report["objects_written"] == 2
    assert 0 < report["losses"]["full"]["mean"] < report["losses"]["full"]["max"] <= 1
    result = call("convert", url, tmp_path / "w", "--dtype", "BF16", "--lossy")
    assert "error at most" in result.stdout


def test_damage_is_an_exit_code_of_1(url, tmp_path):
    name = damage_one(tmp_path / "store")
    report = run(url, tmp_path / "out", "--chunk-tokens", 8, code=1)
    assert list(report["damaged"]) == [str(name.relative_to(tmp_path / "store"))]


def test_dry_runs_write_nothing(url, tmp_path):
    for extra in (["--tp", 2], ["--chunk-tokens", 8]):
        assert run(url, tmp_path / "out", *extra, "--dry-run")["dry_run"]
        assert not (tmp_path / "out").exists()


def test_what_makes_no_sense_is_wrong_use(url, tmp_path):
    assert "--tp, --chunk-tokens, --dtype or --codec" in fail(url, tmp_path / "out")
    assert "--lossy does not go with" in fail(url, tmp_path / "out", "--tp", 2, "--lossy")
    assert "local directory" in fail(url, "memory://x/y", "--tp", 2)
    run(url, tmp_path / "four", "--tp", 4)
    assert "into a store first" in fail(tmp_path / "four", tmp_path / "out", "--tp", 2)
    assert "--dtype does not go with" in fail(tmp_path / "four", tmp_path / "out", "--dtype", "F32")
    assert "more than the model's 2 layers" in fail(url, tmp_path / "out", "--tp", 2, "--pp", 99)
    for options in ([], ["--tp", 2], ["--codec", "none"]):
        assert "no such path" in fail(tmp_path / "nothing", tmp_path / "out", *options, code=3)


@pytest.mark.parametrize("destination", ["store", "store/sub", "alias", "alias/sub/deep", ""])
@pytest.mark.parametrize("options", [["--codec", "shuffle-zstd"], ["--chunk-tokens", 8], ["--tp", 2]])
def test_a_source_is_never_written_to(url, tmp_path, destination, options):
    (tmp_path / "alias").symlink_to(tmp_path / "store")
    before = content(tmp_path)
    line = fail(url, tmp_path / destination, *options)
    assert ("one place" in line or "lies within" in line, content(tmp_path)) == (True, before)
    assert ask("verify", url)["sound"] is True


def test_shards_of_another_split_are_not_mixed_with_what_is_there(url, tmp_path):
    run(url, tmp_path / "four", "--tp", 4)
    before = content(tmp_path / "four")
    for options in (["--tp", 2], ["--tp", 4, "--pp", 2], ["--tp", 2, "--dry-run"]):
        line = fail(url, tmp_path / "four", *options)
        assert ("tp-0-of-4.pp-0-of-1.safetensors is a shard of another" in line, "another DST" in line) == (True, True)
    (place,) = (tmp_path / "four").iterdir()
    assert "another TP or PP size" in fail(url, place, "--tp", 2)
    assert content(tmp_path / "four") == before
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "model.safetensors").write_bytes(b"somebody else's")
    run(url, tmp_path / "two", "--tp", 2)


def test_a_destination_that_is_a_file_is_left_alone(url, tmp_path):
    (tmp_path / "file").write_text("mine")
    run(url, tmp_path / "four", "--tp", 4)
    for source, options in ((url, ["--codec", "none"]), (url, ["--tp", 2]), (tmp_path / "four", [])):
        for place in ("file", "file/below"):
            line = fail(source, tmp_path / place, *options)
            assert (f"{tmp_path / 'file'}" in line, "is a file" in line, "remove" in line) == (True, True, False)
    (tmp_path / "tokens").write_text(" ".join(map(str, TOKENS)))
    line = fail(url, tmp_path / "none" / "file", "--transformers", "--tokens", tmp_path / "tokens")
    assert "no directory" in line
    assert (tmp_path / "file").read_text() == "mine"


def test_a_source_that_is_another_kind_of_file(url, tmp_path):
    (tmp_path / "ids.json").write_text(json.dumps(TOKENS))
    assert "no safetensors file" in fail(tmp_path / "ids.json", tmp_path / "out")
    run(url, tmp_path / "four", "--tp", 4)
    shard = next((tmp_path / "four").rglob("*.safetensors"))
    assert "name the directory" in fail(shard, tmp_path / "out")


def test_what_prefixes_share_is_counted_once(url, tmp_path):
    """Neither were written before, nor twice."""
    store_prompts(tmp_path / "two", TOKENS, [*TOKENS[:8], *[9] * 8])
    run(tmp_path / "two", tmp_path / "shards", "--tp", 2)
    for options in (["--dry-run"], []):
        report = run(tmp_path / "shards", tmp_path / "back", *options)
        assert (report["prefixes"], report["objects_written"], report["objects_present"]) == (2, 6, 0)
    report = run(tmp_path / "shards", tmp_path / "back")
    assert (report["objects_written"], report["objects_present"]) == (0, 6)
    report = run(tmp_path / "two", tmp_path / "eight", "--chunk-tokens", 8)
    assert (report["objects_written"], report["objects_present"]) == (3, 0)


def test_another_codec_and_back(url, tmp_path):
    """The bytes before and after are told; the way back gives the same store."""
    packed, back = tmp_path / "packed", tmp_path / "back"
    assert run(url, packed, "--codec", "shuffle-zstd", "--dry-run")["objects_written"] == 4
    assert not packed.exists()
    report = run(url, packed, "--codec", "shuffle-zstd")
    before, after = (sum(file.stat().st_size for file in Path(each).rglob("*.0.safetensors")) for each in (url, packed))
    assert (report["bytes_read"], report["bytes"], report["objects_written"]) == (before, after, 4)
    assert after < before
    assert run(url, packed, "--codec", "shuffle-zstd")["objects_present"] == 4
    shown = call("convert", packed, back, "--codec", "none")
    assert shown.exit_code == 0, shown.output
    assert " before), 0 were there" in shown.stdout
    assert content(back) == content(Path(url))


def test_another_codec_with_another_chunk_size(url, tmp_path):
    report = run(url, tmp_path / "eight", "--codec", "shuffle-zstd", "--chunk-tokens", 8)
    assert (report["objects_written"], report["bytes_read"] > report["bytes"]) == (2, True)
    run(tmp_path / "eight", tmp_path / "back", "--codec", "none", "--chunk-tokens", 4)
    assert content(tmp_path / "back") == content(Path(url))
    run(tmp_path / "eight", tmp_path / "shards", "--tp", 2)
    run(url, tmp_path / "reference", "--chunk-tokens", 8)
    run(tmp_path / "reference", tmp_path / "shards of it", "--tp", 2)
    assert content(tmp_path / "shards") == content(tmp_path / "shards of it")


@pytest.mark.parametrize("options", [["--codec", "shuffle-zstd"], ["--codec", "none"], ["--chunk-tokens", 8]])
def test_who_gives_a_secret_gets_keyed_digests(url, tmp_path, options):
    (tmp_path / "secret").write_text("0123456789abcdef")
    (tmp_path / "secret").chmod(0o600)
    secret = ("--secret-key-file", tmp_path / "secret")
    result = call("convert", url, tmp_path / "to", *options, *secret)
    assert (result.exit_code, "checked against damage, not forgery" in result.stderr) == (0, True)
    assert [space["digest"] for space in ask("ls", tmp_path / "to")["namespaces"]] == ["blake3-keyed"]
    assert ask("verify", tmp_path / "to", *secret)["sound"] is True
    run(url, tmp_path / "there", *options)
    before = content(tmp_path / "there")
    assert "written without a secret" in fail(url, tmp_path / "there", *options, *secret)
    assert content(tmp_path / "there") == before


def test_a_codec_that_makes_no_sense_is_wrong_use(url, tmp_path):
    assert "--lossy does not go with" in fail(url, tmp_path / "out", "--codec", "none", "--lossy")
    assert "--codec does not go with a store to shards" in fail(url, tmp_path / "out", "--tp", 2, "--codec", "none")
    run(url, tmp_path / "four", "--tp", 4)
    assert "--codec does not go with shards" in fail(tmp_path / "four", tmp_path / "out", "--codec", "none")


def test_a_codec_whose_library_is_missing(url, tmp_path, monkeypatch):
    run(url, tmp_path / "packed", "--codec", "shuffle-zstd")
    monkeypatch.setitem(sys.modules, "zstandard", None)
    assert "pip install 'tplayout[zstd]'" in fail(url, tmp_path / "out", "--codec", "shuffle-zstd")
    assert "pip install 'tplayout[zstd]'" in fail(tmp_path / "packed", tmp_path / "out", "--codec", "none")


@pytest.mark.parametrize(
    ("verb", "more"),
    [
        ("convert", ["--tp", 2]),
        ("convert", ["--chunk-tokens", 8]),
        ("convert", ["--codec", "shuffle-zstd"]),
        ("mv", ["--yes"]),
    ],
)
def test_the_ids_of_a_namespace_are_read_once(url, tmp_path, monkeypatch, verb, more):
    """Choosing prefixes needs them, and so does what is done with the prefixes then."""
    read = []

    def count(origin):
        read.append(origin)
        return build_index(origin)

    for module in ("chains", "convert", "copy", "rechunk"):
        monkeypatch.setattr(f"tplayout.admin.{module}.build_index", count)
    (tmp_path / "prompt.json").write_text(json.dumps(TOKENS))
    ask(verb, url, tmp_path / "there", "--tokens", tmp_path / "prompt.json", *more)
    assert len(read) == 1
