"""Prompts, engine arguments and comparisons that the end-to-end tests share."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import demo
import demo_models
from vllm_engine import Engine, Output, engine

# vLLM's arguments for latents (MLA) in float32: its rotary op is wrong for them, and where the CPU has AMX it chooses a
# backend for bfloat16 alone.
LATENTS: dict[str, Any] = {
    "compilation_config": {"custom_ops": ["-rotary_embedding"]},
    "attention_config": {"backend": "CPU_MLA"},
}

Answers = dict[str, dict[str, Output]]  # prompt -> "cold" or "hit" -> answer

CHUNK = 256
STORY_TOKENS = 1100  # four full chunks and a bit
ANSWER = 8

# Log-probabilities of float32 runs that differ only in where the KV came from and in block boundaries: seen is 3e-5.
TOLERANCE = 3e-4

# Which reference runs the TP cases need: (model, TP) -> prompts.
REFERENCES = {
    ("smollm2", 1): ("a", "b"),
    ("smollm2", 2): ("a",),
    ("smollm2", 4): ("b", "c"),
    ("smollm2-9x3", 1): ("a",),
}


@cache
def story(name: str) -> list[int]:
    """Real text as tokens of SmolLM2: "a", "b" and "c" begin differently from their first word on."""
    from tokenizers import Tokenizer

    parts = [part.strip() for part in demo.TEXT.read_text().split("\n---\n")]
    order = {"a": (0, 1), "b": (2, 1), "c": (1, 0)}[name]
    tokenizer = Tokenizer.from_file(str(demo_models.ensure("smollm2") / "tokenizer.json"))
    tokens = tokenizer.encode("\n\n".join(parts[part] for part in order)).ids
    assert len(tokens) >= STORY_TOKENS
    return list(tokens[:STORY_TOKENS])


def noise(length: int, seed: int) -> list[int]:
    """A prompt for the tiny models, which have no tokenizer."""
    return demo_models.random_prompt(length, seed)


def engine_args(model: str, tp: int, **more: Any) -> dict[str, Any]:
    """vLLM engine arguments for one of the demo models; tiny ones have no tokenizer."""
    return {
        "model": str(demo_models.ensure(model, more.get("dtype", "float32"))),
        "tensor_parallel_size": tp,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 2048,
        "skip_tokenizer_init": model not in demo_models.SMOLLM2,
        **more,
    }


# A request that times out on a busy machine is computed: right, but not what these tests are about. Nor is that tiny
# models compute a chunk faster than a disk reads it.
PATIENT = {"load_deadline_ms": 60_000, "never_slower": False}


def offload(url: str, role: str = "kv_both", **options: Any) -> dict[str, Any]:
    """The engine argument that switches the connector on."""
    config = {
        "kv_connector": "TPLayoutConnector",
        "kv_role": role,
        "kv_connector_extra_config": {"url": url, **PATIENT, **options},
    }
    return {"kv_transfer_config": config}


def assert_same(got: Output, wanted: Output, tolerance: float = TOLERANCE) -> None:
    """Text and tokens equal, and every log-probability that both report within `tolerance`."""
    assert (got.text, got.tokens) == (wanted.text, wanted.tokens)
    assert len(got.logprobs) == len(wanted.logprobs) == len(got.tokens)
    assert difference(got, wanted) < tolerance


def difference(got: Output, wanted: Output) -> float:
    """Largest difference of a log-probability, over the tokens that both report at a position (two or more)."""
    largest = 0.0
    for mine, theirs in zip(got.logprobs, wanted.logprobs, strict=True):
        common = mine.keys() & theirs.keys()
        assert len(common) >= 2
        largest = max(largest, *(abs(mine[token] - theirs[token]) for token in common))
    return largest


def external_hits(running: Engine) -> float:
    """Prompt tokens that the connector has supplied, by vLLM's own count."""
    return running.metrics().get("vllm:external_prefix_cache_hits_total", 0.0)


def cold_answer(running: Engine, tokens: list[int], max_tokens: int = ANSWER) -> Output:
    """What the engine answers without any cache: a salt of its own keeps the request apart from all others."""
    salt = f"cold-{running.names}"
    output = running.generate(tokens, max_tokens, salt=salt)
    assert output.cached == 0
    return output


class References:
    """Answers of engines without the connector: each prompt computed cold, then as the engine's own prefix hit.

    All are computed on first use, two engines at a time, since an engine's start keeps one core busy.
    TPLAYOUT_E2E_REFERENCES names a directory to keep them in between sessions, for development.
    """

    def __init__(self, directory: Path) -> None:
        self._logs = directory
        self._kept = Path(os.environ.get("TPLAYOUT_E2E_REFERENCES") or directory)

    def hit(self, model: str, tp: int, prompt: str) -> Output:
        """The engine's own prefix hit."""
        return self._answers[model, tp][prompt]["hit"]

    def cold(self, model: str, tp: int, prompt: str) -> Output:
        """Computed from the first token on."""
        return self._answers[model, tp][prompt]["cold"]

    @cached_property
    def _answers(self) -> dict[tuple[str, int], Answers]:
        for model, _ in REFERENCES:
            engine_args(model, 1)  # builds the model, once
        slowest_first = sorted(REFERENCES, key=lambda case: -case[1])
        with ThreadPoolExecutor(2) as pool:
            return dict(zip(slowest_first, pool.map(lambda case: self._answer(*case), slowest_first), strict=True))

    def _answer(self, model: str, tp: int) -> Answers:
        kept = self._kept / f"reference-{model}-tp{tp}.json"
        if not kept.exists():
            answers = self._compute(model, tp)
            plain = {
                prompt: {kind: asdict(output) for kind, output in both.items()} for prompt, both in answers.items()
            }
            kept.write_text(json.dumps(plain))
        found = json.loads(kept.read_text())
        return {prompt: {kind: Output(**fields) for kind, fields in both.items()} for prompt, both in found.items()}

    def _compute(self, model: str, tp: int) -> Answers:
        answers = {}
        with engine(engine_args(model, tp), self._logs / f"reference-{model}-tp{tp}.log") as running:
            for prompt in REFERENCES[model, tp]:
                both = {kind: running.generate(story(prompt), ANSWER) for kind in ("cold", "hit")}
                assert both["cold"].cached == 0
                assert both["hit"].cached >= STORY_TOKENS - 128
                answers[prompt] = both
        return answers
