"""Servers under a limit: what goes, what stays, when nothing can go, and that the limit holds with several of them."""

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.identity import Identity, NamespaceDocument, StorageFacts
from tplayout.format.keys import chain, namespace_object
from tplayout.staging.stager import Stager
from tplayout.storage.base import temporary_name
from tplayout.storage.capped import ACCOUNT, DIRECTORY
from tplayout.storage.url import open_store

HERE = Path(__file__).parent
OLD = 1_600_000_000.0
HEADS = Group("full", "full", (0, 1, 2), 4, (Part("k", 8), Part("v", 8)), "F32")
IDENTITY = Identity("files:01", {}, "float32", None, Geometry(16, (HEADS,)))


@pytest.fixture
def size(world):
    """Bytes of a chunk."""
    return world.plan().layouts[0].nbytes


def stored(world, chunks):
    return [world.path(chunk).exists() for chunk in chunks]


def save_in_turn(world, stager, chunks):
    for chunk in chunks:
        if (ref := stager.begin_save(chunk)) is not None:
            world.fill(stager, ref, chunk.key)
            world.settle(stager)


def used_at(world, chunks, when):
    for chunk in chunks:
        os.utime(world.path(chunk), (when, when))


def save_as_used_at(world, stager, chunks, when):
    world.save(stager, chunks)
    used_at(world, chunks, when)


def total(root):
    found = 0
    for directory, below, names in os.walk(root):
        below[:] = [name for name in below if name != DIRECTORY]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                found += os.lstat(os.path.join(directory, name)).st_size
    return found


def test_what_was_used_least_recently_goes_tails_first(world, size):
    stager = world.stager(max_bytes=6 * size)
    first, second, third = (world.chunks(3, seed) for seed in range(3))
    save_as_used_at(world, stager, first, OLD)
    save_as_used_at(world, stager, second, OLD + 1)
    stager.reset()
    stager.start_lookup("r", first[:2])  # touches them
    assert world.finish(stager, "r").ready == 2
    world.save(stager, third[:1])
    assert stored(world, first) == [True, True, False]
    assert (stored(world, second), stored(world, third)) == ([True] * 3, [True, False, False])
    save_in_turn(world, stager, third[1:])
    assert stored(world, second) == [True, False, False]
    assert (stored(world, first), stored(world, third)) == ([True, True, False], [True] * 3)
    assert stager.counters()["evictions"] == 3
    assert stager.counters()["save_errors"] == stager.counters()["save_skips"] == {}
    assert total(world.store) == 6 * size


def test_what_memory_serves_counts_as_used_too(world, size):
    stager = world.stager(max_bytes=2 * size)
    hot, cold, new = (world.chunks(1, seed) for seed in range(3))
    save_as_used_at(world, stager, hot, OLD)
    save_as_used_at(world, stager, cold, OLD + 1)
    stager.start_lookup("r", hot)
    assert world.finish(stager, "r").ready == 1
    assert (stager.counters()["host_hits"], stager.counters()["loads"]) == (1, 0)
    world.wait_until(lambda: world.path(hot[0]).stat().st_atime > OLD + 2)
    world.save(stager, new)
    assert stored(world, hot + cold + new) == [True, False, True]


def test_what_is_computed_again_although_it_is_stored_counts_as_used_too(world):
    stager = world.stager()
    chunks = world.chunks(1)
    save_as_used_at(world, stager, chunks, OLD)
    assert stager.begin_save(chunks[0]) is None
    world.wait_until(lambda: world.path(chunks[0]).stat().st_atime > OLD)
    used_at(world, chunks, OLD)
    assert stager.begin_save(chunks[0]) is None  # but not each time
    world.save(stager, world.chunks(1, seed=1))
    assert world.path(chunks[0]).stat().st_atime == OLD


def test_of_a_prefix_that_does_not_fit_the_beginning_is_kept(world, size):
    stager = world.stager(max_bytes=4 * size)
    chunks = world.chunks(8)
    save_in_turn(world, stager, chunks)
    assert stored(world, chunks)[:4] == [True] * 4
    assert stager.counters()["save_errors"] == {"limit": 3}
    assert stager.counters()["save_skips"] == {"store-limit": 1}


def test_where_nothing_may_go_saving_stops_with_one_line_and_goes_on_when_there_is_room(world, size, caplog):
    world.store.mkdir(parents=True)
    (world.store / "not-ours").write_bytes(bytes(3 * size))
    stager = world.stager(max_bytes=4 * size)
    chunks = world.chunks(1) + world.chunks(6, seed=1)
    save_as_used_at(world, stager, chunks[:1], OLD)
    (world.store / "not-ours").write_bytes(bytes(4 * size))
    for chunk in chunks[1:4]:
        world.save(stager, [chunk])
    assert stager.begin_save(chunks[4]) is None
    assert stager.counters()["save_skips"] == {"store-limit": 1}
    assert stager.counters()["save_errors"] == {"limit": 3}
    assert stager.health == {"loads": "ok", "saves": stager.health["saves"], "io": "ok"}
    assert stored(world, chunks)[0]  # it would not have been enough
    stager.start_lookup("r", chunks[:1])
    assert world.finish(stager, "r").ready == 1
    (line,) = [record.getMessage() for record in caplog.records if "suspended" in record.getMessage()]
    assert f"on file://{world.store}" in line
    assert f"of {4 * size} are in use" in line
    assert "only servers evict); raise max_bytes, run `tplayout gc`, or remove what else is in that directory" in line
    (world.store / "not-ours").unlink()
    world.wait_until(lambda: stager.begin_save(chunks[5]), 10.0, 0.01)  # and not half a minute


def test_all_namespaces_share_the_limit_but_what_cannot_be_read_stays(world, size):
    with open_store(world.store) as store:
        for weights in ("files:01", "files:02"):
            identity = Identity(weights, {}, "float32", None, IDENTITY.geometry)
            document = NamespaceDocument(identity, StorageFacts("xxh3-128"), "m").to_bytes()
            other = world.stager(namespace=identity.digest(), document=document)
            chunks = chain(identity.digest(), range(32), 16)
            world.save(other, chunks)
            for path in (world.store / identity.namespace).rglob("*.safetensors"):
                os.utime(path, (OLD, OLD))
        store.put(namespace_object(identity.namespace), b"{}")
    stager = world.stager(max_bytes=total(world.store) + size)
    mine = world.chunks(4)
    save_in_turn(world, stager, mine)
    assert stored(world, mine) == [True, True, True, False]
    assert not list((world.store / IDENTITY.namespace).rglob("*.safetensors"))
    assert len(list((world.store / identity.namespace).rglob("*.safetensors"))) == 2


def test_what_dead_writers_left_an_hour_ago_goes_before_any_chunk(world, size):
    stager = world.stager(max_bytes=3 * size)
    chunks = world.chunks(3)
    world.save(stager, chunks[:1])
    old, young = (world.path(chunks[0]).with_name(temporary_name("x")) for _ in range(2))
    for path in (old, young):
        path.write_bytes(bytes(size))
    os.utime(old, (time.time() - 4000, time.time() - 4000))
    stager = world.stager(max_bytes=3 * size)  # what was put there by hand is noticed at the start
    world.save(stager, chunks[1:2])
    assert stored(world, chunks) == [True, True, False]
    assert (old.exists(), young.exists()) == (False, True)
    assert stager.counters()["evictions"] == 0


SLOW = """
import time
from tplayout.staging import eviction, io_process
io_process._STUCK_S, real = 0.1, eviction.read_id
eviction.read_id = lambda *args: time.sleep(0.1) or real(*args)
io_process.main()
"""


def test_making_room_may_take_longer_than_any_operation_of_the_store(world, size):
    before = world.stager(slots=40)
    for seed in range(30):
        world.save(before, world.chunks(1, seed))
    plan = world.plan(max_bytes=30 * size, timeout_s=0.3)
    stager = Stager(plan, command=[sys.executable, "-P", "-c", SLOW])
    try:
        chunks = world.chunks(1, seed=30)
        world.save(stager, chunks)
        assert stored(world, chunks) == [True]
        assert stager.counters()["save_seconds"] > 2.0 > 4 * plan.timeout_s + 0.1
        assert stager.counters()["io_restarts"] == 0
    finally:
        stager.close()


@pytest.fixture
def serve(world):
    """Starts server processes; each is (process, pids of its I/O processes)."""
    servers = []

    def start(limit, seed):
        process = subprocess.Popen(
            [sys.executable, str(HERE / "server_process.py"), str(world.store), str(limit), str(seed)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        servers.append(process)
        return process, json.loads(process.stdout.readline())

    yield start
    for process in servers:
        process.kill()
        process.communicate()


def test_four_servers_never_exceed_it_together_though_one_is_killed(world, size, serve):
    """Looked at while the account is locked, when nothing that counts can move."""
    limit = 12 * size + size // 2
    servers = [serve(limit, seed) for seed in range(4)]
    world.wait_until((world.store / ACCOUNT).exists)
    began, looks, most = time.monotonic(), 0, 0
    killed = 0
    while time.monotonic() - began < 6.0:
        with (world.store / ACCOUNT).open("rb") as account:
            fcntl.flock(account, fcntl.LOCK_EX)
            found = total(world.store)
        assert found <= limit
        looks, most = looks + 1, max(most, found)
        if killed == 0 and time.monotonic() - began > 2.0:  # an I/O process
            os.kill(servers[0][1][0], signal.SIGKILL)
            killed = 1
        elif killed == 1 and time.monotonic() - began > 4.0:  # a whole server, at once
            for pid in (servers[1][0].pid, *servers[1][1]):
                os.kill(pid, signal.SIGKILL)
            killed = 2
        time.sleep(0.01)
    counted = []
    for process, _ in (servers[0], *servers[2:]):
        process.stdin.write("\n")
        process.stdin.flush()
        counted.append(json.loads(process.stdout.readline()))
    assert looks > 50
    assert most >= 10 * size
    for sums in counted:
        assert sums["saves"] > 10
        assert sums["hits"] > 0
        assert sums["verification_failures"] == 0
        assert set(sums["save_errors"]) <= {"io-lost", "limit"}
    assert sum(sums["evictions"] for sums in counted) > 20
    assert counted[0]["io_restarts"] == 1
    print(f"{looks} looks, at most {most} of {limit} bytes; {counted}")
