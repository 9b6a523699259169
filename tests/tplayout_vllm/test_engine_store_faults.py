"""Random traffic on a store of which any call may break: every answer is right, and the damage that is left is known.

The store is `tools.faulty_files`, under the connector's own I/O processes. Each step is checked by `sim_engine`: what a
request attends to is, bit for bit, what it is without any cache.
"""

import random
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from sim_engine import SimEngine
from sim_model import SimModel, Text
from sim_store import Sim

from tools.fault_store import Fault
from tools.faulty_files import APPLICABLE, FaultyFiles, Rates, spread
from tplayout.admin.verify import verify_store
from tplayout.storage.url import open_store

WINDOWS = SimModel((None, None, 128, 128))
TRAFFIC = 100
SECONDS = 0.15  # of a store operation


pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(scope="module")
def events() -> Counter[Any]:
    """Faults that were injected in all tests together."""
    return Counter()


@pytest.fixture
def faults(faults: FaultyFiles, events: Counter[Any]) -> Iterator[FaultyFiles]:
    """The same, counted in the end."""
    yield faults
    events.update(faults.injected())


def engine_of(sim: Sim, faults: FaultyFiles, staging_bytes: int = 400_000, **setup: Any) -> SimEngine:
    """Staging is small by default, so that much is read again."""
    options = {
        "storage_options": faults.storage_options,
        "store_timeout_ms": round(1000 * SECONDS),
        "load_deadline_ms": 400,
        "staging_bytes": staging_bytes,
        "io_processes": 2,
    }
    return sim.engine(options=options, caching=False, **setup)


class Traffic:
    """Requests of few texts, drawn from a seed."""

    def __init__(self, sim: Sim, seed: int) -> None:
        self.random = random.Random(seed)
        first = sim.text(seed)
        self.texts = [first, *(sim.text(100 * seed + i, first, self.random.randrange(300)) for i in range(5))]

    def run(self, engine: SimEngine, count: int) -> None:
        """Every request ends by itself, and none with an error."""
        names = []
        for _ in range(count):
            names.append(engine.add(self.random.choice(self.texts), self.random.randrange(50, 400), 3))
            for _ in range(self.random.randrange(1, 9)):
                engine.step()
            if self.random.random() < 0.1:
                engine.connector.reset_cache()
        engine.until(lambda: all(map(engine.finished, names)))
        engine.settle()
        assert {engine.requests[name].get_finished_reason().name for name in names} == {"LENGTH"}


def damage(sim: Sim) -> set[str]:
    """Names of what `tplayout verify` calls damaged."""
    with open_store(f"file://{sim.store}") as store:
        return {finding.name for finding in verify_store(store).findings if finding.kind.name != "UNREACHABLE"}


def document_of(engine: SimEngine) -> str:
    return f"{engine.side._namespace.hex()[:32]}/namespace.json"


def works_again(sim: Sim, engine: SimEngine) -> Text:
    """A prompt that the engine has stored, with a document that is sound.

    What it tries while it leaves the store alone is not stored; and who has written the document and was told that all
    is well looks at it again after five seconds.
    """
    for text in (sim.text(10_000 * len(sim.texts) + i) for i in range(100)):
        engine.run(text, 300, 1)
        if all(sim.stored(text, 256)) and document_of(engine) not in damage(sim):
            return text
        time.sleep(0.1)
    raise AssertionError(engine.stager.health)


USED = {(method, fault) for method in ("cat_file", "pipe_file", "info") for fault in APPLICABLE[method]}
CASES = [
    (spread(0.03), 1, SimModel()),
    (spread(0.15), 2, WINDOWS),
    (spread(0.5), 3, SimModel()),
    (spread(0.4, ["cat_file"], [Fault.SHORT_READ, Fault.FLIPPED_BIT]), 4, WINDOWS),
    (spread(0.4, ["pipe_file"], [Fault.FLIPPED_BIT, Fault.FAILURE_AFTER_WRITE, Fault.REPORTED_FAILURE]), 5, SimModel()),
    (spread(0.3, faults=[Fault.HANG, Fault.DELAY, Fault.STALE_LIST]), 6, SimModel()),
]


@pytest.mark.parametrize(("rates", "seed", "model"), CASES, ids=["3%", "15%", "half", "reads", "writes", "slow"])
def test_answers_are_right_and_the_damage_is_known(
    sim: Sim, faults: FaultyFiles, rates: Rates, seed: int, model: SimModel
) -> None:
    traffic, everything = Traffic(sim, seed), rates == spread(0.5)
    for turn in range(2):
        engine = engine_of(sim, faults, model=model, tp=2 - turn)
        faults.inject(rates, 2 * seed + turn, delay_s=0.02)
        traffic.run(engine, TRAFFIC)
        for more in range(20 * everything):
            if set(faults.injected()) >= USED:
                break
            others = Traffic(sim, 100 * (turn + 1) + more)  # whose texts are not stored
            others.run(engine, 10)
            traffic.texts += others.texts
        faults.stop()
        # Without their document the objects cannot be judged; the engine writes it again.
        assert (document_of(engine) in damage(sim)) == (document_of(engine) in faults.damaged(sim.store))
        text = works_again(sim, engine)
        assert damage(sim) == faults.damaged(sim.store)
    # All is well again: what this engine has stored another one reads.
    other = engine_of(sim, faults, staging_bytes=8_000_000, model=model)
    assert other.loaded(other.run(text, 300, 1)) == 256
    # What is damaged is stored anew as soon as somebody would have needed it.
    for chunks in [*range(1, 7)] * 2:  # windows that end everywhere
        for text in traffic.texts if damage(sim) else ():
            other.connector.reset_cache()
            other.run(text, 64 * chunks + 1, 1)
    assert damage(sim) == faults.damaged(sim.store) == set()
    sim.check_store()


@pytest.mark.parametrize("fault", [Fault.FLIPPED_BIT, Fault.FAILURE_AFTER_WRITE, Fault.REPORTED_FAILURE])
def test_a_namespace_document_that_a_server_wrote_badly_is_written_again_by_it(
    sim: Sim, faults: FaultyFiles, fault: Fault
) -> None:
    engine = engine_of(sim, faults)
    faults.inject({"pipe_file": {fault.value: 1.0}})
    engine.run(sim.text(1), 300, 1)
    faults.stop()
    assert (document_of(engine) in damage(sim)) == (fault is not Fault.REPORTED_FAILURE)
    works_again(sim, engine)
    assert document_of(engine) not in damage(sim)


def test_the_traffic_met_every_fault_of_every_call_that_servers_make(events: Counter[Any]) -> None:
    if not events:
        pytest.skip("NOT TESTED: that traffic meets every fault, since no test with traffic was run")
    assert set(events) == USED
    assert events.total() > 400, events
