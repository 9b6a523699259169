"""`tplayout explain`: prompts as tokens and text, the answer as text and JSON."""

import json
from functools import partial
from pathlib import Path

import pytest

from tests.support.filled_store import fill, identity, name_of
from tests.support.tool import ask, call
from tplayout.cache import Cache
from tplayout.format.identity import NamespaceDocument, StorageFacts

run, asked = partial(call, "explain"), partial(ask, "explain")


@pytest.fixture
def cache(tmp_path: Path) -> Cache:
    return Cache.open(tmp_path / "store", identity(), model="tiny")


@pytest.fixture
def model(tmp_path: Path) -> str:
    """A namespace.json of the identity, which serves as --model."""
    file = tmp_path / "namespace.json"
    file.write_bytes(NamespaceDocument(identity(), StorageFacts("xxh3-128"), "tiny").to_bytes())
    return str(file)


@pytest.fixture
def tokens(tmp_path: Path) -> str:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps(list(range(14))))
    return str(file)


def test_a_hit(cache, model, tokens):
    fill(cache, range(12))
    result = run(cache.store.url, "--model", model, "--tokens", tokens)
    assert result.exit_code == 0
    assert "14 tokens: 3 chunks of 4, and 2 tokens behind them" in result.stdout
    assert f"would hit 12 of 14 tokens in {cache.store.url}" in result.stdout
    assert "because" not in result.stdout


def test_a_gap_in_text_and_json(cache, model, tokens):
    chunks = fill(cache, range(12))
    cache.store.delete([name_of(cache, chunks[1])])
    arguments = [cache.store.url, "--model", model, "--tokens", tokens]
    result = run(*arguments)
    assert result.exit_code == 1
    assert "because  gap after chunk 0" in result.stdout
    document = asked(*arguments, code=1)
    assert [chunk["state"] for chunk in document["chunks"]] == ["hit", "missing", "hit"]
    assert [chunk["start_token"] for chunk in document["chunks"]] == [0, 4, 8]
    assert [reason["reason"] for reason in document["reasons"]] == ["gap"]
    assert (document["hit"], document["hit_tokens"], document["hit_chunks"]) == (False, 4, 1)


def test_another_namespace_is_named(tmp_path, model, tokens):
    cache = Cache.open(tmp_path / "store", identity(weights="files:ff"), model="tiny \x1b[1m")
    fill(cache, range(12))
    result = run(cache.store.url, "--model", model, "--tokens", tokens)
    assert result.exit_code == 1
    assert f"because  weights fingerprint: files:00 vs files:ff (namespace {cache.namespace})" in result.stdout
    assert f"there is {cache.namespace} tiny \ufffd[1m, where this prompt would hit 3 chunks" in result.stdout


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--tokens", "TOKENS", "--text", "TOKENS"],
        ["--tokens", "missing"],
        ["--text", "missing"],
        ["--tokens", "TOKENS", "--hf-overrides", "[]"],
        ["--tokens", "TOKENS", "--chunk-tokens", "0"],
    ],
)
def test_wrong_use(cache, model, tokens, options):
    arguments = [tokens if option == "TOKENS" else option for option in options]
    assert run(cache.store.url, "--model", model, *arguments).exit_code == 2
