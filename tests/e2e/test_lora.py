"""LoRA adapters are told apart by what they are, not by name, number or path."""

import shutil
import time
from pathlib import Path

import pytest
from e2e_cases import CHUNK, assert_same, engine_args, noise, offload
from e2e_checkpoints import lora_adapter
from e2e_one_process import OneProcess, forget, supplied, wait_until_objects
from e2e_store import verified
from vllm_engine import Engine, Output, engine

FULL = 2 * CHUNK
LORA = {"enable_lora": True, "max_loras": 2, "max_lora_rank": 8}
Adapter = tuple[str, int, str]  # vLLM's name, number and path


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two adapters, and a copy of the first one."""
    directory = tmp_path_factory.mktemp("adapters")
    lora_adapter(directory / "a", 1)
    lora_adapter(directory / "b", 2)
    shutil.copytree(directory / "a", directory / "copy-of-a")
    return directory


@pytest.fixture(scope="module")
def adapters(directory: Path) -> dict[str, Adapter | None]:
    """What the prompt is asked of, one after another."""
    return {"base": None, "a": ("one", 1, str(directory / "a")), "b": ("two", 2, str(directory / "b"))}


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return noise(FULL + 40, 1)


@pytest.fixture(scope="module")
def wanted(one_process: OneProcess, adapters: dict[str, Adapter | None], prompt: list[int]) -> dict[str, Output]:
    """The answers of an engine without the connector, which differ."""
    plain = one_process.plain(**LORA)
    answers = {name: plain.generate(prompt, lora=lora) for name, lora in adapters.items()}
    assert len({tuple(answer.tokens) for answer in answers.values()}) == len(answers)
    return answers


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def writer(
    one_process: OneProcess,
    root: Path,
    adapters: dict[str, Adapter | None],
    prompt: list[int],
    wanted: dict[str, Output],
) -> Engine:
    """An engine that has stored the prompt under the base model and under each adapter: nothing was shared."""
    running = one_process.offloading(root, **LORA)
    for number, (name, lora) in enumerate(adapters.items(), 1):
        forget(running)
        answer, count = supplied(running, prompt, lora=lora)
        assert count == 0, f"{name} read what was stored before it"
        assert_same(answer, wanted[name])
        wait_until_objects(root, number * FULL // CHUNK)
    return running


def check_each(
    running: Engine, adapters: dict[str, Adapter | None], prompt: list[int], wanted: dict[str, Output]
) -> None:
    """Asked of the base model and of each adapter, the prompt comes from the store, and the answer is right."""
    for name, lora in adapters.items():
        forget(running)
        answer, count = supplied(running, prompt, lora=lora)
        assert count == FULL
        assert_same(answer, wanted[name])


@pytest.mark.row("LoRA", "the base model and two adapters: kept apart, each finds its own")
def test_each_finds_its_own(
    writer: Engine, root: Path, adapters: dict[str, Adapter | None], prompt: list[int], wanted: dict[str, Output]
) -> None:
    check_each(writer, adapters, prompt, wanted)
    assert len(verified(root)) == 3 * FULL // CHUNK


@pytest.mark.row("LoRA", "the same adapter under another name, number and path: shared")
def test_a_copy_under_another_name(
    writer: Engine, directory: Path, prompt: list[int], wanted: dict[str, Output]
) -> None:
    forget(writer)
    answer, count = supplied(writer, prompt, lora=("other-name", 7, str(directory / "copy-of-a")))
    assert count == FULL
    assert_same(answer, wanted["a"])


@pytest.mark.row("LoRA", "another adapter under the same name: kept apart")
def test_another_adapter_of_the_same_name(writer: Engine, root: Path, tmp_path: Path, prompt: list[int]) -> None:
    other = ("one", 9, str(lora_adapter(tmp_path / "a", 3)))
    forget(writer)
    first, count = supplied(writer, prompt, lora=other)
    assert count == 0
    wait_until_objects(root, 4 * FULL // CHUNK)
    forget(writer)
    again, count = supplied(writer, prompt, lora=other)
    assert count == FULL
    assert_same(again, first)


@pytest.mark.slow
@pytest.mark.row("LoRA", "an adapter's KV and the base model's, TP 1 → 2")
def test_another_tp_size(
    writer: Engine,
    root: Path,
    logs: Path,
    directory: Path,
    adapters: dict[str, Adapter | None],
    prompt: list[int],
    wanted: dict[str, Output],
) -> None:
    args = engine_args("llama", 2, block_size=32, **LORA, **offload(f"file://{root}"))
    with engine(args, logs / "lora-tp2.log") as running:
        check_each(running, {**adapters, "a": ("renamed", 3, str(directory / "copy-of-a"))}, prompt, wanted)


@pytest.mark.slow
@pytest.mark.row(
    "LoRA", "an adapter that is replaced in place while a request runs: what it computes then is not stored"
)
def test_an_adapter_that_is_replaced_in_place(tmp_path: Path, logs: Path) -> None:
    """Of a request in whose middle another version was loaded only what the first one computed is found again."""
    versions = [str(lora_adapter(tmp_path / f"v{number}", number)) for number in (1, 2)]
    first: Adapter = ("one", 1, versions[0])
    args = engine_args("llama", 1, block_size=32, max_num_batched_tokens=32, **LORA)
    args |= offload(f"file://{tmp_path / 'store'}", chunk_tokens=64)
    with engine(args, logs / "lora-in-place.log") as running:
        for seed in range(5):
            prompt = noise(1900, 20 + seed)
            running.call("replace_lora", name="one", number=1, path=versions[0])
            request = running.submit(prompt, lora=first)
            time.sleep(0.2 + 0.1 * seed)
            running.call("replace_lora", name="one", number=1, path=versions[1])
            request.result()
            running.call("replace_lora", name="one", number=1, path=versions[0])
            cold = running.generate(prompt, lora=first, salt=f"cold {seed}")
            time.sleep(2)  # what is to be stored is
            forget(running)
            again = running.generate(prompt, lora=first)
            assert_same(again, cold)
            if 0 < again.cached < 1900 // 64 * 64:
                return
    pytest.fail("no adapter was replaced in the middle of a request")
