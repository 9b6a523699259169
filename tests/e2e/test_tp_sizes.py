"""What one TP size writes, others read: real weights, real ranks, and other block sizes on each side.

Each run below is one engine with a fresh process; it reads what earlier ones wrote and writes for later ones.
Its answers are compared with what an engine of the same TP size without the connector gives as a prefix hit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e_cases import ANSWER, CHUNK, STORY_TOKENS, References, assert_same, engine_args, external_hits, offload, story
from e2e_engine import Output, engine
from e2e_store import objects, stored_prefix, verified, wait_until_stored

FULL = STORY_TOKENS // CHUNK * CHUNK


@dataclass(frozen=True)
class Read:
    """A prompt answered by a fresh engine: the answer, and the tokens of it that the connector supplied."""

    output: Output
    supplied: float


@dataclass(frozen=True)
class Run:
    """What one engine did. again: the last prompt written, once more, with the engine's own prefix cache emptied."""

    read: dict[str, Read]
    wrote: dict[str, Output]
    again: Output
    before: dict[str, bytes]
    after: dict[str, bytes]


Runner = Callable[..., Run]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


def run(root: Path, log: Path, model: str, tp: int, block: int, role: str, read: str, write: str) -> Run:
    """One engine: answer the prompts `read`, then `write`, then the last of all with only the connector's help."""
    before = objects(root)
    args = engine_args(model, tp, block_size=block, **offload(f"file://{root}", role, chunk_tokens=CHUNK))
    reads, writes = {}, {}
    with engine(args, log) as running:
        for prompt in read:
            supplied = external_hits(running)
            output = running.generate(story(prompt), ANSWER)
            reads[prompt] = Read(output, external_hits(running) - supplied)
        for prompt in write:
            writes[prompt] = running.generate(story(prompt), ANSWER)
            if role != "kv_consumer":
                wait_until_stored(root, story(prompt), FULL)
        assert running.call("reset_prefix_cache", connector=True)
        again = running.generate(story((read + write)[-1]), ANSWER)
    return Run(reads, writes, again, before, objects(root))


@pytest.fixture(scope="module")
def tp4(root: Path, logs: Path) -> Run:
    return run(root, logs / "tp4.log", "smollm2", 4, 64, "kv_producer", read="", write="a")


@pytest.fixture(scope="module")
def tp2(root: Path, logs: Path, tp4: Run) -> Run:
    return run(root, logs / "tp2.log", "smollm2", 2, 32, "kv_both", read="a", write="b")


@pytest.fixture(scope="module")
def tp1(root: Path, logs: Path, tp2: Run) -> Run:
    return run(root, logs / "tp1.log", "smollm2", 1, 128, "kv_both", read="ab", write="c")


@pytest.fixture(scope="module")
def tp4_reads(root: Path, logs: Path, tp1: Run) -> Run:
    return run(root, logs / "tp4-reads.log", "smollm2", 4, 64, "kv_consumer", read="bc", write="")


def check_read(read: Read, reference: Output) -> None:
    """All full chunks came from the store, and the answer is that of the engine's own prefix hit."""
    assert read.output.cached == FULL
    assert read.supplied == FULL
    assert_same(read.output, reference)


def test_tp4_to_tp2(tp2: Run, references: References) -> None:
    check_read(tp2.read["a"], references.hit("smollm2", 2, "a"))


def test_tp4_to_tp1(tp1: Run, references: References) -> None:
    check_read(tp1.read["a"], references.hit("smollm2", 1, "a"))


def test_tp2_to_tp1(tp1: Run, references: References) -> None:
    check_read(tp1.read["b"], references.hit("smollm2", 1, "b"))


def test_tp2_to_tp4(tp4_reads: Run, references: References) -> None:
    check_read(tp4_reads.read["b"], references.hit("smollm2", 4, "b"))


def test_tp1_to_tp4(tp4_reads: Run, references: References) -> None:
    check_read(tp4_reads.read["c"], references.hit("smollm2", 4, "c"))


def test_a_producer_saves_and_never_loads(root: Path, tp4: Run) -> None:
    assert tp4.wrote["a"].cached == 0
    assert stored_prefix(root, story("a")) == FULL
    assert tp4.again.cached == 0
    assert tp4.again.text == tp4.wrote["a"].text


def test_a_consumer_loads_and_never_saves(tp4_reads: Run) -> None:
    assert tp4_reads.again.cached == FULL
    assert tp4_reads.after == tp4_reads.before


def test_both_loads_what_it_saved_itself(tp2: Run) -> None:
    assert tp2.wrote["b"].cached == 0
    assert tp2.again.cached == FULL
    assert_same(tp2.again, tp2.wrote["b"])


def test_what_is_stored_is_never_written_again(tp4: Run, tp2: Run, tp1: Run) -> None:
    assert tp4.before == {}
    assert len(tp4.after) == FULL // CHUNK
    for later in (tp2, tp1):
        assert later.before.items() <= later.after.items()
        assert len(later.after) - len(later.before) == FULL // CHUNK


def test_every_object_verifies(root: Path, tp4_reads: Run) -> None:
    assert len(verified(root)) == 3 * FULL // CHUNK


def test_tp3_to_tp1(tmp_path: Path, logs: Path, references: References) -> None:
    """The unpadded model: three KV heads, so TP=3 and TP=1 are what vLLM accepts."""
    wrote = run(tmp_path, logs / "tp3.log", "smollm2-9x3", 3, 32, "kv_producer", read="", write="a")
    assert stored_prefix(tmp_path, story("a")) == FULL
    reread = run(tmp_path, logs / "tp3-to-tp1.log", "smollm2-9x3", 1, 128, "kv_consumer", read="a", write="")
    check_read(reread.read["a"], references.hit("smollm2-9x3", 1, "a"))
    assert reread.read["a"].output.text == wrote.wrote["a"].text
