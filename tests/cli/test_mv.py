"""`tplayout mv` as people call it."""

from pathlib import Path

import pytest

from tests.support.sample_stores import content, damage_one, two_namespaces
from tests.support.tool import ask, call


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return two_namespaces(tmp_path / "store")


def test_a_move_asks(store, tmp_path):
    before = content(store)
    result = call("mv", store, tmp_path / "new")
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert content(store) == before
    assert ask("mv", store, tmp_path / "new", "--dry-run")["dry_run"]
    ask("mv", store, tmp_path / "new", "--yes")
    assert content(tmp_path / "new") == before
    assert content(store) == {}


def test_what_is_damaged_stays(store, tmp_path):
    name = damage_one(store)
    result = call("mv", store, tmp_path / "new", "--yes")
    assert result.exit_code == 1
    assert "left where it is" in result.stderr
    assert str(name.relative_to(store)) in content(store)
