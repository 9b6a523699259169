"""Aborts, failures and slow stores: no request fails or waits for long, no block is reused too early, nothing leaks."""

import json
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sim_engine import SimEngine
from sim_model import Text
from sim_store import Sim

from tplayout.errors import ConfigError, Unavailable
from tplayout.staging.stager import Stager

FAULTY = Path(__file__).parent.parent / "staging" / "faulty_io_process.py"


@pytest.fixture
def store_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Engines started from now on have a store that obeys it: store_fault(get_into={"delay": 0.5})."""
    file = tmp_path / "faults.json"

    def fault(**verbs: Any) -> None:
        file.with_suffix(".new").write_text(json.dumps(verbs))
        file.with_suffix(".new").rename(file)

    fault()
    monkeypatch.setenv("TPLAYOUT_TEST_FAULTS", str(file))
    command = [sys.executable, str(FAULTY)]
    monkeypatch.setattr("tplayout_vllm.opening.Stager", partial(Stager, command=command))
    yield fault
    fault()


def pinned(engine: SimEngine) -> int:
    engine.stager.poll()
    return engine.stager.snapshot()["slots"]["pinned"]


def free_blocks(engine: SimEngine) -> int:
    return engine.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()


# -- aborts --------------------------------------------------------------------------------------------------------


def test_abort_while_the_store_is_asked(sim: Sim, store_fault: Callable[..., None]) -> None:
    text = sim.text(1)
    sim.engine().run(text, 300, 1)
    store_fault(get_into={"delay": 0.1})
    engine = sim.engine()
    name = engine.add(text, 300)
    for _ in range(3):
        engine.step()
    assert pinned(engine) > 0
    engine.abort(name)
    engine.step()
    assert pinned(engine) == 0
    engine.settle()
    assert not engine.scheduler.has_requests()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_abort_in_a_load_keeps_the_blocks_until_it_ends(sim: Sim, asynchronous: bool) -> None:
    text, other = sim.text(2), sim.text(3)
    sim.engine().run(text, 300, 1)
    engine = sim.engine(delayed=True, tp=2, blocks=24, asynchronous=asynchronous)
    free = free_blocks(engine)
    name = engine.add_and_load(text, 300)
    engine.abort(name)
    assert free - free_blocks(engine) == 8  # 256 tokens
    busy = engine.add(other, 200, 3)
    for _ in range(20):  # the load is not over, and its blocks are nobody else's
        engine.step()
    assert free - free_blocks(engine) >= 8
    assert pinned(engine) == 4
    engine.until(lambda: engine.finished(busy))
    engine.settle()
    engine.step()
    assert free_blocks(engine) == free
    assert pinned(engine) == 0
    sim.check_store()


def test_abort_when_one_rank_has_loaded_and_another_has_not(sim: Sim) -> None:
    text = sim.text(4)
    sim.engine().run(text, 300, 1)
    engine = sim.engine(delayed=True, tp=2)
    free = free_blocks(engine)
    name = engine.add_and_load(text, 300)
    engine.ranks[0].side._copies.flush()
    engine.step()
    engine.abort(name)
    engine.step()
    assert free_blocks(engine) < free
    engine.ranks[1].side._copies.flush()
    engine.step()
    assert free_blocks(engine) == free
    assert pinned(engine) == 0


def test_abort_after_a_load(sim: Sim) -> None:
    text = sim.text(5)
    sim.engine().run(text, 300, 1)
    engine = sim.engine(delayed=True, budget=20)
    free = free_blocks(engine)
    name = engine.add_and_load(text, 300)
    engine.flush()
    engine.step()  # the load ends with this step, and the request is still not scheduled
    assert engine.loading(name)
    engine.abort(name)
    engine.step()
    assert free_blocks(engine) == free
    assert pinned(engine) == 0
    again = engine.add(text, 300)
    engine.until(lambda: engine.finished(again))


# -- loads and saves that fail -------------------------------------------------------------------------------------


@pytest.mark.parametrize("failing", [[0], [1], [0, 1]])
@pytest.mark.parametrize("caching", [False, True])
def test_a_failed_load_is_computed_and_not_tried_again(sim: Sim, failing: list[int], caching: bool) -> None:
    text = sim.text(10)
    sim.engine().run(text, 300, 1)
    engine = sim.engine(tp=2, caching=caching)
    for rank in failing:
        engine.fail_copies(rank, 1)
    name = engine.run(text, 300, 5)
    assert engine.requests[name].get_finished_reason().name == "LENGTH"
    assert engine.failed == {name}
    assert engine.claims[name] == [(0, 256)]  # once
    assert pinned(engine) == 0
    other = sim.text(11, text, 256)
    second = engine.run(other, 300)  # a load of another request is tried
    assert engine.claims.get(second, [(256, 0)])[0][0] == (256 if caching else 0)
    sim.check_store()


def test_a_failed_save_is_not_stored_and_made_up_for_later(sim: Sim) -> None:
    text = sim.text(12)
    engine = sim.engine(tp=2, budget=500)
    engine.fail_copies(1, 1, "save")
    engine.run(text, 300, 1)
    assert sim.stored(text, 256) == [False] * 4  # they were one transfer
    engine.scheduler.reset_prefix_cache()
    engine.run(text, 300, 1)
    assert sim.stored(text, 256) == [True] * 4
    sim.check_store()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_rank_that_cannot_reach_the_region_leaves_no_slot_in_use(
    sim: Sim, asynchronous: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = sim.text(13)
    engine = sim.engine(tp=2, caching=False, asynchronous=asynchronous)
    with monkeypatch.context() as patch:
        patch.setattr(engine.ranks[1].side, "_attach", lambda ref: 1 / 0)
        for seed in range(14, 17):
            name = engine.run(sim.text(seed), 300, 3)
            assert engine.requests[name].get_finished_reason().name == "LENGTH"
    engine.stager.poll()
    slots = engine.stager.snapshot()["slots"]
    assert (slots["limbo"], slots["filling"], slots["pinned"]) == (0, 0, 0)
    assert engine.stager.snapshot()["save_errors"] == {"void": 12}
    assert sim.check_store() == 0
    engine.run(text, 300, 3)  # the rank can reach it again
    assert sim.stored(text, 256) == [True] * 4
    sim.check_store()


# -- stores --------------------------------------------------------------------------------------------------------


def test_an_engine_that_only_waits_takes_few_steps(sim: Sim, store_fault: Callable[..., None]) -> None:
    text = sim.text(20)
    sim.engine().run(text, 300, 1)
    store_fault(get_into={"delay": 0.6})
    engine = sim.engine()
    name = engine.add(text, 300)
    start, steps = time.monotonic(), engine.steps
    engine.until(lambda: engine.loading(name) or engine.finished(name))
    seconds = time.monotonic() - start
    assert seconds > 0.5
    assert engine.steps - steps <= 250 * seconds + 1
    engine.until(lambda: engine.finished(name))
    assert engine.loaded(name) == 256
    assert engine.stats("idle_steps") > 50


def test_waiting_for_the_store_holds_up_nobody_else(sim: Sim, store_fault: Callable[..., None]) -> None:
    text, other = sim.text(21), sim.text(22)
    sim.engine().run(text, 300, 1)
    store_fault(get_into={"hang": True})
    engine = sim.engine(options={"load_deadline_ms": 60_000})
    waiting = engine.add(text, 300)
    running = engine.add(other, 60, 100)
    engine.until(lambda: engine.finished(running))
    assert not engine.finished(waiting)
    assert engine.steps < 200
    engine.abort(waiting)
    engine.step()
    assert not engine.scheduler.has_requests()


def test_a_store_slower_than_the_deadline_is_a_miss(sim: Sim, store_fault: Callable[..., None]) -> None:
    text = sim.text(23)
    sim.engine().run(text, 300, 1)
    store_fault(get_into={"hang": True})
    engine = sim.engine(options={"load_deadline_ms": 200})
    start = time.monotonic()
    name = engine.add(text, 300)
    engine.until(lambda: engine.finished(name))
    assert 0.2 <= time.monotonic() - start < 5
    assert engine.loaded(name) == 0
    assert engine.stager.snapshot()["lookups"] == {"deadline": 1}


def test_a_store_that_vanishes_is_missed_and_filled_again(sim: Sim) -> None:
    text = sim.text(24)
    engine = sim.engine(caching=False)
    engine.run(text, 300, 1)
    shutil.rmtree(sim.store)
    other = sim.engine(caching=False)
    assert other.loaded(other.run(text, 300)) == 0
    assert sim.check_store() == 4
    # The first engine still has all of it in memory.
    assert engine.loaded(engine.run(text, 300)) == 256


def test_a_full_or_forbidden_store_saves_nothing_and_serves(sim: Sim, store_fault: Callable[..., None]) -> None:
    store_fault(put={"error": "full"})
    engine = sim.engine(caching=False)
    for seed in range(30, 33):
        engine.run(sim.text(seed), 200, 3)
    assert sim.check_store() == 0
    assert engine.stager.snapshot()["save_errors"] == {"full": 3}  # and no more were tried
    assert engine.stats("save-store-full", "skips") == 6


def test_a_store_under_a_limit_keeps_what_was_used_last_and_answers_stay_right(sim: Sim) -> None:
    size = sim.engine().stager.plan.layouts[0].nbytes
    limit = 10 * size
    engine = sim.engine(caching=False, options={"max_bytes": limit, "never_slower": False})
    for seed in (30, 31, 30, 32, 30, 33):
        engine.run(sim.text(seed), 200, 3)  # three chunks each
        engine.connector.reset_cache()  # what is read from memory is not noted as used
        assert sum(path.stat().st_size for path in sim.store.rglob("*") if path.is_file()) <= limit + 4096
    assert sim.stored(sim.text(30), 192) == [True] * 3
    assert sim.stored(sim.text(33), 192) == [True] * 3
    assert sim.check_store() == 9
    engine.step()
    assert engine.stats("evictions") == 3


def test_a_limit_of_less_than_a_chunk_is_refused(sim: Sim) -> None:
    with pytest.raises(
        ConfigError, match=r"'max_bytes' 1 KiB is less than one chunk of this model, .* lower 'chunk_tokens'"
    ):
        sim.engine(options={"max_bytes": "1KiB"})


def files_of(sim: Sim) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in sim.store.rglob("*") if path.is_file()}


def left_alone(
    sim: Sim, engine: SimEngine, texts: Sequence[Text], before: dict[Path, bytes], caplog: pytest.LogCaptureFixture
) -> set[str]:
    """Requests are answered without the store, which stays as it was; what the log says of that."""
    for text in (*texts, *texts):
        name = engine.run(text, 300, 2)
        assert engine.loaded(name) == 0
        assert engine.requests[name].get_finished_reason().name == "LENGTH"
        engine.connector.reset_cache()  # what it has computed itself is right, and served from memory
    assert files_of(sim) == before
    counted = engine.stager.snapshot()
    assert set(counted["load_errors"]) == set(counted["save_errors"]) == {"namespace-differs"}
    assert counted["verification_failures"] == 0  # nothing is damaged
    said = {record.getMessage() for record in caplog.records if "namespace-differs" in record.getMessage()}
    assert len(said) == 2  # loads and saves
    return said


def test_a_store_that_turns_out_to_be_kept_in_another_way_is_left_alone(
    sim: Sim, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its digests are keyed, and it could not be reached when a server without the key started."""
    (tmp_path / "key").write_text("sixteen bytes or more")
    text, other = sim.text(70), sim.text(71)
    keyed = sim.engine(options={"secret_key_file": str(tmp_path / "key")})
    keyed.run(text, 300, 1)

    def unreachable(*_: Any) -> None:
        raise Unavailable("made up")

    with monkeypatch.context() as patch:
        patch.setattr("tplayout_vllm.store_look.read_namespace", unreachable)
        engine = sim.engine(caching=False)
    before = files_of(sim)
    said = left_alone(sim, engine, (text, other), before, caplog)
    for part in ("loads", "saves"):
        assert engine.stager.health[part].startswith("suspended (namespace-differs)")
    assert engine.stats("save-store-namespace-differs", "skips") > 0
    assert all("storage.digest: ours 'xxh3-128', theirs 'blake3-keyed'; restart this server" in line for line in said)


@pytest.mark.parametrize("server", ["another key", "no key", "a key where nothing is encrypted"])
def test_another_encryption_key_is_a_miss(
    sim: Sim, tmp_path: Path, caplog: pytest.LogCaptureFixture, server: str
) -> None:
    """[M47] The server starts and goes on, takes nothing of the store and puts nothing into it, and says so."""
    for name in ("ours", "theirs"):
        (tmp_path / name).write_text(name.encode().hex().ljust(64, "0"))
    theirs, ours = ({"encryption_key_file": str(tmp_path / name)} for name in ("theirs", "ours"))
    text, other = sim.text(70), sim.text(71)
    sim.engine(options={} if server == "a key where nothing is encrypted" else theirs).run(text, 300, 1)
    before = files_of(sim)
    engine = sim.engine(caching=False, options={} if server == "no key" else ours)
    assert sum("serving WITHOUT it" in record.getMessage() for record in caplog.records) == 1
    said = left_alone(sim, engine, (text, other), before, caplog)
    assert all("storage.encryption_key_id" in line or "storage.codec" in line for line in said)


@pytest.mark.parametrize("damage", [lambda data: data[:-1], lambda data: data[:9000] + b"x" + data[9001:]])
def test_a_damaged_object_ends_the_prefix_and_is_replaced(sim: Sim, damage: Callable[[bytes], bytes]) -> None:
    text = sim.text(40)
    sim.engine().run(text, 300, 1)
    hurt = sim.path(text, 2)
    hurt.write_bytes(damage(hurt.read_bytes()))
    engine = sim.engine()
    name = engine.run(text, 300)
    assert engine.loaded(name) == 128
    assert engine.stager.snapshot()["verification_failures"] == 1
    assert sim.check_store() == 4


def test_an_object_of_a_terabyte_is_a_miss_and_takes_no_memory(sim: Sim) -> None:
    """A hole, with the right beginning."""
    text = sim.text(43)
    sim.engine().run(text, 300, 1)
    os.truncate(sim.path(text, 2), 2**40)
    engine = sim.engine()
    name = engine.run(text, 300)
    assert engine.loaded(name) == 128
    assert engine.stager.snapshot()["verification_failures"] == 1
    for pid in engine.stager._pool.io.pids:
        (peak,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("VmHWM"))
        assert int(peak.split()[1]) < 200 * 1024
    assert sim.check_store() == 4  # stored again


def test_a_killed_io_process_costs_a_hit_at_most(sim: Sim) -> None:
    text = sim.text(41)
    sim.engine().run(text, 300, 1)
    engine = sim.engine()
    for pid in engine.stager._pool.io.pids:
        os.kill(pid, signal.SIGKILL)
    name = engine.run(text, 300)
    assert engine.loaded(name) in (0, 256)
    engine.run(sim.text(42), 200, 1)
    sim.check_store()


def test_resets_in_the_middle_of_everything(sim: Sim) -> None:
    """Weights are not changed here: what is read again from the store is still right."""
    texts = [sim.text(50 + i) for i in range(3)]
    engine = sim.engine(delayed=True, tp=2, seqs=4)
    for text in texts:
        engine.run(text, 250, 1)
    names = [engine.add(text, 300, 20) for text in texts * 2]
    for turn in range(60):
        engine.step()
        engine.flush()
        if turn % 5 == 0 and not any(map(engine.loading, names)):  # vLLM itself does not reset in the middle of loads
            engine.scheduler.reset_prefix_cache(reset_running_requests=True, reset_connector=True)
    engine.until(lambda: all(map(engine.finished, names)))
    engine.settle()
    assert pinned(engine) == 0
    sim.check_store()


def test_requests_that_cannot_be_keyed_are_neither_stored_nor_loaded(sim: Sim) -> None:
    text = sim.text(60)
    engine = sim.engine()
    engine.run(text, 300, 2, prompt_embeds=torch.zeros(300, 4))
    assert sim.check_store() == 0
    assert engine.stats("request-prompt-embeds", "skips") == 1
