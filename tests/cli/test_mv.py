"""`tplayout mv` as people call it."""

import json
from pathlib import Path

import numpy as np
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
TOKENS = list(range(16))


class Noise:
    def fill(self, group, tokens, out):
        out[...] = np.random.default_rng(tokens.start).integers(0, 2**16, out.shape, out.dtype)
        return True


def fill(path: Path, weights: str) -> str:
    identity = Identity(weights, {}, "float16", None, Geometry(4, (GROUP,)))
    with open_store(path) as store:
        target = target_namespace(store, identity, None, "m")
        store_prefix(Noise(), chain(target.digest, TOKENS, 4), target)
    return target.name


@pytest.fixture
def store(tmp_path: Path) -> Path:
    fill(tmp_path / "store", "files:01")
    fill(tmp_path / "store", "files:02")
    return tmp_path / "store"


def content(path: Path) -> dict[str, bytes]:
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def run(verb: str, *arguments: object, code: int = 0) -> dict:
    result = CliRunner().invoke(main, [verb, *map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


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
