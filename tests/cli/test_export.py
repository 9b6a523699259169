"""`tplayout export` as people call it."""

import json
from pathlib import Path

import pytest

from tests.support.sample_stores import damage_one, two_prompts
from tests.support.tool import ask, call, refused


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return two_prompts(tmp_path / "store")


def test_one_prompt(store, tmp_path):
    (tmp_path / "prompt").write_text(json.dumps([9] * 11))
    report = ask("export", store, tmp_path / "file", "--tokens", tmp_path / "prompt")
    assert (report["prefixes"], report["objects"]) == (1, 2)
    assert report["bytes"] == (tmp_path / "file").stat().st_size
    report = ask("export", store, tmp_path / "all", "--dry-run")
    assert (report["prefixes"], report["objects"]) == (2, 6)
    assert not (tmp_path / "all").exists()


def test_a_file_is_not_replaced_unasked(store, tmp_path):
    (tmp_path / "file").write_text("precious")
    result = call("export", store, tmp_path / "file")
    assert result.exit_code == 2
    assert "--force" in result.stderr
    assert (tmp_path / "file").read_text() == "precious"
    assert "wrote" in call("export", store, tmp_path / "file", "--force").stdout


@pytest.mark.parametrize(("file", "said"), [("-", "stdout"), (".", "is a directory"), ("deep/file", "no directory")])
def test_a_place_where_no_file_can_be_written(store, tmp_path, monkeypatch, file, said):
    monkeypatch.chdir(tmp_path)
    for options in ([], ["--force"], ["--dry-run"]):
        assert said in refused("export", store, file, *options)
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_damage_is_an_answer_of_no(store, tmp_path):
    name = damage_one(store)
    result = call("export", store, tmp_path / "file")
    assert result.exit_code == 1
    assert name.name in result.stderr
    assert not (tmp_path / "file").exists()
