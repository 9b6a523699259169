"""`tplayout export` as people call it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.sample_stores import TOKENS, run, store_prompts
from tplayout.cli.main import main


@pytest.fixture
def store(tmp_path: Path) -> Path:
    store_prompts(tmp_path / "store", TOKENS, [9] * 8)
    return tmp_path / "store"


def test_one_prompt(store, tmp_path):
    (tmp_path / "prompt").write_text(json.dumps([9] * 11))
    report = run("export", store, tmp_path / "file", "--tokens", tmp_path / "prompt")
    assert (report["prefixes"], report["objects"]) == (1, 2)
    assert report["bytes"] == (tmp_path / "file").stat().st_size
    report = run("export", store, tmp_path / "all", "--dry-run")
    assert (report["prefixes"], report["objects"]) == (2, 6)
    assert not (tmp_path / "all").exists()


def test_a_file_is_not_replaced_unasked(store, tmp_path):
    (tmp_path / "file").write_text("precious")
    result = CliRunner().invoke(main, ["export", str(store), str(tmp_path / "file")])
    assert result.exit_code == 2
    assert "--force" in result.stderr
    assert (tmp_path / "file").read_text() == "precious"
    assert "wrote" in CliRunner().invoke(main, ["export", str(store), str(tmp_path / "file"), "--force"]).stdout


def test_damage_is_an_answer_of_no(store, tmp_path):
    name = next(store.rglob("*.0.safetensors"))
    data = bytearray(name.read_bytes())
    data[-1] ^= 1
    name.write_bytes(data)
    result = CliRunner().invoke(main, ["export", str(store), str(tmp_path / "file")])
    assert result.exit_code == 1
    assert name.name in result.stderr
    assert not (tmp_path / "file").exists()
