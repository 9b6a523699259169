"""`tplayout export` as people call it."""

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
