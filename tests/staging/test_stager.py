"""The Stager with real I/O processes on a real directory: what it is for, when all goes well."""

import time

import pytest

from tplayout.cache.codec import make_codec
from tplayout.errors import ConfigError
from tplayout.format.chunk import verify
from tplayout.format.encryption_key import EncryptionKey
from tplayout.staging.slots import SlotRef


def test_ranks_save_through_the_region_and_another_server_loads_the_same_bytes(world):
    saver = world.stager()
    ranks = world.ranks(saver)
    chunks = world.chunks(3)
    refs = [saver.begin_save(chunk) for chunk in chunks]
    for ref, chunk in zip(refs, chunks, strict=True):
        ranks.write(ref, chunk.key)
    world.settle(saver)
    for chunk in chunks:
        layout = saver.plan.layouts[0]
        verify(world.path(chunk).read_bytes(), layout, saver.plan.namespace, chunk.key, saver.plan.hasher)
    saver.close()

    loader = world.stager()
    loader.start_lookup("r", chunks)
    state = world.finish(loader, "r")
    assert (state.ready, state.reason) == (3, "complete")
    for ref, chunk in zip(loader.claim("r", 0, 3), chunks, strict=True):
        assert world.cells(loader, ref) == world.expected(chunk)
    loader.release("r")
    sums = loader.snapshot()
    assert sums["loads"] == 3
    assert sums["load_bytes"] == 3 * loader.plan.layouts[0].nbytes
    assert sums["slots"]["clean"] == 3
    assert sums["slots"]["pinned"] == 0


def test_files_are_private(world):
    stager = world.stager()
    chunk = world.chunks(1)[0]
    world.save(stager, [chunk])
    assert world.path(chunk).stat().st_mode & 0o777 == 0o600
    assert world.path(chunk).parent.stat().st_mode & 0o777 == 0o700


def test_a_lookup_ends_at_the_first_miss(world):
    stager = world.stager()
    chunks = world.chunks(5)
    world.store_only(stager, [chunks[0], chunks[1], chunks[3], chunks[4]])
    stager.start_lookup("r", chunks)
    state = world.finish(stager, "r")
    assert (state.ready, state.reason) == (2, "miss")
    assert stager.snapshot()["lookups"] == {"miss": 1}


def test_what_is_in_memory_needs_no_store(world):
    stager = world.stager()
    chunks = world.chunks(2)
    world.save(stager, chunks)
    for chunk in chunks:
        world.path(chunk).unlink()
    stager.start_lookup("r", chunks)
    state = stager.lookup("r")
    assert (state.ready, state.done) == (2, True)
    assert stager.snapshot()["loads"] == 0


def test_a_chunk_that_is_being_saved_becomes_ready_without_the_store(world):
    stager = world.stager()
    chunk = world.chunks(1)[0]
    ref = stager.begin_save(chunk)
    stager.start_lookup("r", [chunk])
    assert not stager.lookup("r").done
    world.fill(stager, ref, chunk.key)
    assert world.finish(stager, "r").ready == 1
    assert stager.claim("r", 0, 1) == [ref]
    assert stager.snapshot()["loads"] == 0


def test_lookups_share_a_load(world):
    stager = world.stager()
    chunks = world.chunks(2)
    world.store_only(stager, chunks)
    for name in ("a", "b", "c"):
        stager.start_lookup(name, chunks)
    assert [world.finish(stager, name).ready for name in ("a", "b", "c")] == [2, 2, 2]
    assert stager.snapshot()["loads"] == 2


def test_groups_are_saved_and_loaded_apart(world, two_groups):
    saver = world.stager(geometry=two_groups)
    chunks = world.chunks(3)
    world.save(saver, chunks[:1], groups=[0])
    world.save(saver, chunks[1:])
    assert not world.path(chunks[0], 1).exists()
    saver.close()

    loader = world.stager(geometry=two_groups)
    loader.start_lookup("all", chunks)
    assert world.finish(loader, "all").reason == "miss"
    loader.start_lookup("r", chunks, lambda position: (0, 1) if position else (0,))
    assert world.finish(loader, "r").ready == 3
    refs = loader.claim("r", 0, 3)
    assert [ref.groups for ref in refs] == [(0,), (0, 1), (0, 1)]
    assert world.cells(loader, refs[2], 1) == world.expected(chunks[2], 1, two_groups)
    ref = loader.begin_save(chunks[0])
    assert ref.groups == (1,)
    assert ref.slot == refs[0].slot
    world.fill(loader, ref, chunks[0].key)
    world.settle(loader)
    assert world.path(chunks[0], 1).exists()
    assert world.cells(loader, refs[0]) == world.expected(chunks[0], 0, two_groups)


def test_stored_chunks_are_not_saved_again(world):
    stager = world.stager()
    chunks = world.chunks(3)
    world.save(stager, chunks[:1])
    assert stager.begin_save(chunks[0]) is None
    ref = stager.begin_save(chunks[1])
    assert stager.begin_save(chunks[1]) is None
    world.fill(stager, ref, chunks[1].key)
    world.settle(stager)
    stager.reset()
    stager.start_lookup("r", chunks)
    world.finish(stager, "r")
    assert stager.begin_save(chunks[0]) is None
    assert stager.snapshot()["save_skips"] == {"already-stored": 2, "in-flight": 1}


def test_all_is_published_though_nobody_reads_the_answers(world):
    """An engine that idles polls nothing, and a socket holds the answers of some hundred jobs."""
    stager = world.stager(slots=800)
    chunks = world.chunks(600)
    refs = [stager.begin_save(chunk) for chunk in chunks]
    world.settle_sending(stager)
    for ref, chunk in zip(refs, chunks, strict=True):
        world.fill(stager, ref, chunk.key)
    world.wait_until(lambda: all(world.path(chunk).exists() for chunk in chunks), 60, 0.2)
    world.settle(stager)
    assert stager.snapshot()["saves"] == len(chunks)


def test_a_long_queue_leaves_slots_for_what_is_computed_meanwhile(world):
    stager = world.stager(slots=8)
    stored = [world.chunks(4, seed) for seed in (1, 2, 3)]
    for chunks in stored:
        world.store_only(stager, chunks)
    for name, chunks in zip("abc", stored, strict=True):
        stager.start_lookup(name, chunks)
    world.settle(stager)
    assert stager.snapshot()["loads"] == 6
    world.save(stager, world.chunks(2, 4))
    for name in "abc":  # once somebody waits for them there is no reserve
        assert world.finish(stager, name).ready == 4
        stager.release(name)


def test_what_was_removed_by_others_is_saved_again_after_a_while(world):
    """Also by a server that looks nothing up, one that only saves."""
    now = [0.0]
    stager = world.stager(clock=lambda: time.monotonic() + now[0])
    chunk = world.chunks(1)[0]
    world.store_only(stager, [chunk])
    world.path(chunk).unlink()
    world.save(stager, [chunk])
    world.path(chunk).unlink()
    assert stager.begin_save(chunk) is None
    now[0] = 601.0
    assert stager.begin_save(chunk) is None  # it is in memory: published from there
    world.settle(stager)
    assert world.path(chunk).exists()
    assert stager.snapshot()["save_skips"] == {"already-stored": 1, "published-again": 1}


def test_an_object_that_is_there_already_is_not_written_again(world):
    first, second = world.stager(), world.stager()
    chunk = world.chunks(1)[0]
    world.save(first, [chunk])
    before = world.path(chunk).stat()
    world.save(second, [chunk])
    assert world.path(chunk).stat().st_ino == before.st_ino
    assert second.snapshot()["saves"] == 1
    assert second.snapshot()["save_bytes"] == 0


def test_a_pruned_prefix_is_saved_again(world):
    stager = world.stager()
    chunks = world.chunks(4)
    world.save(stager, chunks)
    for chunk in chunks:
        world.path(chunk).unlink()
    stager._pool.table.forget_all()
    stager.start_lookup("r", chunks)
    assert world.finish(stager, "r").ready == 0
    world.save(stager, chunks)
    assert all(world.path(chunk).exists() for chunk in chunks)


def test_the_namespace_document_is_written_before_the_first_chunk_and_must_be_ours(world):
    document = b'{"hello": "namespace"}\n'
    path = world.store / bytes(range(16)).hex() / "namespace.json"
    stager = world.stager(document=document)
    world.save(stager, world.chunks(1))
    assert path.read_bytes() == document
    other = world.stager(document=b"{}")
    ref = other.begin_save(world.chunks(2)[1])
    world.fill(other, ref, world.chunks(2)[1].key)
    world.settle(other)
    assert other.snapshot()["save_errors"] == {"namespace-differs": 1}
    assert not world.path(world.chunks(2)[1]).exists()


def test_claims_pin_until_release_and_survive_cancel(world):
    stager = world.stager(slots=2)
    chunks = world.chunks(2)
    world.save(stager, chunks)
    stager.start_lookup("r", chunks)
    world.finish(stager, "r")
    claimed = stager.claim("r", 0, 1)
    assert claimed == [SlotRef(claimed[0].slot, claimed[0].generation, (0,))]
    stager.cancel("r")
    assert stager.snapshot()["slots"]["pinned"] == 1
    other = world.chunks(3, seed=1)
    world.save(stager, other[:1])
    refused = stager.begin_save(other[1])
    world.fill(stager, refused, other[1].key)
    assert refused.slot != claimed[0].slot
    assert stager.begin_save(other[2]) is None
    assert world.cells(stager, claimed[0]) == world.expected(chunks[0])
    stager.release("r")
    stager.release("r")
    world.settle(stager)
    assert stager.snapshot()["slots"]["pinned"] == 0
    assert stager.begin_save(other[2]) is not None


def test_wrong_claims_and_names_are_refused(world):
    stager = world.stager()
    chunks = world.chunks(1)
    stager.start_lookup("r", chunks)
    with pytest.raises(ValueError, match="exists"):
        stager.start_lookup("r", chunks)
    world.finish(stager, "r")
    with pytest.raises(ValueError, match="cannot claim"):
        stager.claim("r", 0, 1)
    with pytest.raises(KeyError):
        stager.lookup("other")
    stager.cancel("other")
    stager.start_lookup("none", [])
    assert stager.lookup("none").done


def test_a_void_mark_drops_the_chunk_and_frees_the_slot(world):
    stager = world.stager()
    ranks = world.ranks(stager)
    chunk = world.chunks(1)[0]
    ref = stager.begin_save(chunk)
    ranks.write(ref, chunk.key, [0])
    ranks.write(ref, chunk.key, [1], usable=False)
    world.settle(stager)
    assert not world.path(chunk).exists()
    assert stager.snapshot()["save_errors"] == {"void": 1}
    assert stager.snapshot()["slots"]["free"] == 8


def test_a_group_that_is_saved_again_in_the_same_generation_waits_for_new_marks(world, two_groups):
    stager = world.stager(geometry=two_groups)
    chunk = world.chunks(1)[0]
    world.save(stager, [chunk], groups=[0])
    first = stager.begin_save(chunk)
    for writer in range(2):
        stager.region.mark(first.slot, 1, writer, first.generation, usable=bool(writer))
    world.settle(stager)
    again = stager.begin_save(chunk)
    assert again == first
    assert not stager.region.settled(again.slot, 1, again.generation)
    world.fill(stager, again, chunk.key)
    world.settle(stager)
    assert world.path(chunk, 1).exists()


def test_an_abandoned_save_frees_its_slot_without_marks(world):
    stager = world.stager()
    chunk = world.chunks(1)[0]
    ref = stager.begin_save(chunk)
    stager.start_lookup("r", [chunk])
    stager.abandon_save(ref)
    world.settle(stager)
    assert stager.lookup("r").reason == "save cancelled"
    stager.release("r")
    assert stager.snapshot()["slots"]["free"] == 8
    again = stager.begin_save(chunk)
    assert again.generation > 0
    assert (again.slot, again.generation) != (ref.slot, ref.generation)


def test_a_late_writer_keeps_its_slot_until_it_marks(world):
    stager = world.stager(save_wait_s=0.05, slots=1)
    ranks = world.ranks(stager)
    first, second = world.chunks(2)
    ref = stager.begin_save(first)
    ranks.write(ref, first.key, [0])
    world.settle(stager)
    assert stager.snapshot()["save_errors"] == {"late": 1}
    assert stager.snapshot()["slots"]["limbo"] == 1
    assert stager.begin_save(second) is None
    ranks.write(ref, first.key, [1])
    stager.poll()
    assert stager.begin_save(second) is not None
    assert not world.path(first).exists()


def test_a_late_save_can_be_abandoned_too(world):
    stager = world.stager(save_wait_s=0.02, slots=1)
    ref = stager.begin_save(world.chunks(1)[0])
    world.settle(stager)
    assert stager.snapshot()["slots"]["limbo"] == 1
    stager.abandon_save(ref)
    assert stager.snapshot()["slots"]["free"] == 1


def test_a_part_can_be_given_up_for_a_rank_that_cannot_reach_the_region(world):
    stager = world.stager(slots=1, save_wait_s=0.02)
    chunk = world.chunks(1)[0]
    ref = stager.begin_save(chunk)
    ranks = world.ranks(stager)
    ranks.write(ref, chunk.key, [0])
    world.settle(stager)
    assert stager.snapshot()["slots"]["limbo"] == 1
    stager.give_up_part(ref.slot, ref.generation - 1, 0, 1)  # of another generation: means nothing
    stager.poll()
    assert stager.snapshot()["slots"]["limbo"] == 1
    stager.give_up_part(ref.slot, ref.generation, 0, 1)
    stager.poll()
    assert stager.snapshot()["slots"]["free"] == 1
    world.save(stager, [chunk])  # and the slot is as good as any
    assert world.path(chunk).exists()


def test_an_error_while_a_save_begins_leaves_no_slot_in_use(world, monkeypatch):
    stager = world.stager(slots=1)
    chunk = world.chunks(1)[0]
    with monkeypatch.context() as patch:
        patch.setattr("tplayout.staging.saves.write_info", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            stager.begin_save(chunk)
    assert stager.snapshot()["slots"]["free"] == 1
    world.save(stager, [chunk])
    assert world.path(chunk).exists()


def test_an_idle_engine_waits_at_most_250_times_a_second(world):
    stager = world.stager()
    stager.start_lookup("hanging", world.chunks(1))
    world.finish(stager, "hanging")
    started, returns = time.monotonic(), 0
    while time.monotonic() < started + 0.5:
        assert stager.wait(0.0) is False or returns == 0
        returns += 1
    assert returns <= 0.5 * 250 + 2


def test_wait_returns_as_soon_as_a_lookup_completes(world):
    stager = world.faulty_stager()
    chunks = world.chunks(1)
    world.store_only(stager, chunks)
    world.fail(get_into={"delay": 0.2})
    stager.start_lookup("r", chunks)
    stager.lookup("r")
    started = time.monotonic()
    assert stager.wait(3.0) is True
    assert 0.1 < time.monotonic() - started < 2.9
    assert stager.lookup("r").ready == 1
    assert stager.wait(0.0) is False


def test_options_that_cannot_travel_are_refused_at_once(world):
    with pytest.raises(ConfigError, match="JSON") as caught:
        world.stager(storage_options={"key": b"s3cr3t"})
    assert "s3cr3t" not in str(caught.value)
    for wrong in ({"slots": 0}, {"writers": ()}, {"namespace": b""}):
        with pytest.raises(ConfigError):
            world.stager(**wrong)


def test_reset_forgets_memory_but_not_the_store(world):
    stager = world.stager()
    chunks = world.chunks(2)
    world.store_only(stager, chunks)
    assert stager.snapshot()["slots"]["free"] == 8
    stager.start_lookup("r", chunks)
    assert world.finish(stager, "r").ready == 2
    assert stager.snapshot()["loads"] == 2


def test_a_chunk_whose_load_is_still_unanswered_is_saved(world):
    """The request went on without it: at a miss of an earlier chunk, or at its deadline."""
    stager = world.faulty_stager(timeout_s=30.0)
    chunks = world.chunks(3)
    world.fail(get_into={"hang": True})
    stager.start_lookup("r", chunks)
    stager.lookup("r")
    stager.release("r")
    refs = [stager.begin_save(chunk) for chunk in chunks]
    assert len({ref.slot for ref in refs}) == 3
    for ref, chunk in zip(refs, chunks, strict=True):
        world.fill(stager, ref, chunk.key)
    assert stager.begin_save(chunks[0]) is None
    end = time.monotonic() + 10
    while not all(world.path(chunk).exists() for chunk in chunks):
        assert time.monotonic() < end
        stager.wait(0.01)


def test_objects_are_stored_in_the_namespace_s_codec(world):
    """Slots hold plain objects: only what is in the store differs."""
    stager = world.stager(codec="shuffle-zstd")
    chunks = world.chunks(2)
    world.save(stager, chunks)
    layout = stager.plan.layouts[0]
    codec = make_codec("shuffle-zstd", stager.plan.hasher)
    for chunk in chunks:
        plain = codec.unpack(world.path(chunk).read_bytes(), layout, chunk.key)
        verify(plain, layout, stager.plan.namespace, chunk.key, stager.plan.hasher)
    stager.close()
    loader = world.stager(codec="shuffle-zstd")
    loader.start_lookup("r", chunks)
    assert world.finish(loader, "r").ready == 2
    for ref, chunk in zip(loader.claim("r", 0, 2), chunks, strict=True):
        assert world.cells(loader, ref) == world.expected(chunk)
    loader.release("r")


def test_encrypted_objects_go_and_come(world):
    """[M43] Slots hold plain objects; what is in the store is sealed, each with a salt of its own."""
    key = EncryptionKey(bytes(range(32)))
    encrypted = {"codec": "aes-256-gcm", "encryption_key": key}
    stager = world.stager(**encrypted)
    chunks = world.chunks(2)
    world.save(stager, chunks)
    layout, hasher = stager.plan.layouts[0], stager.plan.hasher
    codec = make_codec("aes-256-gcm", hasher, key.id, key)
    stored = [world.path(chunk).read_bytes() for chunk in chunks]
    salt = codec.layout(layout).salt_range
    assert len({data[salt.start : salt.stop] for data in stored}) == 2
    for chunk, data in zip(chunks, stored, strict=True):
        verify(codec.unpack(data, layout, chunk.key), layout, stager.plan.namespace, chunk.key, hasher)
        assert not [cell for cell in world.expected(chunk).values() if cell[:32] in data]
    stager.close()
    loader = world.stager(**encrypted)
    loader.start_lookup("r", chunks)
    assert world.finish(loader, "r").ready == 2
    for ref, chunk in zip(loader.claim("r", 0, 2), chunks, strict=True):
        assert world.cells(loader, ref) == world.expected(chunk)
    loader.release("r")
    assert str(key.reveal()) not in repr(loader.plan)


@pytest.mark.parametrize("codec", [{"codec": "aes-256-gcm"}, {"encryption_key": EncryptionKey(bytes(32))}])
def test_a_key_and_a_codec_come_together(world, codec):
    with pytest.raises(ConfigError, match="encrypt"):
        world.stager(**{"codec": "none", **codec})


@pytest.mark.parametrize("codec", ["none", "shuffle-zstd"])
def test_objects_of_another_codec_are_damaged(world, codec):
    """Each way; nothing is guessed, and what is computed anew replaces them."""
    other = "none" if codec == "shuffle-zstd" else "shuffle-zstd"
    writer = world.stager(codec=other)
    (chunk,) = world.chunks(1)
    world.save(writer, [chunk])
    writer.close()
    stager = world.stager(codec=codec)
    stager.start_lookup("r", [chunk])
    state = world.finish(stager, "r")
    assert (state.ready, state.reason) == (0, "damaged")
    stager.release("r")
    world.save(stager, [chunk])
    stored, layout = world.path(chunk).read_bytes(), stager.plan.layouts[0]
    plain = make_codec(codec, stager.plan.hasher).unpack(stored, layout, chunk.key)
    verify(plain, layout, stager.plan.namespace, chunk.key, stager.plan.hasher)


def test_damage_in_a_packed_object_is_a_miss(world):
    stager = world.stager(codec="shuffle-zstd")
    chunks = world.chunks(2)
    world.save(stager, chunks)
    data = bytearray(world.path(chunks[1]).read_bytes())
    data[-1] ^= 1
    world.path(chunks[1]).write_bytes(data)
    stager.reset()
    stager.start_lookup("r", chunks)
    state = world.finish(stager, "r")
    assert (state.ready, state.reason) == (1, "damaged")


@pytest.mark.parametrize("loads", [True, False])
def test_a_store_that_is_known_to_fail_is_left_alone_from_the_start_and_tried(world, loads):
    chunks = world.chunks(2)
    writer = world.stager()
    world.save(writer, chunks[:1])
    writer.close()
    stager = world.stager()
    stager.suspend("unavailable", "made up", loads=loads)
    assert stager.health["saves"].startswith("suspended (unavailable)")
    assert (stager.health["loads"] == "ok") != loads
    assert stager.begin_save(chunks[1]) is None
    assert stager.snapshot()["save_skips"] == {"store-unavailable": 1}
    stager.start_lookup("r", chunks[:1])
    assert world.finish(stager, "r").ready == (0 if loads else 1)
    stager.release("r")
    # It works, so the first try ends that.
    world.wait_until(lambda: (stager.poll(), stager.health["loads"])[1] == "ok")

    def saved() -> bool:
        ref = stager.begin_save(chunks[1])
        if ref is not None:
            world.fill(stager, ref, chunks[1].key)
            world.settle(stager)
        return stager.health["saves"] == "ok"

    world.wait_until(saved)
    assert world.path(chunks[1]).is_file()
