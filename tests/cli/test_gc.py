"""`tplayout gc` as people call it."""

import json
import os
import time
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


class Zeros:
    def fill(self, group, tokens, out):
        out[...] = 0
        return True


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Four chunks, two days old."""
    with open_store(tmp_path / "store") as opened:
        target = target_namespace(opened, IDENTITY, None, "m")
        store_prefix(Zeros(), chain(target.digest, TOKENS, 4), target)
        for info in opened.list():
            os.utime(tmp_path / "store" / info.key, (time.time() - 2 * 86400,) * 2)
    return tmp_path / "store"


def objects(store: Path) -> int:
    return len(list(store.rglob("*.0.safetensors")))


def run(*arguments: object, code: int = 0) -> dict:
    result = CliRunner().invoke(main, ["gc", *map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


def test_a_size_and_an_age(store):
    each = next(store.rglob("*.0.safetensors")).stat().st_size
    report = run(store, "--max-bytes", 2 * each + 5000, "--dry-run")
    assert (report["order"], report["chunks"], report["limit_met"], objects(store)) == ("use", 2, True, 4)
    assert run(store, "--max-bytes", 2 * each + 5000, "--yes")["deleted"] == report["deleted"]
    assert objects(store) == 2
    assert run(store, "--max-age", "3d", "--yes")["chunks"] == 0
    assert run(store, "--max-age", "1d", "--yes")["chunks"] == 2


def test_it_asks(store):
    result = CliRunner().invoke(main, ["gc", str(store), "--max-bytes", "0"])
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert objects(store) == 4
    assert CliRunner().invoke(main, ["gc", str(store)]).exit_code == 0  # nothing to delete, nothing to ask


def test_a_limit_that_cannot_be_met_is_an_answer_of_no(store, tmp_path):
    (tmp_path / "prompt").write_text(json.dumps(TOKENS[:8]))
    report = run(store, "--max-bytes", 0, "--keep-tokens", tmp_path / "prompt", "--yes", code=1)
    assert (report["limit_met"], objects(store)) == (False, 2)
    result = CliRunner().invoke(main, ["gc", str(store), "--max-bytes", "0", "--keep", IDENTITY.namespace[:4]])
    assert result.exit_code == 1
    assert "is not met" in result.stderr
    assert objects(store) == 2


def test_the_output_says_what_decided(store):
    assert "least recently used first" in CliRunner().invoke(main, ["gc", str(store), "--dry-run"]).stdout
    url = f"memory://{str(store).strip('/')}"
    with open_store(url) as opened:
        target = target_namespace(opened, IDENTITY, None, "m")
        store_prefix(Zeros(), chain(target.digest, TOKENS, 4), target)
    result = CliRunner().invoke(main, ["gc", url, "--max-bytes", "0", "--grace", "0", "--yes"])
    assert result.exit_code == 1  # namespace.json stays
    assert "oldest first: this store does not tell" in result.stdout


def test_wrong_use_is_named(store):
    for arguments in (["--max-bytes", "many"], ["--max-age", "soon"], ["--keep", "ffffffff"]):
        result = CliRunner().invoke(main, ["gc", str(store), "--max-bytes", "0", *arguments])
        assert result.exit_code == 2
        assert arguments[0] in result.stderr or arguments[1] in result.stderr
