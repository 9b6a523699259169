"""`tplayout verify`: what it prints, JSON, exit codes, and that it asks before it moves anything."""

from functools import partial
from pathlib import Path

import pytest

from tests.support.filled_store import fill, flip, identity, name_of, rewrite
from tests.support.sample_stores import content
from tests.support.tool import ask, call
from tplayout.cache import Cache

run, asked = partial(call, "verify"), partial(ask, "verify")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache.open(tmp_path / "store", identity())


@pytest.fixture
def names(cache: Cache) -> list[str]:
    return [name_of(cache, chunk) for chunk in fill(cache, range(16))]


def test_a_sound_store(cache, names):
    result = run(cache.store.url)
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith("4 objects in 1 namespace checked (every byte)")
    assert result.stdout.endswith("sound\n")


def test_damage_is_named_with_its_fix_and_the_fix_mends_it(cache, names):
    rewrite(cache.store, names[3], flip(-1))
    result = run(cache.store.url)
    assert result.exit_code == 1
    lines = result.stdout.splitlines()
    assert lines[0].split() == ["damaged", names[3]]
    assert lines[-1] == "NOT sound: 1 damaged"
    fix = lines[2].removeprefix("    fix: tplayout verify ").split()

    dry = run(*fix, "--dry-run")
    assert (dry.exit_code, "would move 1 object to" in dry.stderr) == (1, True)
    assert run(*fix).exit_code == 2  # nobody can be asked
    assert cache.store.exists([names[3]]) == [True]
    assert run(*fix, "--yes").exit_code == 0
    assert cache.store.exists([names[3], f"tplayout-quarantine/{names[3]}"]) == [False, True]
    assert run(cache.store.url).exit_code == 0


def test_json_is_one_document_with_the_documented_keys(cache, names):
    rewrite(cache.store, names[1], flip(-1))
    assert asked(cache.store.url, code=1)["sound"] is False
    document = asked(cache.store.url, "--quarantine", "--yes", "--also", "unreachable")
    assert document["sound"] is True  # as the exit code: nothing damaged is left in its place
    assert document.keys() == {
        *("url", "deep", "sound", "namespaces", "checked", "bytes", "skipped", "undecrypted", "findings", "quarantined")
    }
    damage, note = document["findings"]
    assert damage.keys() == {
        *("kind", "damage", "object", "reason", "detail", "fix", "bytes", "home", "objects"),
    }
    assert (damage["kind"], damage["object"], damage["damage"]) == ("damaged", names[1], True)
    assert (note["kind"], note["damage"], set(note["objects"])) == ("unreachable", False, set(names[2:]))
    assert {move["object"] for move in document["quarantined"]} == set(names[1:])


def test_foreign_files_are_moved_only_when_they_are_named(cache, names):
    cache.store.put("README.txt", b"mine")
    assert run(cache.store.url, "--quarantine", "--yes").exit_code == 1
    assert cache.store.exists(["README.txt"]) == [True]
    assert run(cache.store.url, "--quarantine", "--yes", "--object", "README.txt").exit_code == 0
    assert cache.store.get("tplayout-quarantine/README.txt") == b"mine"


@pytest.mark.parametrize("options", [["--dry-run"], ["--also", "foreign"], ["--max-rate", "fast"], ["--object", "no"]])
def test_wrong_use(cache, names, options):
    result = run(cache.store.url, *options)
    assert (result.exit_code, result.stdout) == (2, "")


def test_nobody_to_ask_is_said_before_anything_is_read(cache, names, monkeypatch):
    monkeypatch.setattr("tplayout.cli.verify.verify_store", None)
    result = run(cache.store.url, "--quarantine", "--json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "add --yes" in result.stderr


@pytest.mark.parametrize("given", ["secret", "encryption-key"])
def test_what_is_written_without_the_secret_or_key_that_is_given_is_told_and_left(cache, names, tmp_path, given):
    (tmp_path / "key").write_text("ab" * 32)
    (tmp_path / "new").mkdir()
    option = (f"--{given}-key-file" if given == "secret" else f"--{given}-file", str(tmp_path / "key"))
    before = content(tmp_path / "store")
    result = run(cache.store.url, *option, "--quarantine", "--yes")
    kind = {"secret": "unauthenticated", "encryption-key": "unencrypted"}[given]
    said = {"secret": "not authenticated: written without a secret", "encryption-key": "not encrypted"}[given]
    assert (result.exit_code, said in result.stdout) == (1, True)
    assert result.stdout.splitlines()[-1] == f"NOT sound: 1 {kind}"
    assert content(tmp_path / "store") == before
    (finding,) = asked(cache.store.url, *option, code=1)["findings"]
    fix = finding["fix"].replace("NEW-URL", str(tmp_path / "new")).replace("FILE", option[1])
    assert call(*fix.split()[1:]).exit_code == 0
    assert asked(tmp_path / "new", *option)["sound"] is True


def test_an_empty_place_is_not_called_sound(tmp_path):
    result = run(tmp_path)
    assert (result.exit_code, "sound" in result.stdout) == (0, False)
    assert "nothing was checked" in result.stderr
    assert asked(tmp_path)["sound"] is None
    (tmp_path / "thesis").write_text("mine")
    result = run(tmp_path)
    assert (result.exit_code, "no namespace is stored in" in result.stderr) == (1, True)


def test_a_store_that_cannot_be_reached():
    result = run("s3://bucket/x", "--storage-option", "endpoint_url=http://127.0.0.1:1", "--timeout", "1")
    assert (result.exit_code, result.stdout) == (3, "")
    assert result.stderr.startswith("tplayout: ")


def test_a_namespace_that_is_not_there(cache, names):
    assert run(cache.store.url, "--namespace", "0000").exit_code == 1
