"""Requests that are more than their tokens: salted ones, embeddings instead of tokens, items of other modalities."""

from pathlib import Path

import pytest
import torch
from e2e_cases import CHUNK, assert_same, engine_args, noise, offload
from e2e_checkpoints import AUDIO_TOKENS, audio_model
from e2e_one_process import OneProcess, forget, supplied, wait_until_objects
from e2e_store import objects, verified
from safetensors.torch import load_file, save_file
from vllm_engine import Engine, Output

FULL = 2 * CHUNK
AUDIO, AUDIO_BEGIN, AUDIO_END = AUDIO_TOKENS.values()
EMBEDS = {"enable_prompt_embeds": True}


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return noise(FULL + 30, 1)


@pytest.fixture(scope="module")
def wanted(one_process: OneProcess, prompt: list[int]) -> Output:
    """What vLLM answers without the connector."""
    return one_process.plain(**EMBEDS).generate(prompt)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def running(one_process: OneProcess, root: Path, wanted: Output) -> Engine:
    return one_process.offloading(root, **EMBEDS)


@pytest.mark.row("Cache salt", "two salts and none: kept apart, each finds its own")
def test_salts(running: Engine, root: Path, prompt: list[int], wanted: Output) -> None:
    salts = ("tenant-1", "tenant-2", None)
    for number, salt in enumerate(salts, 1):
        forget(running)
        answer, count = supplied(running, prompt, salt=salt)
        assert count == 0, f"salt {salt} read what was stored before it"
        assert_same(answer, wanted)
        wait_until_objects(root, number * FULL // CHUNK)
    for salt in salts:
        forget(running)
        answer, count = supplied(running, prompt, salt=salt)
        assert count == FULL
        assert_same(answer, wanted)
    assert len(verified(root)) == 3 * FULL // CHUNK


def skipped(running: Engine, reason: str) -> float:
    """Requests or chunks that were left out for this reason."""
    metrics = running.metrics()
    return sum(value for name, value in metrics.items() if "tplayout_skips_total" in name and f'"{reason}"' in name)


def embeddings(model: str, tokens: list[int], file: Path) -> Path:
    """The tokens' rows of the model's embedding table: a prompt that means the same."""
    table = load_file(Path(model) / "model.safetensors")["model.embed_tokens.weight"]
    save_file({"embeds": table[torch.tensor(tokens)].contiguous()}, file)
    return file


@pytest.mark.row("Prompt embeddings", "not looked up, counted as skipped", verdict="served, not stored")
def test_prompt_embeddings(running: Engine, root: Path, tmp_path: Path, prompt: list[int], wanted: Output) -> None:
    """Embeddings have no token ids, so nothing names their KV; the same text as tokens was stored before."""
    stored, before = objects(root), skipped(running, "request-prompt-embeds")
    file = embeddings(running.args["model"], prompt, tmp_path / "embeds.safetensors")
    for _ in range(2):
        forget(running)
        answer, count = supplied(running, [], embeds=file)
        assert count == 0
        assert_same(answer, wanted)
    forget(running)
    answer, count = supplied(running, noise(FULL + 30, 2))  # and a request that can be keyed goes on as ever
    assert count == 0
    wait_until_objects(root, len(stored) + FULL // CHUNK)
    assert stored.items() <= objects(root).items()
    assert skipped(running, "request-prompt-embeds") == before + 2


def sound(seed: int, file: Path) -> Path:
    """A second of noise."""
    save_file({"audio": torch.randn(16_000, generator=torch.Generator().manual_seed(seed))}, file)
    return file


@pytest.mark.row(
    "Multimodal items",
    "audio (Qwen2-Audio): not looked up, counted as skipped; requests of text alone are stored",
    verdict="served, not stored",
)
def test_multimodal_items(one_process: OneProcess, tmp_path: Path) -> None:
    """An item's identifier may be the caller's own, so that nothing names its KV; text of the same model is stored."""
    root, model = tmp_path / "store", audio_model(tmp_path / "model")
    text = [max(token, 6) for token in noise(FULL + 30, 3)]  # no special tokens
    heard = [*text[:300], AUDIO_BEGIN, AUDIO, AUDIO_END, *text[300:]]
    sounds = [sound(seed, tmp_path / f"{seed}.safetensors") for seed in (1, 2)]
    args = {**engine_args("llama", 1), "model": str(model), "skip_tokenizer_init": False}
    plain = one_process.use(args)
    wanted = [plain.generate(heard, audio=file) for file in sounds]
    assert wanted[0].logprobs != wanted[1].logprobs
    wanted_text = plain.generate(text)

    running = one_process.use({**args, **offload(f"file://{root}")})
    for file, answer in zip(sounds * 2, wanted * 2, strict=True):
        forget(running)
        got, count = supplied(running, heard, audio=file)
        assert count == 0
        assert_same(got, answer)
    assert_same(running.generate(text), wanted_text)
    wait_until_objects(root, FULL // CHUNK)  # of the text, and nothing else
    forget(running)
    got, count = supplied(running, text)
    assert count == FULL
    assert_same(got, wanted_text)
    assert skipped(running, "request-multimodal") == 4
