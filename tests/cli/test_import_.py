"""`tplayout import` as people call it."""

from pathlib import Path

import pytest

from tests.support.sample_stores import content, two_prompts
from tests.support.tool import ask, call, refused


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return two_prompts(tmp_path / "store")


def test_into_an_empty_store(store, tmp_path):
    ask("export", store, tmp_path / "file")
    assert ask("import", tmp_path / "file", tmp_path / "new", "--dry-run")["objects"] == 6
    assert not (tmp_path / "new").exists()
    report = ask("import", tmp_path / "file", f"file://{tmp_path / 'new'}")
    assert (report["objects"], report["present"]) == (6, 0)
    assert content(tmp_path / "new") == content(store)
    result = call("import", tmp_path / "file", tmp_path / "new")
    assert "6 were there" in result.stdout


def test_damage_is_an_exit_code_of_1(store, tmp_path):
    ask("export", store, tmp_path / "file")
    data = bytearray((tmp_path / "file").read_bytes())
    data[-2000] ^= 1
    (tmp_path / "file").write_bytes(data)
    report = ask("import", tmp_path / "file", tmp_path / "new", code=1)
    assert (report["objects"], len(report["damaged"])) == (5, 1)


def test_a_destination_that_is_a_file_is_left_alone(store, tmp_path):
    ask("export", store, tmp_path / "bundle")
    (tmp_path / "file").write_text("mine")
    line = refused("import", tmp_path / "bundle", tmp_path / "file")
    assert ("is a file" in line, "remove" in line, (tmp_path / "file").read_text()) == (True, False, "mine")


def test_without_a_secret_before_it_says_so(store, tmp_path):
    ask("export", store, tmp_path / "bundle")
    (tmp_path / "secret").write_text("0123456789abcdef")
    (tmp_path / "secret").chmod(0o600)
    secret = ("--secret-key-file", tmp_path / "secret")
    for verb, source in (("import", "bundle"), ("cp", "store")):
        result = call(verb, tmp_path / source, tmp_path / verb, *secret)
        assert (result.exit_code, "checked against damage, not forgery" in result.stderr) == (0, True)
        assert ask("verify", tmp_path / verb, *secret)["sound"] is True
    assert call("cp", tmp_path / "cp", tmp_path / "again", *secret).stderr == ""
    assert "written without a secret" in refused("export", store, tmp_path / "more", *secret)


def test_what_is_no_bundle(tmp_path):
    for nbytes in (0, 100, 2000):
        (tmp_path / "file").write_text("a" * nbytes)
        assert "no tplayout bundle" in refused("import", tmp_path / "file", tmp_path / "new", code=1)
