"""Random walks: requests come, share prefixes, are aborted, pushed out and resumed, on stores that rot and vanish.

Each step is checked by `sim_engine`, each stored object by `Sim.check_store`. Every walk is a seed and can be run
again alone: pytest -k 'walk and 17'.
"""

import random
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from sim_engine import SimEngine
from sim_model import SimModel, Text
from sim_store import Sim

from tplayout.errors import FormatError

MODELS = (
    SimModel(),
    SimModel((None, None, 128, 128)),
    SimModel((128, 128, 128, None)),
    SimModel((96, 40, None)),
    SimModel((100, 100)),
    SimModel((None, 100), hybrid=False),
)
SEEDS = range(7)
LONGEST = 700
ACTIONS = 50
DRAFTS = 3


pytestmark = pytest.mark.usefixtures("quiet")


@pytest.fixture(scope="module")
def walked() -> dict[int, Counter[str]]:
    """Seed -> what happened, of the walks that were done."""
    return {}


class Walk:
    """Two engines, one after the other, on one store; what they are and do is drawn from a seed."""

    def __init__(self, sim: Sim, seed: int) -> None:
        self.sim, self.random, self.events = sim, random.Random(seed), Counter[str]()
        self.chunk = self.random.choice([32, 48, 64, 128, 256])
        self.model = self.random.choice(MODELS)
        first = sim.text(seed)
        self.texts = [first, sim.text(2000 + seed, salt="salt")]
        self.texts += [sim.text(1000 + 10 * seed + i, first, self.random.randrange(600)) for i in range(4)]
        self.damaged: set[Path] = set()

    def run(self) -> Counter[str]:
        """What happened, and how often."""
        for _ in range(2):
            engine = self.sim.engine(**self._setup())
            live: list[str] = []
            for _ in range(ACTIONS):
                self._act(engine, live)
            engine.drain()
            self._drop_damaged()
            self.sim.check_store()
            self.events["preempted"] += sum(request.num_preemptions for request in engine.requests.values())
            self.events["loads"] += sum(map(len, engine.claims.values()))
            self.events["behind local hits"] += sum(local > 0 for rows in engine.claims.values() for local, _ in rows)
            self.events["failed"] += len(engine.failed)
        return self.events

    def _setup(self) -> dict[str, Any]:
        pick = self.random.choice
        block, budget, steps = pick([32, 64, 96, 128]), pick([37, 100, 128, 513]), pick([1, 2])
        # From what one request takes on, so that requests push each other out, and loads wait for each other.
        most = -(-(LONGEST + DRAFTS * 2) // block)
        windows = [self.model.windows[layers[0]] if self.model.hybrid else None for layers in self.model.tables]
        held = [most if w is None else min(most, -(-(w + steps * budget) // block) + 1) for w in windows]
        return {
            "model": self.model,
            "chunk": self.chunk,
            "tp": pick([1, 2, 4]),
            "block": block,
            "kernel": pick([None, 32]),
            "budget": budget,
            "blocks": 1 + int(pick([1.0, 1.0, 1.2, 2]) * sum(held)),
            "reserve": pick([True, False, False]),
            "seqs": pick([2, 8]),
            "caching": pick([True, True, False]),
            "asynchronous": steps == 2,
            "drafts": pick([0, 0, DRAFTS]),
            "order": pick(["column", "rows"]),
            "delayed": pick([False, True]),
            "policy": pick(["fcfs", "priority"]),
            "role": pick(["kv_both"] * 6 + ["kv_consumer", "kv_producer"]),
            "options": {"staging_bytes": pick([200_000, 8_000_000]) if self.chunk < 128 else 8_000_000},
        }

    def _act(self, engine: SimEngine, live: list[str]) -> None:
        draw = self.random.random()
        if draw < 0.28:
            live.append(self._add(engine, self.random.choice(self.texts)))
        elif draw < 0.34 and live:
            loading = [name for name in live if engine.loading(name)]
            name = self.random.choice(loading or live)
            self.events["aborted in a load"] += bool(loading)
            live.remove(name)
            engine.abort(name)
        elif draw < 0.36:
            engine.fail_copies(self.random.randrange(engine.setup.tp), 1, self.random.choice(["load", "save"]))
        elif draw < 0.37:
            self._spoil_store(engine)
        elif draw < 0.40:
            engine.scheduler.reset_prefix_cache()
        elif draw < 0.45:
            engine.settle()
        else:
            for _ in range(self.random.randrange(1, 12)):
                engine.step()
                if self.random.random() < 0.3:
                    engine.flush()

    def _add(self, engine: SimEngine, text: Text) -> str:
        pick = self.random.choice
        edge = pick([1, self.chunk - 1, self.chunk, self.chunk + 1, 2 * self.chunk])
        prompt = pick([edge, *(self.random.randrange(1, LONGEST) for _ in range(3))])
        outputs = pick([1, self.random.randrange(1, 60), self.random.randrange(1, 120)])
        return engine.add(text, min(prompt, LONGEST - outputs), outputs, priority=self.random.randrange(3))

    def _spoil_store(self, engine: SimEngine) -> None:
        """Objects vanish or rot, and what was in memory is forgotten, so that this is seen."""
        for _, _, path in list(self.sim.objects()):
            draw = self.random.random()
            if draw < 0.2:
                path.unlink()
            elif draw < 0.4:
                data = bytearray(path.read_bytes())
                data[self.random.randrange(len(data))] ^= 4
                path.write_bytes(data)
                self.damaged.add(path)
                self.events["damaged"] += 1
        engine.connector.reset_cache()

    def _drop_damaged(self) -> None:
        """Remove what was damaged and not replaced since."""
        for path in self.damaged:
            if path.exists():
                try:
                    self.sim.check_file(path)
                except FormatError:
                    path.unlink()
        self.damaged.clear()


@pytest.mark.parametrize("seed", SEEDS)
def test_a_walk(sim: Sim, seed: int, walked: dict[int, Counter[str]]) -> None:
    walked[seed] = Walk(sim, seed).run()


def test_the_walks_meet_what_they_are_for(
    walked: dict[int, Counter[str]], model_directory: Path, tmp_path: Path
) -> None:
    for seed in set(SEEDS) - walked.keys():  # this test was chosen alone
        with closing(Sim(tmp_path / str(seed), model_directory)) as sim:
            walked[seed] = Walk(sim, seed).run()
    events = sum(walked.values(), Counter[str]())
    missing = {"preempted", "loads", "behind local hits", "failed", "aborted in a load", "damaged"} - (+events).keys()
    assert not missing, events


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(1000, 1120))
def test_another_walk(sim: Sim, seed: int) -> None:
    Walk(sim, seed).run()
