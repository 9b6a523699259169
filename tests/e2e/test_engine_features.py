"""What vLLM's scheduler does to a request, with the connector in between: one engine serves all cases.

It has an odd token budget, few and small blocks, and a staging pool of few slots, so that every case also meets
chunked prefill, and some meet preemption. The tiny model's answers depend on every part of the prompt.
"""

import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e_cases import ANSWER, CHUNK, assert_same, cold_answer, engine_args, external_hits, noise, offload
from e2e_one_process import forget
from e2e_store import objects, stored_prefix, verified, wait_until_stored
from vllm_engine import Engine, EngineFailed, Output, Pending, engine

BLOCK = 32
BUDGET = 173
BLOCKS = 64
SLOTS = 4
CELLS = 4 * 4 * 2 * 64 * 4  # layers × heads × K and V × head size × float32, a token
STAGING = SLOTS * (CHUNK * CELLS + 64 * 1024)  # a slot is a chunk and at most a page a head more


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("store")


@pytest.fixture(scope="module")
def one(root: Path, logs: Path) -> Iterator[Engine]:
    args = engine_args(
        "llama",
        1,
        block_size=BLOCK,
        max_num_batched_tokens=BUDGET,
        num_gpu_blocks_override=BLOCKS,
        max_num_seqs=12,
        max_model_len=BLOCKS * BLOCK - BLOCK,
        **offload(f"file://{root}", staging_bytes=STAGING),
    )
    with engine(args, logs / "features.log") as running:
        yield running


def reload(running: Engine, tokens: list[int], max_tokens: int = ANSWER) -> tuple[Output, float]:
    """The answer when only the store can help, and the tokens that the connector supplied."""
    forget(running)
    before = external_hits(running)
    output = running.generate(tokens, max_tokens)
    return output, external_hits(running) - before


def quiet(running: Engine) -> None:
    """Wait until nothing is being saved or loaded any more: an idle engine pins no staging slot."""
    deadline = time.monotonic() + 20
    while True:
        running.generate(noise(5, 0), 1)  # gauges are reported with a step
        metrics = running.metrics()
        if metrics["vllm:tplayout_staging_used"] == 0:
            return
        assert time.monotonic() < deadline, {k: v for k, v in metrics.items() if "tplayout" in k and "{" not in k}
        time.sleep(0.1)


def test_shorter_than_a_chunk(one: Engine, root: Path) -> None:
    tokens = noise(100, 1)
    first = one.generate(tokens)
    again, supplied = reload(one, tokens)
    assert (again.cached, supplied) == (0, 0)
    assert_same(again, first)
    assert stored_prefix(root, tokens) == 0


def test_exactly_one_chunk(one: Engine, root: Path) -> None:
    tokens = noise(CHUNK, 2)
    first = one.generate(tokens)
    wait_until_stored(root, tokens, CHUNK)
    again, supplied = reload(one, tokens)
    # The last token is always computed: something has to be sampled from.
    assert again.cached == supplied == CHUNK - 1
    assert_same(again, first)


def test_odd_budget(one: Engine, root: Path) -> None:
    tokens = noise(3 * CHUNK + 61, 3)
    first = one.generate(tokens)
    wait_until_stored(root, tokens, 3 * CHUNK)
    again, supplied = reload(one, tokens)
    assert again.cached == supplied == 3 * CHUNK
    assert_same(again, first)


def test_an_idle_engine_finishes_its_saves(one: Engine, root: Path) -> None:
    tokens = noise(2 * CHUNK + 1, 4)
    one.generate(tokens, 1)
    wait_until_stored(root, tokens, 2 * CHUNK, within=10)  # no request, no step: only time passes


def test_generated_tokens_are_saved(one: Engine, root: Path) -> None:
    prompt = noise(CHUNK - 56, 5)
    answer = one.generate(prompt, 80)
    turn = prompt + answer.tokens + noise(30, 6)
    wait_until_stored(root, turn, CHUNK)
    again, supplied = reload(one, turn)
    assert again.cached == supplied == CHUNK
    assert_same(again, cold_answer(one, turn))


def test_requests_that_share_a_prefix(one: Engine, root: Path) -> None:
    shared = noise(2 * CHUNK, 7)
    prompts = [shared + noise(20 + 11 * i, 70 + i) for i in range(5)]
    quiet(one)
    before = len(objects(root))
    first = [request.result() for request in [one.submit(prompt) for prompt in prompts]]
    wait_until_stored(root, shared, 2 * CHUNK)
    assert len(objects(root)) == before + 2
    forget(one)
    again = [request.result() for request in [one.submit(prompt) for prompt in prompts]]
    for prompt, cold, warm in zip(prompts, first, again, strict=True):
        assert warm.cached >= 2 * CHUNK
        assert_same(warm, cold)
        assert_same(warm, cold_answer(one, prompt))


def test_a_local_hit_inside_a_chunk_goes_on_from_the_store(one: Engine, root: Path) -> None:
    tokens = noise(3 * CHUNK + 40, 8)
    first = one.generate(tokens)
    wait_until_stored(root, tokens, 3 * CHUNK)
    forget(one)
    # A salted engine-local prefix does not help: another prompt with the same first 320 tokens fills whole blocks.
    local = CHUNK + 2 * BLOCK
    begun = one.generate(tokens[:local] + noise(5, 9), 1)
    assert begun.cached == CHUNK
    before = external_hits(one)
    again = one.generate(tokens)
    assert again.cached == 3 * CHUNK
    assert external_hits(one) - before == 3 * CHUNK - local
    assert_same(again, first)


def test_a_prefix_larger_than_the_staging_pool(one: Engine, root: Path) -> None:
    tokens = noise(7 * CHUNK + 9, 10)
    first = one.generate(tokens)
    # Saving waits for nobody, so a full pool may leave gaps; asking again fills them.
    deadline = time.monotonic() + 60
    while stored_prefix(root, tokens) < 7 * CHUNK:
        assert time.monotonic() < deadline, f"{stored_prefix(root, tokens)} tokens stored"
        reload(one, tokens, 1)
        time.sleep(0.2)
    again, supplied = reload(one, tokens)
    assert CHUNK <= supplied == again.cached <= SLOTS * CHUNK
    assert again.cached % CHUNK == 0
    assert_same(again, first)


def test_preemption(one: Engine, root: Path) -> None:
    """More running requests than blocks: some lose theirs in mid-generation and start again."""
    prompts = [noise(CHUNK + 30 + i, 100 + i) for i in range(8)]
    alone = [cold_answer(one, prompt, 70) for prompt in prompts]
    forget(one)
    before = one.metrics().get("vllm:num_preemptions_total", 0.0)
    crowd = [request.result() for request in [one.submit(prompt, 70) for prompt in prompts]]
    assert one.metrics()["vllm:num_preemptions_total"] > before
    for output, wanted in zip(crowd, alone, strict=True):
        assert_same(output, wanted)
    for prompt, wanted in zip(prompts, alone, strict=True):
        wait_until_stored(root, prompt, CHUNK)
        output, supplied = reload(one, prompt, 70)
        assert supplied == CHUNK
        assert_same(output, wanted)


def hung_up(victim: Pending) -> bool:
    """Whether the request was ended by its abort, not by itself just before."""
    try:
        victim.result()
    except EngineFailed as error:
        return "aborted" in str(error)
    return False


def test_aborts_at_any_moment_of_a_load(one: Engine, root: Path) -> None:
    """Clients hang up while their prefix is looked up, loaded, or used; blocks are reused by others at once."""
    chance = random.Random(0)
    prompts = [noise(3 * CHUNK + 17, 200 + i) for i in range(3)]
    wanted = [one.generate(prompt) for prompt in prompts]
    for prompt in prompts:
        wait_until_stored(root, prompt, 3 * CHUNK)
    aborted = 0
    for turn in range(40):
        if turn % 4 == 0:
            forget(one)
        victim = one.submit(prompts[turn % 3], 200)
        time.sleep(chance.uniform(0, 0.06))
        victim.abort()
        other = (turn + 1) % 3
        assert_same(one.generate(prompts[other]), wanted[other])
        aborted += hung_up(victim)
    assert aborted >= 30
    quiet(one)


def test_metrics_add_up(one: Engine, root: Path) -> None:
    tokens = noise(2 * CHUNK + 3, 12)
    quiet(one)
    before = one.metrics()
    one.generate(tokens)
    wait_until_stored(root, tokens, 2 * CHUNK)
    reload(one, tokens)
    quiet(one)
    after = one.metrics()

    def grown(name: str) -> float:
        full = f"vllm:tplayout_{name}"
        return after[full] - before.get(full, 0.0)

    assert grown("saves_total") == 2
    assert grown("loads_total") == 2
    assert 2 * CHUNK * CELLS < grown("save_bytes_total") < 2 * CHUNK * CELLS * 1.05
    assert 2 * CHUNK * CELLS < grown("load_bytes_total") < 2 * CHUNK * CELLS * 1.05
    assert grown("save_seconds_total") > 0
    assert grown("load_seconds_total") > 0
    assert grown("verification_failures_total") == 0
    assert after["vllm:tplayout_staging_slots"] == SLOTS
    assert after["vllm:tplayout_store_healthy"] == 1


def test_every_object_verifies(one: Engine, root: Path) -> None:
    """Last in the file: whatever the cases above did, nothing wrong is in the store."""
    assert len(verified(root)) == len(objects(root)) > 30
