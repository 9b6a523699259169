"""`tplayout import` as people call it."""

from pathlib import Path

import pytest

from tests.support.sample_stores import content, two_prompts
from tests.support.tool import ask, call


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


def test_what_is_no_bundle(tmp_path):
    (tmp_path / "file").write_text("a" * 2000)
    result = call("import", tmp_path / "file", tmp_path / "new")
    assert result.exit_code == 1
    assert "no tplayout bundle" in result.stderr
