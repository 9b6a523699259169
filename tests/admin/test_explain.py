"""`explain` names the right reason: each reason with a store that has it, and the ones that hide behind others."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from tests.support.filled_store import fill, flip, group, identity, layout_of_group, name_of, rewrite
from tplayout.admin.catalog import Secrets
from tplayout.admin.causes import Why, identity_causes
from tplayout.admin.explain import REFUSED, Explanation, Prompt, explain
from tplayout.admin.wanted import Wanted, tokens_of_text, wanted_identity
from tplayout.cache import Cache
from tplayout.errors import ConfigError
from tplayout.format.geometry import Geometry
from tplayout.format.identity import Identity
from tplayout.format.keys import prefix_extras
from tplayout.storage.base import Store
from tplayout.storage.url import open_store

TOKENS = list(range(100, 120))  # five chunks of four


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def ask(store: Store, tokens: Sequence[int] = TOKENS, own: Identity | None = None, **options: Any) -> Explanation:
    salt = options.pop("salt", None)
    return explain(store, Wanted(own or identity()), Prompt(tokens, salt), **options)


def reasons(answer: Explanation) -> list[Why]:
    assert not answer.is_hit
    return [cause.why for cause in answer.causes]


def states(answer: Explanation) -> str:
    """One letter a chunk: h, m, d."""
    return "".join(state.state[0] for state in answer.chunks)


def test_a_hit_needs_no_reason(store):
    fill(Cache.open(store, identity()), TOKENS)
    answer = ask(store, [*TOKENS, 7])
    assert (answer.is_hit, answer.hit_tokens, states(answer), answer.causes) == (True, 20, "hhhhh", [])
    assert ask(store, deep=False).is_hit


def test_an_empty_store(store):
    answer = ask(store)
    assert (reasons(answer), answer.exists, states(answer)) == ([Why.EMPTY], False, "mmmmm")


def test_a_prompt_without_a_full_chunk(store):
    fill(Cache.open(store, identity()), TOKENS)
    assert reasons(ask(store, TOKENS[:3])) == [Why.TOO_SHORT]


def other(**changes: Any) -> Identity:
    own = identity()
    if "dtype" in changes:
        groups = tuple(replace(one, dtype=changes["dtype"]) for one in own.geometry.groups)
        return replace(own, geometry=Geometry(own.geometry.chunk_tokens, groups))
    if "chunk_tokens" in changes:
        return replace(own, geometry=replace(own.geometry, **changes))
    return replace(own, **changes)


@pytest.mark.parametrize(
    ("theirs", "why", "text"),
    [
        (other(weights="files:ff"), Why.WEIGHTS, "weights fingerprint: files:00 vs files:ff"),
        (other(compute_dtype="bfloat16"), Why.DTYPE, "dtype: float16 vs bfloat16"),
        (other(dtype="F32"), Why.KV_DTYPE, "KV dtype: F16 vs F32"),
        (other(chunk_tokens=8), Why.CHUNK_SIZE, "chunk size: 4 vs 8"),
        (other(config={"rope_theta": 5e5}), Why.CONFIG, "config.rope_theta: 10000 vs 500000"),
        (other(config={"rope_theta": 1e4, "new": 1}), Why.CONFIG, "config.new: <absent> vs 1"),
        (other(quantization="awq"), Why.QUANTIZATION, "weight quantization: None vs awq"),
        (identity(group(heads=4)), Why.GEOMETRY, "groups[0].heads: 2 vs 4"),
    ],
    ids=lambda value: value.value if isinstance(value, Why) else "",
)
def test_a_namespace_that_differs_is_named_with_the_field(store, theirs, why, text):
    cache = Cache.open(store, theirs)
    if theirs.geometry.groups[0].dtype == "F16":
        fill(cache, TOKENS)
    answer = ask(store)
    (cause,) = answer.causes
    assert (answer.exists, cause.why, cause.text.replace(".0", "")) == (False, why, text)
    assert cause.namespace == theirs.namespace
    if theirs.geometry.groups[0].dtype == "F16":
        assert answer.nearby[0].hit_chunks == 20 // theirs.geometry.chunk_tokens


def test_bfloat16_against_float16_is_one_reason():
    ours = replace(other(dtype="BF16"), compute_dtype="bfloat16")
    assert [cause.text for cause in identity_causes(ours, identity())] == ["dtype: bfloat16 vs float16"]


def test_the_namespace_that_holds_the_prompt_is_the_one_that_counts(store):
    Cache.open(store, other(weights="files:ff"))  # nearer, but empty
    fill(Cache.open(store, replace(other(compute_dtype="bfloat16"), quantization="awq")), TOKENS)
    assert set(reasons(ask(store))) == {Why.DTYPE, Why.QUANTIZATION}


def test_another_namespace_counts_also_if_ours_exists_without_the_prompt(store):
    fill(Cache.open(store, identity()), range(500, 504))
    fill(Cache.open(store, other(weights="files:ff")), TOKENS)
    answer = ask(store)
    assert answer.exists
    assert reasons(answer) == [Why.WEIGHTS, Why.NOT_STORED]


@pytest.mark.parametrize(
    ("stored", "asked", "text"),
    [("a", None, "asked for without"), (None, "a", "without a salt"), ("a", "b", "another salt")],
)
def test_another_salt(store, stored, asked, text):
    fill(Cache.open(store, identity()), TOKENS, prefix_extras(4, salt=stored))
    answer = ask(store, salt=asked)
    assert reasons(answer) == [Why.EXTRAS]
    assert text in answer.causes[0].text
    assert ask(store, salt=stored).is_hit


@pytest.mark.parametrize(
    ("asked", "text"),
    [
        (TOKENS[1:], "token 100, which is missing here"),
        ([1, *TOKENS], "a BOS too many"),
        ([1, *TOKENS[1:]], "only the"),
    ],
)
def test_another_first_token(store, asked, text):
    fill(Cache.open(store, identity()), TOKENS)
    fill(Cache.open(store, identity()), [*TOKENS[1:3], 9, 9])  # also begins alike
    answer = ask(store, asked)
    assert reasons(answer) == [Why.FIRST_TOKEN]
    assert text in answer.causes[0].text


def test_a_gap(store):
    cache = Cache.open(store, identity())
    chunks = fill(cache, TOKENS)
    store.delete([name_of(cache, chunks[3])])
    answer = ask(store)
    assert (states(answer), answer.hit_chunks, reasons(answer)) == ("hhhmh", 3, [Why.GAP])
    assert answer.causes[0].text == "gap after chunk 2: chunk 3 is missing, 1 later ones are stored"
    store.delete([name_of(cache, chunks[0])])
    assert ask(store).causes[0].text.startswith("gap at the beginning: chunk 0")


def test_a_damaged_chunk(store):
    cache = Cache.open(store, identity())
    chunks = fill(cache, TOKENS)
    rewrite(store, name_of(cache, chunks[1]), flip(layout_of_group(cache).cell_range(1, 1).start))
    answer = ask(store)
    assert (states(answer), answer.hit_chunks, reasons(answer)) == ("hdhhh", 1, [Why.DAMAGED])
    assert f"{name_of(cache, chunks[1])}: digest-mismatch" in answer.causes[0].text
    assert ask(store, deep=False).is_hit  # quick does not look at cells
    rewrite(store, name_of(cache, chunks[1]), lambda data: bytes(data[:-1]))
    assert reasons(ask(store, deep=False)) == [Why.DAMAGED]


def test_a_prompt_that_leaves_the_stored_one(store):
    fill(Cache.open(store, identity()), TOKENS)
    answer = ask(store, [*TOKENS[:10], 7, 8, 9, 9, 9, 9])
    assert (states(answer), reasons(answer)) == ("hhmm", [Why.DIVERGES])
    assert answer.causes[0].text.endswith("at token 10: 7 here, 110 stored")
    assert reasons(ask(store, [*TOKENS[:2], *range(30)])) == [Why.DIVERGES]


def test_what_was_never_stored(store):
    fill(Cache.open(store, identity()), TOKENS[:8])
    assert reasons(ask(store, range(50, 58))) == [Why.NOT_STORED]
    answer = ask(store)
    assert (states(answer), reasons(answer)) == ("hhmmm", [Why.NOT_STORED])
    assert "from token 8 on" in answer.causes[0].text


def test_the_search_for_a_similar_prompt_is_bounded(store):
    fill(Cache.open(store, identity()), TOKENS)
    assert reasons(ask(store, TOKENS[1:], max_scan=0)) == [Why.NOT_STORED]


def test_a_missing_window(store):
    own = identity(group(), group("window-4", "window", (2,), window=4))
    cache = Cache.open(store, own)
    chunks = fill(cache, TOKENS)
    store.delete([name_of(cache, chunk, 1) for chunk in chunks[1:]])
    answer = ask(store, own=own)
    assert (states(answer), answer.hit_chunks, reasons(answer)) == ("hhhhh", 1, [Why.WINDOW])
    assert answer.chunks[2].detail == "no object of window-4"


def test_another_secret(store):
    secret = b"0123456789abcdef"
    fill(Cache.open(store, identity(), secret=secret), TOKENS)
    assert ask(store, secrets=Secrets(secret)).is_hit
    for wrong in (None, secret * 2):
        answer = ask(store, secrets=Secrets(wrong))
        assert (reasons(answer), answer.hit_chunks) == ([Why.SECRET], 0)
        assert {one.state for one in answer.chunks} == {REFUSED}
    unkeyed = other(weights="files:ff")
    fill(Cache.open(store, unkeyed), TOKENS)
    assert reasons(ask(store, own=unkeyed, secrets=Secrets(secret))) == [Why.SECRET]


def test_a_namespace_that_cannot_be_read(store):
    cache = Cache.open(store, identity())
    fill(cache, TOKENS)
    store.put(f"{cache.namespace}/namespace.json", b"{")
    assert reasons(ask(store)) == [Why.DOCUMENT]
    assert reasons(ask(store, own=other(weights="files:ff"))) == [Why.NOT_STORED]


def test_without_weights_they_are_not_compared(store):
    fill(Cache.open(store, identity()), TOKENS)
    unknown = Wanted(other(weights="label:?"), weights_known=False)
    assert explain(store, unknown, Prompt(TOKENS)).is_hit
    answer = explain(store, Wanted(other(compute_dtype="bfloat16"), weights_known=False), Prompt(TOKENS))
    assert reasons(answer) == [Why.DTYPE]


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory: 4 KV heads, 2 layers, with a tokenizer of whole words."""
    directory = tmp_path / "model"
    directory.mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
    config |= {"hidden_size": 128, "dtype": "bfloat16"}
    (directory / "config.json").write_text(json.dumps(config))
    save_file({"weight": np.zeros((8, 8), "f2")}, directory / "model.safetensors")
    vocabulary = {"<s>": 0, "<unk>": 1, "one": 2, "two": 3}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [],
        "normalizer": None,
        "pre_tokenizer": {"type": "Whitespace"},
        "post_processor": None,
        "decoder": None,
        "model": {"type": "WordLevel", "vocab": vocabulary, "unk_token": "<unk>"},
    }
    (directory / "tokenizer.json").write_text(json.dumps(tokenizer))
    return directory


def test_the_identity_of_a_model_directory_a_config_or_a_document(model, tmp_path):
    from tests.support.documents import namespace_document
    from tplayout.model import describe_model

    expected = describe_model(model, chunk_tokens=16)
    assert wanted_identity(model, chunk_tokens=16) == Wanted(expected)
    document = tmp_path / "namespace.json"
    document.write_bytes(namespace_document(expected, {"digest": "blake3", "key_id": None, "codec": "none"}, "m"))
    assert wanted_identity(document) == Wanted(expected)
    alone = wanted_identity(model / "config.json", chunk_tokens=16)
    assert (alone.weights_known, replace(alone.identity, weights=expected.weights)) == (False, expected)
    labelled = wanted_identity(model / "config.json", weights_label="mine")
    assert (labelled.weights_known, labelled.identity.weights) == (True, "label:mine")
    (model / "model.safetensors").unlink()
    assert not wanted_identity(model).weights_known


def test_a_model_that_is_none(tmp_path):
    (tmp_path / "x.json").write_text("no")
    (tmp_path / "namespace.json").write_text('{"tplayout": 1}')
    for path, text in (
        (tmp_path / "none", "no such file"),
        (tmp_path / "x.json", "no JSON"),
        (tmp_path, "config.json"),
    ):
        with pytest.raises(ConfigError, match=text):
            wanted_identity(path)
    with pytest.raises(ConfigError, match="damaged namespace"):
        wanted_identity(tmp_path / "namespace.json")


def test_text_takes_the_models_tokenizer_and_its_bos(model):
    assert tokens_of_text(model, "one two three") == [2, 3, 1]
    for bos in ("<s>", {"content": "<s>"}):
        config = {"add_bos_token": True, "bos_token": bos}
        (model / "tokenizer_config.json").write_text(json.dumps(config))
        assert tokens_of_text(model / "config.json", "one two") == [0, 2, 3]
        assert tokens_of_text(model, "one two", special_tokens=False) == [2, 3]
    (model / "tokenizer.json").write_text("{}")
    with pytest.raises(ConfigError, match="cannot be read"):
        tokens_of_text(model, "one")
