"""Asynchronous scheduling, preemption and speculation: what is not known, or not sure, is never stored.

With asynchronous scheduling a step is planned before the one ahead of it has run: the newest token is a placeholder,
and drafts count as computed until they are rejected.
"""

from typing import Any

import pytest
from sim_engine import SimEngine
from sim_store import Sim

ASYNC = "Asynchronous scheduling (vLLM's own Scheduler, without an engine: the CPU platform has none)"


def preemptions(engine: SimEngine) -> int:
    return sum(request.num_preemptions for request in engine.requests.values())


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("caching", [False, True])
def test_pushed_out_requests_come_back_from_the_store(sim: Sim, asynchronous: bool, caching: bool) -> None:
    """Blocks are given away between a save and the load of the same chunk, in the middle of requests."""
    engine = sim.engine(blocks=25, caching=caching, asynchronous=asynchronous, seqs=3, budget=128, tp=2)
    texts = [sim.text(seed) for seed in range(3)]
    names = [engine.add(text, 200, 130) for text in texts]
    engine.until(lambda: all(map(engine.finished, names)))
    engine.settle()
    assert preemptions(engine) > 0
    assert sum(map(engine.loaded, names)) > 0
    for text in texts:
        assert all(sim.stored(text, 200 + 100))
    sim.check_store()


@pytest.mark.row(ASYNC, "two steps in flight, preemption between them")
@pytest.mark.parametrize("delayed", [False, True])
def test_pushed_out_with_two_steps_in_flight(sim: Sim, delayed: bool) -> None:
    """Requests that lose their blocks while results and copies are under way.

    Where loads may follow, vLLM lets a request finish its step first; a producer's blocks go at once.
    """
    engine = sim.engine(
        blocks=27, asynchronous=True, reserve=False, seqs=4, budget=150, delayed=delayed, role="kv_producer"
    )
    texts = [sim.text(10 + seed) for seed in range(4)]
    names = [engine.add(text, 400, 40) for text in texts]
    engine.until(lambda: all(map(engine.finished, names)))
    engine.settle()
    assert preemptions(engine) > 0
    sim.check_store()


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("accept", [0.0, 0.5, 1.0])
def test_rejected_drafts_are_never_stored(sim: Sim, asynchronous: bool, accept: float) -> None:
    """A chunk that ends within drafts waits until they are accepted: check_store knows no other tokens."""
    engine = sim.engine(asynchronous=asynchronous, drafts=3, chunk=16, tp=2)
    engine.accept = accept
    texts = [sim.text(20 + seed) for seed in range(3)]
    names = [engine.add(text, 30 + seed, 100) for seed, text in enumerate(texts)]
    engine.until(lambda: all(map(engine.finished, names)))
    engine.settle()
    for text in texts:
        assert all(sim.stored(text, 128 - 16))
    assert sim.check_store() >= 3 * 7
    # A server without drafts reads it.
    reader = sim.engine(chunk=16)
    assert reader.loaded(reader.run(texts[0], 120, 2)) >= 112


@pytest.mark.row(ASYNC, "placeholder tokens: a chunk is stored once its last token is known")
def test_a_generated_chunk_is_stored_when_its_last_token_is_known(sim: Sim) -> None:
    engine = sim.engine(asynchronous=True)
    text = sim.text(30)
    name = engine.add(text, 50, 100)
    request = engine.requests[name]
    seen = []
    while not engine.finished(name):
        engine.step()
        saves = [t for job in engine._jobs for t in job.output.kv_connector_metadata.saves]
        for copy in (copy for transfer in saves for copy in transfer.copies):
            assert copy.last <= len(request.all_token_ids)
            seen.append((copy.base, copy.last))
    assert seen == [(0, 64), (64, 128)]
    engine.settle()
    assert sim.check_store() == 2


def test_a_load_may_be_planned_a_step_late(sim: Sim) -> None:
    """vLLM 0.33 gives blocks for a load and tells so when the steps ahead have run."""
    text, other = sim.text(35), sim.text(36)
    sim.engine().run(text, 300, 1)
    engine = sim.engine(asynchronous=True, tp=2)
    planned, late = engine.connector.update_state_after_alloc, []

    def deferred(request: Any, blocks: Any, external: int) -> None:
        if external:
            late.append((engine.steps, request, external))
        else:
            planned(request, blocks, external)

    engine.connector.update_state_after_alloc = deferred
    busy = engine.add(other, 50, 60)
    name = engine.add(text, 300, 10)

    def both() -> bool:
        if late and engine.steps > late[0][0] + 1:
            _, request, external = late.pop()
            planned(request, engine.scheduler.kv_cache_manager.get_blocks(request.request_id), external)
        return engine.finished(busy) and engine.finished(name)

    engine.until(both)
    assert engine.loaded(name) == 256
    engine.settle()
    sim.check_store()


def test_priorities_push_out_requests_of_the_same_step(sim: Sim) -> None:
    engine = sim.engine(blocks=25, policy="priority", seqs=3, budget=128)
    texts = [sim.text(40 + seed) for seed in range(3)]
    names = [engine.add(text, 200, 130, priority=3 - seed) for seed, text in enumerate(texts)]
    engine.until(lambda: all(map(engine.finished, names)))
    engine.settle()
    assert preemptions(engine) > 0
    sim.check_store()
