"""`tplayout import` as people call it."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from tplayout.admin.convert import target_namespace
from tplayout.admin.transfer import store_prefix
from tplayout.cli.main import main
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.identity import Identity
from tplayout.format.keys import chain
from tplayout.storage.url import open_store

GROUP = Group("full", "full", (0, 1), 4, (Part("k", 8), Part("v", 8)), "F16")
IDENTITY = Identity("files:01", {}, "float16", None, Geometry(4, (GROUP,)))
TOKENS = list(range(16))


class Ones:
    def fill(self, group, tokens, out):
        out[...] = 1
        return True


@pytest.fixture
def store(tmp_path: Path) -> Path:
    with open_store(tmp_path / "store") as opened:
        target = target_namespace(opened, IDENTITY, None, "m")
        store_prefix(Ones(), chain(target.digest, TOKENS, 4), target)
        store_prefix(Ones(), chain(target.digest, [9] * 8, 4), target)
    return tmp_path / "store"


def run(verb: str, *arguments: object, code: int = 0) -> dict:
    result = CliRunner().invoke(main, [verb, *map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def test_into_an_empty_store(store, tmp_path):
    run("export", store, tmp_path / "file")
    assert run("import", tmp_path / "file", tmp_path / "new", "--dry-run")["objects"] == 6
    assert not (tmp_path / "new").exists()
    report = run("import", tmp_path / "file", f"file://{tmp_path / 'new'}")
    assert (report["objects"], report["present"]) == (6, 0)
    assert content(tmp_path / "new") == content(store)
    result = CliRunner().invoke(main, ["import", str(tmp_path / "file"), str(tmp_path / "new")])
    assert "6 were there" in result.stdout


def test_damage_is_an_exit_code_of_1(store, tmp_path):
    run("export", store, tmp_path / "file")
    data = bytearray((tmp_path / "file").read_bytes())
    data[-2000] ^= 1
    (tmp_path / "file").write_bytes(data)
    report = run("import", tmp_path / "file", tmp_path / "new", code=1)
    assert (report["objects"], len(report["damaged"])) == (5, 1)


def test_what_is_no_bundle(tmp_path):
    (tmp_path / "file").write_text("a" * 2000)
    result = CliRunner().invoke(main, ["import", str(tmp_path / "file"), str(tmp_path / "new")])
    assert result.exit_code == 1
    assert "no tplayout bundle" in result.stderr
