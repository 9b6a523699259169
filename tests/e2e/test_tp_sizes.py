"""What one TP size writes, others read: real weights, real ranks, and other block sizes on each side.

The runs `tp4`, `tp2`, `tp1` and `tp4_reads` are fixtures of conftest.py. Answers are compared with what an engine of
the same TP size without the connector gives as its own prefix hit.
"""

from pathlib import Path
from typing import Any

import demo_models
import pytest
from e2e_cases import CHUNK, References, assert_same, story
from e2e_store import stored_prefix, verified
from e2e_tp_runs import FULL, Read, Run, run
from vllm_engine import Output

from tplayout import Cache, describe_model

GROUPED = "Grouped-query attention"


def check_read(read: Read, reference: Output) -> None:
    """All full chunks came from the store, and the answer is that of the engine's own prefix hit."""
    assert read.output.cached == FULL
    assert read.supplied == FULL
    assert_same(read.output, reference)


def read_by(reader: str, prompt: str, tp: int, written_by: int) -> Any:
    """The fixture of the run that reads the prompt at this TP size; another size wrote it."""
    return pytest.param(reader, prompt, tp, marks=pytest.mark.row(GROUPED, f"4 KV heads, TP {written_by} → {tp}"))


@pytest.mark.parametrize(
    ("reader", "prompt", "tp"),
    [
        read_by("tp2", "a", 2, written_by=4),
        read_by("tp1", "a", 1, written_by=4),
        read_by("tp1", "b", 1, written_by=2),
        read_by("tp4_reads", "b", 4, written_by=2),
        read_by("tp4_reads", "c", 4, written_by=1),
    ],
)
def test_another_tp_size_reads_it(
    request: pytest.FixtureRequest, references: References, reader: str, prompt: str, tp: int
) -> None:
    done: Run = request.getfixturevalue(reader)
    check_read(done.read[prompt], references.hit("smollm2", tp, prompt))


def test_a_producer_saves_and_never_loads(tp_root: Path, tp4: Run) -> None:
    assert tp4.wrote["a"].cached == 0
    assert stored_prefix(tp_root, story("a")) == FULL
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


def test_every_object_verifies(tp_root: Path, tp4_reads: Run) -> None:
    assert len(verified(tp_root)) == 3 * FULL // CHUNK


def test_the_python_api_finds_what_vllm_stored(tp_root: Path, tp4: Run) -> None:
    identity = describe_model(demo_models.ensure("smollm2"), compute_dtype="float32")
    with Cache.open(f"file://{tp_root}", identity, create=False) as cache:
        prefix = cache.longest_prefix(story("a"), verify=True)
    assert prefix.tokens == FULL


@pytest.mark.row(GROUPED, "3 KV heads, TP 3 → 1")
def test_tp3_to_tp1(tmp_path: Path, logs: Path, references: References) -> None:
    """The unpadded model: three KV heads, so TP=3 and TP=1 are what vLLM accepts."""
    wrote = run(tmp_path, logs / "tp3.log", "smollm2-9x3", 3, 32, "kv_producer", read="", write="a")
    assert stored_prefix(tmp_path, story("a")) == FULL
    reread = run(tmp_path, logs / "tp3-to-tp1.log", "smollm2-9x3", 1, 128, "kv_consumer", read="a", write="")
    check_read(reread.read["a"], references.hit("smollm2-9x3", 1, "a"))
    assert reread.read["a"].output.text == wrote.wrote["a"].text
