"""`tplayout cp` as people call it."""

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


def test_a_whole_store(store, tmp_path):
    report = run("cp", store, tmp_path / "copy")
    assert [each["copied"] for each in report["namespaces"].values()] == [4, 4]
    assert content(tmp_path / "copy") == content(store)
    assert [each["present"] for each in run("cp", store, tmp_path / "copy")["namespaces"].values()] == [4, 4]


def test_a_namespace_and_a_prompt(store, tmp_path):
    name = fill(store, "files:01")
    assert list(run("cp", store, tmp_path / "copy", "--namespace", name[:8])["namespaces"]) == [name]
    (tmp_path / "prompt").write_text(" ".join(map(str, TOKENS[:8])))
    report = run("cp", store, tmp_path / "few", "--namespace", name, "--tokens", tmp_path / "prompt")
    assert report["namespaces"][name]["copied"] == 2
    assert len(content(tmp_path / "few")) == 3


def test_damage_is_an_exit_code_of_1(store, tmp_path):
    name = next(store.rglob("*.0.safetensors"))
    data = bytearray(name.read_bytes())
    data[-1] ^= 1
    name.write_bytes(data)
    report = run("cp", store, tmp_path / "copy", code=1)
    damaged = [object_name for each in report["namespaces"].values() for object_name in each["damaged"]]
    assert damaged == [str(name.relative_to(store))]


def test_between_file_systems(store):
    """memory:// lives in one process, so this one is not a subprocess."""
    url = f"memory://{str(store).strip('/')}/copy"
    run("cp", store, url)
    with open_store(url) as copy:
        assert {info.key: copy.get(info.key) for info in copy.list()} == content(store)


def test_what_is_no_store_is_an_answer_of_no(tmp_path):
    result = CliRunner().invoke(main, ["cp", str(tmp_path / "nothing"), str(tmp_path / "copy")])
    assert result.exit_code == 1
    assert "no namespace" in result.stderr
