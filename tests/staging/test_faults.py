"""The Stager against a store that is damaged, slow, hanging, full or gone, and against a pool that is too small."""

import logging
import os
import time

import pytest


def flip(path, offset=-5000):
    """Flip one bit of a stored object."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


def test_a_damaged_object_is_a_miss_reported_once_not_loaded_again_and_not_deleted(world, caplog):
    stager = world.stager(negative_cache_s=0.5)
    chunks = world.chunks(3)
    world.store_only(stager, chunks)
    flip(world.path(chunks[1]))
    for _ in range(3):
        stager.start_lookup("r", chunks)
        state = world.finish(stager, "r")
        assert (state.ready, state.reason) == (1, "damaged")
        stager.release("r")
    assert stager.snapshot()["verification_failures"] == 1
    assert world.path(chunks[1]).exists()
    time.sleep(0.5)
    stager.start_lookup("r", chunks)
    world.finish(stager, "r")
    assert stager.snapshot()["verification_failures"] == 2
    assert caplog.text.count("damaged object") == 1
    assert world.path(chunks[1]).name in caplog.text


def test_a_damaged_object_is_replaced_when_its_chunk_is_computed_again(world):
    stager = world.stager()
    chunks = world.chunks(2)
    world.store_only(stager, chunks)
    flip(world.path(chunks[0]))
    stager.start_lookup("r", chunks)
    assert world.finish(stager, "r").ready == 0
    stager.release("r")
    world.save(stager, chunks[:1])
    stager._pool.table.forget_all()
    stager.start_lookup("r", chunks)
    assert world.finish(stager, "r").ready == 2


@pytest.mark.parametrize("damage", ["truncated", "empty", "longer", "other name", "header"])
def test_every_kind_of_damage_is_a_miss(world, damage):
    stager = world.stager()
    chunks = world.chunks(2)
    world.store_only(stager, chunks)
    path, other = world.path(chunks[0]), world.path(chunks[1])
    data = path.read_bytes()
    changed = {"truncated": data[:-1], "empty": b"", "longer": data + b"\0", "other name": other.read_bytes(),
               "header": b"\xff" * 8 + data[8:]}  # fmt: skip
    path.write_bytes(changed[damage])
    stager.start_lookup("r", chunks)
    state = world.finish(stager, "r")
    assert (state.ready, state.reason) == (0, "damaged")
    assert stager.snapshot()["verification_failures"] == 1


def test_an_object_that_is_no_file_costs_a_miss_not_a_hang(world):
    stager = world.stager(timeout_s=1.0)
    chunks = world.chunks(2)
    world.store_only(stager, chunks)
    path = world.path(chunks[0])
    path.unlink()
    os.mkfifo(path)
    stager.start_lookup("r", chunks)
    state = world.finish(stager, "r")
    assert (state.ready, state.reason) == (0, "error: forbidden")  # and no deadline


def test_with_a_hanging_store_a_lookup_ends_at_its_deadline_with_what_it_has(world):
    stager = world.faulty_stager(load_deadline_s=1.0, timeout_s=30.0)
    chunks = world.chunks(3)
    world.store_only(stager, chunks)
    stager.start_lookup("first", chunks[:1])
    world.finish(stager, "first")
    world.fail(get_into={"hang": True})
    stager.start_lookup("r", chunks)
    time.sleep(0.2)
    started = time.monotonic()
    assert not stager.lookup("r").done
    while not stager.lookup("r").done:
        stager.wait(0.005)
    assert 0.95 < time.monotonic() - started < 5  # and not the store's 30 s
    state = stager.lookup("r")
    assert (state.ready, state.reason) == (1, "deadline")
    ref = stager.claim("r", 0, 1)[0]
    assert world.cells(stager, ref) == world.expected(chunks[0])


def test_what_a_request_has_waited_for_one_lookup_counts_for_the_next(world):
    """The windows of a prefix, which are looked up behind the rest of it."""
    stager = world.faulty_stager(load_deadline_s=1.0, timeout_s=30.0)
    chunks = world.chunks(3)
    world.store_only(stager, chunks)
    world.fail(get_into={"hang": True})
    stager.start_lookup("r", chunks[:1])
    started = time.monotonic()
    assert world.finish(stager, "r").reason == "deadline"
    for chunk in chunks[1:]:
        stager.start_lookup("tail", [chunk], behind="r")
        assert world.finish(stager, "tail").reason == "deadline"
        stager.release("tail")
    assert time.monotonic() - started < 1.9


def test_a_hanging_store_delays_three_requests_not_all_until_its_timeout(world):
    stager = world.faulty_stager(load_deadline_s=0.2, timeout_s=30.0)
    chunks = world.chunks(1)
    world.store_only(stager, chunks)
    world.fail(get_into={"hang": True})
    reasons = []
    for _ in range(5):
        stager.start_lookup("r", chunks)
        reasons.append(world.finish(stager, "r").reason)
        stager.release("r")
    assert reasons == ["deadline"] * 3 + ["store-suspended"] * 2
    world.wait_until(lambda: stager.poll() or stager.health["loads"] == "ok")


def test_a_process_whose_operations_never_return_is_replaced(world, monkeypatch):
    monkeypatch.setenv("TPLAYOUT_TEST_STUCK_S", "0.1")
    stager = world.faulty_stager(load_deadline_s=0.2, timeout_s=0.1, slots=2)
    chunks = world.chunks(2)
    world.store_only(stager, chunks)
    world.fail(get_into={"hang": True})
    stager.start_lookup("r", chunks)
    assert world.finish(stager, "r").reason == "deadline"
    stager.release("r")
    assert stager.snapshot()["slots"]["loading"] == 2
    world.fail()
    world.settle(stager)
    assert stager.snapshot()["io_restarts"] == 1
    assert stager.snapshot()["slots"]["free"] == 2
    world.wait_until(lambda: stager.poll() or stager._pool.io.pids)
    stager.start_lookup("r", chunks)
    assert world.finish(stager, "r").ready == 2


@pytest.mark.parametrize("kind", ["timeout", "unavailable", "forbidden"])
def test_a_store_that_fails_is_left_alone_and_tried_again_by_itself(world, caplog, kind):
    caplog.set_level(logging.WARNING)
    stager = world.faulty_stager()
    chunks = world.chunks(1)
    world.store_only(stager, chunks)
    world.fail(get_into={"error": kind}, get={"error": kind})
    for number in range(3):
        stager.start_lookup(f"r{number}", chunks)
        assert world.finish(stager, f"r{number}").reason == f"error: {kind}"
    for _ in range(5):
        stager.start_lookup("r", chunks)
        assert stager.lookup("r").reason == "store-suspended"
        stager.release("r")
    assert stager.health["loads"].startswith(f"suspended ({kind})")
    assert stager.health["saves"] == "ok"
    assert stager.snapshot()["load_errors"] == {kind: 3}
    world.fail()
    world.wait_until(lambda: stager.poll() or stager.health["loads"] == "ok")
    stager.start_lookup("r", chunks)
    assert world.finish(stager, "r").ready == 1
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


def test_when_the_disk_is_full_saving_stops_loading_goes_on_and_saving_resumes(world):
    stager = world.faulty_stager()
    chunks = world.chunks(6)
    world.save(stager, chunks[:1])
    world.fail(put={"error": "full"})
    for chunk in chunks[1:4]:
        world.fill(stager, stager.begin_save(chunk), chunk.key)
    world.settle(stager)
    assert stager.health["saves"].startswith("suspended (full)")
    assert stager.begin_save(chunks[4]) is None
    assert stager.snapshot()["save_skips"] == {"store-full": 1}
    assert stager.snapshot()["save_errors"] == {"full": 3}
    stager.start_lookup("r", chunks)
    state = world.finish(stager, "r")
    assert (state.ready, state.reason) == (4, "miss")
    world.fail()
    time.sleep(1.1)
    ref = stager.begin_save(chunks[4])
    assert stager.begin_save(chunks[5]) is None
    world.fill(stager, ref, chunks[4].key)
    world.settle(stager)
    assert stager.health["saves"] == "ok"
    assert stager.begin_save(chunks[1]) is None
    world.settle(stager)
    assert world.path(chunks[1]).exists()


def test_a_store_that_may_not_be_asked_is_written_to_all_the_same(world):
    stager = world.faulty_stager()
    world.fail(exists={"error": "forbidden"})
    chunk = world.chunks(1)[0]
    world.save(stager, [chunk])
    assert world.path(chunk).exists()


def test_an_error_that_is_a_bug_is_a_miss_too(world):
    stager = world.faulty_stager()
    world.fail(get_into={"error": "no such kind"}, put={"error": "no such kind"})
    chunks = world.chunks(2)
    stager.start_lookup("r", chunks[:1])
    assert world.finish(stager, "r").reason == "error: internal"
    world.save(stager, chunks[1:])
    assert stager.snapshot()["save_errors"] == {"internal": 1}
    assert stager.health == {"loads": "ok", "saves": "ok", "io": "ok"}


@pytest.mark.parametrize("verb", ["get_into", "put"])
def test_errors_of_single_objects_are_one_line_not_one_a_chunk(world, caplog, verb):
    stager = world.faulty_stager(slots=8)
    chunks = world.chunks(6)
    if verb == "get_into":
        world.save(stager, chunks)
        stager.reset()
    world.fail(**{verb: {"error": "invalid-name"}})
    if verb == "put":
        world.save(stager, chunks)
    for number, chunk in enumerate(chunks if verb == "get_into" else ()):
        stager.start_lookup(str(number), [chunk])
        assert world.finish(stager, str(number)).ready == 0
    assert [record.getMessage() for record in caplog.records if "failed: " in record.getMessage()] == [
        f"tplayout: a {'load' if verb == 'get_into' else 'save'} failed: invalid-name: made up"
    ]
    errors = stager.snapshot()["load_errors" if verb == "get_into" else "save_errors"]
    assert errors == {"invalid-name": 6}


def test_a_prefix_larger_than_the_pool_is_had_as_far_as_it_fits(world):
    stager = world.stager(slots=4, slot_wait_s=30.0, load_deadline_s=30.0)
    chunks = world.chunks(6)
    for chunk in chunks:
        world.save(stager, [chunk])
    stager.start_lookup("r", chunks)
    state = world.finish(stager, "r")
    assert (state.ready, state.reason) == (4, "no-slot")
    for ref, chunk in zip(stager.claim("r", 0, 4), chunks, strict=False):
        assert world.cells(stager, ref) == world.expected(chunk)


def test_a_deep_queue_is_not_looked_at_in_every_step(world, monkeypatch):
    """Thousands of requests that nobody asks about yet, as while the engine is full."""
    stager = world.stager(slots=8, loads_in_flight=4)
    shared = world.chunks(2, seed=999)
    world.save(stager, shared)
    for number in range(3000):
        stager.start_lookup(f"r{number}", shared if number % 2 else world.chunks(2, seed=number))
    world.settle(stager)
    tried = []
    real = stager._lookups._loads.stage
    monkeypatch.setattr(stager._lookups._loads, "stage", lambda *args: tried.append(args) or real(*args))
    for _ in range(10):
        stager.poll()
    assert len(tried) <= 10 * 2 * 64
    tried.clear()
    for name in ("r2999", "r2998"):  # in memory; and not stored
        world.finish(stager, name)
    assert stager.lookup("r2999").ready == 2
    assert stager.lookup("r2998").reason == "miss"
    for number in range(3000):
        stager.release(f"r{number}")
    assert stager.snapshot()["slots"]["pinned"] == 0
    books = stager._lookups
    assert [len(book) for book in (books._asked, books._unasked, books._open, books._holders)] == [0, 0, 0, 0]


def test_two_lookups_that_compete_for_the_pool_both_end(world):
    stager = world.faulty_stager(slots=4, slot_wait_s=0.1, load_deadline_s=30.0)
    ours, theirs = world.chunks(4), world.chunks(4, seed=1)
    for chunk in ours + theirs:
        world.store_only(stager, [chunk])
    world.fail(get_into={"delay": 0.02})
    stager.start_lookup("ours", ours)
    stager.start_lookup("theirs", theirs)

    def both():
        states = stager.lookup("ours"), stager.lookup("theirs")
        return states if all(state.done for state in states) else None

    first, second = world.wait_until(both)
    assert first.ready + second.ready == 4
    assert {first.reason, second.reason} <= {"no-slot", "complete"}
    stager.release("ours")
    stager.release("theirs")
    stager.start_lookup("ours", ours)
    assert world.finish(stager, "ours").ready == 4


def test_a_long_step_of_the_engine_is_not_counted_against_a_fast_store(world):
    stager = world.stager(loads_in_flight=1, load_deadline_s=0.2)
    chunks = world.chunks(3)
    world.store_only(stager, chunks)
    stager.start_lookup("r", chunks)
    for ready in (0, 1, 2):
        assert stager.lookup("r").ready == ready
        time.sleep(0.3)
    assert stager.lookup("r").ready == 3


def test_a_long_step_of_the_engine_is_no_excuse_for_a_hanging_store(world):
    stager = world.faulty_stager(loads_in_flight=1, load_deadline_s=0.2)
    world.fail(get_into={"hang": True})
    for name, seed in (("a", 0), ("b", 1)):
        stager.start_lookup(name, world.chunks(3, seed))
        stager.lookup(name)
    time.sleep(0.3)
    assert [stager.lookup(name).reason for name in "ab"] == ["deadline", "deadline"]


def test_nobody_waits_longer_than_chunks_are_worth_and_the_store_is_not_blamed(world):
    stager = world.faulty_stager(load_deadline_s=30.0)
    chunks = world.chunks(3)
    world.store_only(stager, chunks)
    world.fail(get_into={"delay": 2.5})
    stager.start_lookup("r", chunks)
    begin = time.monotonic()
    while not (state := stager.lookup("r", worth=0.1)).done:
        stager.wait(0.01)
    assert 0.25 < time.monotonic() - begin < 2.4
    assert (state.ready, state.reason) == (0, "too-slow")
    assert stager.health["loads"] == "ok"
    world.settle(stager)  # what was under way ends in host memory, for whoever comes next
    stager.start_lookup("next", chunks)
    assert stager.lookup("next", worth=0.1).ready > 0


def test_a_store_that_was_slow_is_not_waited_for_but_when_it_is_worth_it(world):
    stager = world.faulty_stager(load_deadline_s=30.0, load_threads=1)
    first, second, third = (world.chunks(2, seed) for seed in range(3))
    world.store_only(stager, first + second + third)
    world.fail(get_into={"delay": 0.5})
    stager.start_lookup("first", first)
    assert world.finish(stager, "first").ready == 2  # 0.5 s a chunk, as is known now
    stager.start_lookup("second", second)
    state = stager.lookup("second", worth=0.1)
    assert (state.done, state.ready, state.reason) == (True, 0, "too-slow")
    stager.start_lookup("third", third)
    assert not stager.lookup("third", worth=3.0).done
    assert world.finish(stager, "third").ready == 2


def test_a_store_that_is_fast_again_is_found_out(world):
    """Nobody waits for it, but each lookup loads one chunk all the same."""
    stager = world.faulty_stager(load_deadline_s=30.0, load_threads=1, slots=64)
    chains = [world.chunks(2, seed) for seed in range(30)]
    for chunks in chains:
        world.store_only(stager, chunks)
    world.fail(get_into={"delay": 1.0})
    stager.start_lookup("slow", chains[0])
    world.finish(stager, "slow")
    world.fail()
    for number, chunks in enumerate(chains[1:], 1):
        stager.start_lookup(f"r{number}", chunks)
        while not (state := stager.lookup(f"r{number}", worth=0.1)).done:
            stager.wait(0.01)
        world.settle(stager)
        if state.ready == 2:
            break
    assert state.ready == 2
    assert number > 2


def test_lookups_take_turns(world):
    stager = world.faulty_stager(slots=32, loads_in_flight=1, load_deadline_s=30.0)
    ours, theirs = world.chunks(8), world.chunks(2, seed=1)
    world.store_only(stager, ours + theirs)
    world.fail(get_into={"delay": 0.02})
    stager.start_lookup("long", ours)
    stager.start_lookup("short", theirs)
    world.finish(stager, "short")
    assert stager.lookup("long").ready <= 4
    assert world.finish(stager, "long").ready == 8


def test_lookups_that_were_never_asked_about_give_way_the_last_one_first(world):
    stager = world.stager(slots=4, unasked_s=60.0)
    chains = [world.chunks(2, seed) for seed in range(3)]
    for chunks in chains:
        world.store_only(stager, chunks)
    for name, chunks in zip("abc", chains, strict=True):
        stager.start_lookup(name, chunks)
    world.settle(stager)
    assert stager.lookup("c").ready == 0
    assert world.finish(stager, "c").ready == 2
    assert stager.lookup("a").ready == 2
    assert world.finish(stager, "b").reason == "no-slot"


def test_a_lookup_nobody_asks_about_gives_way_and_is_staged_again_when_asked(world):
    stager = world.stager(slots=3, unasked_s=0.1)
    waiting, needy = world.chunks(3), world.chunks(3, seed=1)
    world.save(stager, waiting)
    world.save(stager, needy)
    stager.start_lookup("waiting", waiting)
    assert world.finish(stager, "waiting").ready == 3
    time.sleep(0.15)
    stager.start_lookup("needy", needy)
    assert world.finish(stager, "needy").ready == 3
    assert not stager.lookup("waiting").done
    stager.release("needy")
    state = world.finish(stager, "waiting")
    assert (state.ready, state.reason) == (3, "complete")
    for ref, chunk in zip(stager.claim("waiting", 0, 3), waiting, strict=True):
        assert world.cells(stager, ref) == world.expected(chunk)


def test_a_cancelled_load_that_is_wanted_again_is_loaded_again(world):
    stager = world.faulty_stager(load_threads=1)
    chunks = world.chunks(4)
    world.store_only(stager, chunks)
    world.fail(get_into={"delay": 0.1})
    stager.start_lookup("a", chunks)
    stager.cancel("a")
    stager.start_lookup("b", chunks)
    state = world.finish(stager, "b")
    assert (state.ready, state.reason) == (4, "complete")
    for ref, chunk in zip(stager.claim("b", 0, 4), chunks, strict=True):
        assert world.cells(stager, ref) == world.expected(chunk)


def test_cancelled_loads_that_have_not_begun_are_skipped(world):
    stager = world.faulty_stager(load_threads=1, loads_in_flight=8, slots=16)
    chunks = world.chunks(8)
    world.store_only(stager, chunks)
    world.fail(get_into={"delay": 0.1})
    stager.start_lookup("a", chunks)
    time.sleep(0.05)
    stager.release("a")
    world.settle(stager)
    assert stager.snapshot()["loads"] <= 2
    assert stager.snapshot()["slots"]["pinned"] == 0


def test_saves_that_a_slow_store_holds_up_leave_slots_to_load_into(world):
    stager = world.faulty_stager()
    stored, chunks = world.chunks(1), world.chunks(8, seed=1)
    world.store_only(stager, stored)
    world.fail(put={"hang": True})
    refs = [(stager.begin_save(chunk), chunk) for chunk in chunks]
    assert [ref is not None for ref, _ in refs] == [True] * 6 + [False] * 2
    for ref, chunk in refs[:6]:
        world.fill(stager, ref, chunk.key)
    stager.start_lookup("r", stored)
    assert world.finish(stager, "r").ready == 1
    assert stager.snapshot()["save_skips"] == {"backlog": 2}


def test_when_all_slots_are_in_use_saving_is_skipped_until_one_comes_back(world):
    stager = world.stager(slots=2)
    chunks = world.chunks(3)
    world.save(stager, chunks[:1])
    stager.start_lookup("r", chunks[:1])
    world.finish(stager, "r")
    stager.claim("r", 0, 1)
    ref = stager.begin_save(chunks[1])
    assert stager.begin_save(chunks[2]) is None
    assert stager.snapshot()["save_skips"] == {"no-slot": 1}
    world.fill(stager, ref, chunks[1].key)
    world.wait_until(lambda: stager.poll() or stager.snapshot()["saves"] == 2)
    assert stager.begin_save(chunks[2]) is not None
