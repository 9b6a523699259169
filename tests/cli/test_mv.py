"""`tplayout mv` as people call it."""

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.sample_stores import TOKENS, content, run, store_prompts
from tplayout.cli.main import main


@pytest.fixture
def store(tmp_path: Path) -> Path:
    for weights in ("files:01", "files:02"):
        store_prompts(tmp_path / "store", TOKENS, weights=weights)
    return tmp_path / "store"


def test_a_move_asks(store, tmp_path):
    before = content(store)
    result = CliRunner().invoke(main, ["mv", str(store), str(tmp_path / "new")])
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert content(store) == before
    assert run("mv", store, tmp_path / "new", "--dry-run")["dry_run"]
    run("mv", store, tmp_path / "new", "--yes")
    assert content(tmp_path / "new") == before
    assert content(store) == {}


def test_what_is_damaged_stays(store, tmp_path):
    name = next(store.rglob("*.0.safetensors"))
    data = bytearray(name.read_bytes())
    data[-1] ^= 1
    name.write_bytes(data)
    result = CliRunner().invoke(main, ["mv", str(store), str(tmp_path / "new"), "--yes"])
    assert result.exit_code == 1
    assert "left where it is" in result.stderr
    assert str(name.relative_to(store)) in content(store)
