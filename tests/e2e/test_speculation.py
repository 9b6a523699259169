"""Speculative decoding: what a draft proposes and the model rejects is never stored, and the draft's own KV neither.

A server with a draft and one without write the same chunks and read each other's.
"""

import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import demo_models
import numpy as np
import pytest
from e2e_cases import assert_same, noise
from e2e_checkpoints import near_copy
from e2e_one_process import OneProcess, supplied
from e2e_store import namespace_of, verified, wait_until_stored
from vllm_engine import Output

from tplayout import Cache

CHUNK = 64
PROMPT, ANSWER = 300, 220  # most chunks of the answer are decoded with drafts
OPTIONS = {"chunk_tokens": CHUNK}
# KV of the same tokens, computed alone or together with drafts; relative to the largest value of the chunk.
TOLERANCE = 1e-4


def drafts(kind: str, directory: Path) -> dict[str, Any]:
    """vLLM's setting for a kind of speculation. "near": a draft model that is often right."""
    if kind == "ngram":
        return {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1}
    model = near_copy(directory, 0.02) if kind == "near" else demo_models.ensure("llama-draft")
    return {"method": "draft_model", "model": str(model), "num_speculative_tokens": 3}


@dataclass(frozen=True)
class Written:
    """What a server without drafts has stored.

    before: a store of nothing but `other`, which is a prompt. root: one of `text` too, prompt and answer. `full` of its
    tokens are certain to be stored: the last chunk's token ids may be known only when the request has ended.
    turn: a prompt that goes on from there. wanted: the answers to all three without the connector.
    """

    before: Path
    root: Path
    other: list[int]
    prompt: list[int]
    text: list[int]
    turn: list[int]
    wanted: dict[str, Output]

    full = (PROMPT + ANSWER) // CHUNK * CHUNK - CHUNK
    other_full = PROMPT // CHUNK * CHUNK


@pytest.fixture(scope="module")
def written(one_process: OneProcess, tmp_path_factory: pytest.TempPathFactory) -> Written:
    directory = tmp_path_factory.mktemp("stores")
    other, prompt = noise(PROMPT, 3), noise(PROMPT // 4, 1) * 4  # repeats itself, so that n-grams are found
    plain = one_process.plain()
    wanted = {"other": plain.generate(other), "prompt": plain.generate(prompt, ANSWER)}
    text = prompt + wanted["prompt"].tokens
    found = Written(
        directory / "before", directory / "store", other, prompt, text, text[: Written.full] + other, wanted
    )
    wanted["turn"] = plain.generate(found.turn)

    running = one_process.offloading(found.root, options=OPTIONS)
    assert_same(running.generate(other), wanted["other"])
    wait_until_stored(found.root, other, found.other_full)
    shutil.copytree(found.root, found.before)
    assert_same(running.generate(prompt, ANSWER), wanted["prompt"])
    wait_until_stored(found.root, text, found.full)
    return found


def chunks(root: Path, tokens: list[int]) -> list[np.ndarray]:
    """The KV of all chunks of the prefix that is stored, each verified."""
    with Cache.open(f"file://{root}", namespace_of(root).identity, create=False) as cache:
        return [cache.get(chunk).astype(np.float64) for chunk in cache.longest_prefix(tokens, verify=True).chunks]


def case(kind: str, what: str, slow: bool = False) -> object:
    row = pytest.mark.row("Speculative decoding", what)
    return pytest.param(kind, id=kind, marks=[row, pytest.mark.slow] if slow else row)


@pytest.mark.parametrize(
    "kind",
    [
        case("ngram", "n-gram: rejected tokens are not stored; shared with servers without, both ways"),
        case("near", "draft model that is often right: the same; its layers are not stored"),
        case("draft", "draft model that is hardly ever right: the same", slow=True),
    ],
)
def test_the_store_is_that_of_a_server_without_drafts(
    one_process: OneProcess, tmp_path: Path, written: Written, kind: str
) -> None:
    root, wanted = tmp_path / "store", written.wanted
    shutil.copytree(written.before, root)
    settings = drafts(kind, tmp_path / "draft")
    running = one_process.offloading(root, options=OPTIONS, speculative_config=settings)
    answer, count = supplied(running, written.other)
    assert count == written.other_full, "did not read what a server without drafts wrote"
    assert_same(answer, wanted["other"])

    answer, count = supplied(running, written.prompt, ANSWER)
    assert count == 0
    assert_same(answer, wanted["prompt"])
    wait_until_stored(root, written.text, written.full)
    metrics = running.metrics()
    accepted, drafted = (metrics[f"vllm:spec_decode_num_{name}_tokens_total"] for name in ("accepted", "draft"))
    assert drafted - accepted > CHUNK, "hardly a draft was rejected"
    assert kind != "near" or accepted > CHUNK, "hardly a draft was accepted"

    assert namespace_of(root).identity == namespace_of(written.root).identity
    ours, theirs = chunks(root, written.text), chunks(written.root, written.text)
    assert min(len(ours), len(theirs)) * CHUNK >= written.full
    for mine, plain in zip(ours, theirs, strict=False):
        assert np.abs(mine - plain).max() <= TOLERANCE * np.abs(plain).max()
    others = written.other_full // CHUNK
    assert len(verified(root)) == len(ours) + others, "chunks of tokens that are not in the text"

    reader = one_process.offloading(root, options=OPTIONS)
    answer, count = supplied(reader, written.turn)
    assert count == written.full, "a server without drafts did not read what one with drafts wrote"
    assert_same(answer, wanted["turn"])
