"""Loads that wait for blocks of each other: the engine must not stand still, and nobody waits for nothing."""

from types import SimpleNamespace
from typing import Any

import pytest
from sim_engine import SimEngine
from sim_model import SimModel
from sim_store import Sim

from tplayout_vllm.admission import Admission, Table

FULL = Table(16)
WINDOW = Table(16, most=5, skipped=lambda end: max(0, end - 31))
TABLES = (WINDOW, FULL)


class Pool:
    """An engine's KVCacheManager of `free` blocks. shared: full-attention blocks of every text that others hold."""

    max_model_len = 1000

    def __init__(self, free: int, shared: int = 0) -> None:
        self.free, self.shared = free, shared
        self.block_pool = SimpleNamespace(get_num_free_blocks=lambda: self.free)

    def get_computed_blocks(self, request: Any) -> tuple[Any, int, int]:
        held = [SimpleNamespace(is_null=False, ref_cnt=int(i < self.shared)) for i in range(self.shared + 1)]
        return SimpleNamespace(blocks=((), held)), 16 * len(held), 0


def request(name: str, tokens: int = 160) -> Any:
    return SimpleNamespace(request_id=name, num_tokens=tokens)


def load(admission: Admission, name: str, tokens: int = 160, end: int = 144) -> bool:
    """Ask for a load, and let the engine give it its blocks if it may start."""
    one = request(name, tokens)
    admitted = admission.admits(one, 0, end)
    if admitted:
        admission.allocated(one, tables(end), end)
    return admitted


def tables(end: int) -> tuple[list[int], ...]:
    blocks, gone = -(-end // 16), WINDOW.skipped(end) // 16
    return [0] * gone + [1] * (blocks - gone), [1] * blocks


@pytest.mark.parametrize(
    ("table", "tokens", "have", "missing"),
    [
        (FULL, 160, 0, 10),
        (FULL, 161, 9, 2),
        (FULL, 160, 12, 0),  # drafts that were not taken
        (WINDOW, 160, 9, 1),  # seven of these are null blocks: the last one is missing all the same
        (WINDOW, 160, 7, 3),
        (WINDOW, 1000, 9, 5),  # never more at a time
    ],
)
def test_blocks_that_are_missing(table: Table, tokens: int, have: int, missing: int) -> None:
    assert table.missing(tokens, have) == missing


def test_a_single_load_is_left_to_the_engine() -> None:
    assert load(Admission(TABLES, Pool(free=0)), "a")


def test_a_load_leaves_the_blocks_that_others_need() -> None:
    # Each takes 3 window blocks, of tokens from 113 on, and 10 of full attention; the first still needs 1 and 1.
    for free, admitted in ((14, False), (15, True)):
        admission = Admission(TABLES, Pool(free))
        assert load(admission, "a")
        assert load(admission, "b") is admitted


def test_drafts_need_blocks_too() -> None:
    admission = Admission(TABLES, Pool(15), ahead=1)
    assert load(admission, "a")
    assert not load(admission, "b")


def test_nothing_is_needed_behind_the_longest_request() -> None:
    admission = Admission(TABLES, Pool(10 * 16), ahead=100)
    assert load(admission, "a", 1000, 992)
    # 62 of 63 places are filled in both tables; the second takes 3 and 63.
    assert [table.missing(admission._tokens(request("a", 1000)), 62) for table in TABLES] == [1, 1]
    assert load(admission, "b", 1000, 992)


def test_blocks_that_others_hold_are_not_taken() -> None:
    pool = Pool(free=15 - 4, shared=4)
    admission = Admission(TABLES, pool)
    assert load(admission, "a")
    assert admission.admits(request("b"), 64, 144)
    assert not admission.admits(request("b"), 48, 144)  # the engine uses three of these only
    pool.shared = 0
    assert not admission.admits(request("b"), 64, 144)


@pytest.mark.parametrize("how", ["runs", "ended"])
def test_who_runs_or_is_gone_is_not_waited_for(how: str) -> None:
    admission = Admission(TABLES, Pool(14))
    assert load(admission, "a")
    assert not load(admission, "b")
    if how == "runs":
        admission.allocated(request("a"), tables(160), 0)
    else:
        admission.forget("a")
    assert load(admission, "b")


def test_who_asks_holds_nothing() -> None:
    admission = Admission(TABLES, Pool(14))
    assert load(admission, "a")
    assert load(admission, "a")  # its load failed, or it was pushed out


def test_who_waits_goes_before_later_ones() -> None:
    pool = Pool(14)
    admission = Admission(TABLES, pool)
    assert load(admission, "a")
    assert not load(admission, "long")
    assert not load(admission, "short", 32, 16)  # would fit
    pool.free = 15
    assert load(admission, "long")
    pool.free = 30
    assert load(admission, "short", 32, 16)


@pytest.mark.parametrize("how", ["computed", "ended"])
def test_nobody_waits_for_one_that_does_not_wait_any_more(how: str) -> None:
    admission = Admission(TABLES, Pool(14))
    assert load(admission, "a")
    assert not load(admission, "long")
    if how == "ended":
        admission.forget("long")
    else:
        admission.allocated(request("long"), tables(160), 0)
    assert load(admission, "short", 32, 16)


def test_models_without_windows_are_left_to_the_engine() -> None:
    admission = Admission((FULL, FULL), None)
    for name in "abc":
        one = request(name)
        assert admission.admits(one, 0, 144)
        admission.allocated(one, ([1] * 9, [1] * 9), 144)


# -- the engine's own scheduler ----------------------------------------------------------------------------------------

MODELS = {"three tables": (SimModel((128, 100, None)), 15), "two tables": (SimModel((128, 128, None)), 14)}
PROMPTS = {"three tables": (520, 520, 520), "two tables": (385, 192, 389, 385)}


@pytest.fixture(params=MODELS)
def burst(sim: Sim, request: pytest.FixtureRequest) -> tuple[SimEngine, list[str]]:
    """An engine with a small pool, and requests whose prefixes are in host memory: all could load in its next step."""
    model, blocks = MODELS[request.param]
    engine = sim.engine(model=model, block=128, blocks=blocks, budget=77, caching=False)
    texts = [sim.text(seed) for seed in range(len(PROMPTS[request.param]))]
    for text in texts:
        engine.run(text, 600, 1)
    return engine, [engine.add(text, prompt, 30) for text, prompt in zip(texts, PROMPTS[request.param], strict=True)]


def test_requests_that_all_load_are_all_served(burst: tuple[SimEngine, list[str]]) -> None:
    engine, names = burst
    answers: list[bool] = []
    admits = engine.side._admission.admits
    engine.side._admission.admits = lambda *args: answers.append(admits(*args)) or answers[-1]
    engine.until(lambda: not engine.scheduler.has_requests(), 20)
    assert False in answers  # else nothing was seen here
    for name in names:
        prompt = engine.requests[name].num_prompt_tokens
        assert engine.loaded(name) == min(prompt // 64 * 64, prompt - 1)
        assert engine.requests[name].num_preemptions == 0
    assert not engine.side._admission._missing


def test_vllm_alone_stands_still(burst: tuple[SimEngine, list[str]]) -> None:
    """Where this fails vLLM counts right, and needs no `admission`."""
    engine, names = burst
    engine.side._admission.admits = lambda *_: True
    computed = []
    for _ in range(20):
        engine.step()
        computed.append([engine.requests[name].num_computed_tokens for name in names])
    assert computed[0] == computed[-1]
    assert computed[0].count(0) == 1  # it waits for blocks, the others hold them
    assert not engine.scheduler.running
