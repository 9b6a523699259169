"""`tplayout gc` as people call it."""

import json
import os
import time
from functools import partial
from pathlib import Path

import pytest

from tests.support.sample_stores import TOKENS, content, identity, store_prompts
from tests.support.tool import ask, call


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Four chunks, two days old."""
    store_prompts(tmp_path / "store", TOKENS)
    for name in content(tmp_path / "store"):
        os.utime(tmp_path / "store" / name, (time.time() - 2 * 86400,) * 2)
    return tmp_path / "store"


def objects(store: Path) -> int:
    return len(list(store.rglob("*.0.safetensors")))


run = partial(ask, "gc")


def test_a_size_and_an_age(store):
    each = next(store.rglob("*.0.safetensors")).stat().st_size
    report = run(store, "--max-bytes", 2 * each + 5000, "--dry-run")
    assert (report["order"], report["chunks"], report["limit_met"], objects(store)) == ("use", 2, True, 4)
    assert run(store, "--max-bytes", 2 * each + 5000, "--yes")["deleted"] == report["deleted"]
    assert objects(store) == 2
    assert run(store, "--max-age", "3d", "--yes")["chunks"] == 0
    assert run(store, "--max-age", "1d", "--yes")["chunks"] == 2


def test_it_asks(store):
    result = call("gc", store, "--max-bytes", "0")
    assert result.exit_code == 2
    assert "--yes" in result.stderr
    assert objects(store) == 4
    assert call("gc", store).exit_code == 0  # nothing to delete, nothing to ask


def test_a_limit_that_cannot_be_met_is_an_answer_of_no(store, tmp_path):
    (tmp_path / "prompt").write_text(json.dumps(TOKENS[:8]))
    report = run(store, "--max-bytes", 0, "--keep-tokens", tmp_path / "prompt", "--yes", code=1)
    assert (report["limit_met"], objects(store)) == (False, 2)
    result = call("gc", store, "--max-bytes", "0", "--keep", identity().namespace[:4])
    assert result.exit_code == 1
    assert "is not met" in result.stderr
    assert objects(store) == 2


def test_the_output_says_what_decided(store):
    assert "least recently used first" in call("gc", store, "--dry-run").stdout
    url = f"memory://{str(store).strip('/')}"
    store_prompts(url, TOKENS)
    result = call("gc", url, "--max-bytes", "0", "--grace", "0", "--yes")
    assert result.exit_code == 1  # namespace.json stays
    assert "oldest first: this store does not tell" in result.stdout


def test_wrong_use_is_named(store):
    for arguments in (["--max-bytes", "many"], ["--max-age", "soon"], ["--max-age", "30"], ["--keep", "ffffffff"]):
        result = call("gc", store, "--max-bytes", "0", *arguments)
        assert result.exit_code == 2
        assert arguments[0] in result.stderr or arguments[1] in result.stderr
