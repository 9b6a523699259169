"""The I/O process as a process: nobody's child, quiet, small, and gone when it should be."""

import contextlib
import json
import os
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tplayout.errors import FormatError
from tplayout.format.chunk import verify
from tplayout.format.digest import make_hasher
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.layout import chunk_layout

HERE = Path(__file__).parent
DRAIN_S = 3.0  # of scheduler_process.py
BUSY_S = 5.0  # what a busy machine may add
SECRET = b"do-not-show-this-secret-key-0123"


@pytest.fixture
def running(world):
    """A stager whose I/O process has said hello, and its pid."""
    stager = world.stager()
    return stager, hello(world, stager)[0]


def hello(world, stager, count=1):
    """Pids of the I/O processes, once all are up."""

    def pids():
        stager.poll()
        return stager._pool.io.pids if len(stager._pool.io.pids) >= count else None

    return world.wait_until(pids)


def ancestors(pid):
    """Pids from the parent up to init."""
    found = []
    while pid > 1:
        pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        found.append(pid)
    return found


def status(pid, field):
    """One line of /proc/PID/status."""
    return next(
        line.split(None, 1)[1].strip()
        for line in Path(f"/proc/{pid}/status").read_text().splitlines()
        if line.startswith(f"{field}:")
    )


def test_it_is_no_descendant_and_in_no_session_of_ours(running, world):
    _, pid = running
    world.wait_until(lambda: os.getpid() not in ancestors(pid))
    assert os.getsid(pid) not in (os.getsid(0), pid)
    assert os.getpgid(pid) != os.getpgid(0)
    assert not any(Path(f"/proc/{os.getpid()}/task").glob("*/children/" + str(pid)))


def test_interrupts_and_terminations_do_not_end_it(running, world):
    stager, pid = running
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        os.kill(pid, number)
    time.sleep(0.1)
    world.save(stager, world.chunks(1))
    assert stager._pool.io.pids == [pid]


def test_it_runs_on_all_cpus_whatever_we_are_bound_to(world):
    mine = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(mine)})
    try:
        stager = world.stager()
        (pid,) = hello(world, stager)
        world.wait_until(lambda: os.sched_getaffinity(pid) >= mine)
    finally:
        os.sched_setaffinity(0, mine)


def test_no_secret_in_argv_environment_or_repr(world):
    options = {"key": "id", "secret": "s3cr3t-of-the-store", "endpoint_url": "http://127.0.0.1:9"}
    key = EncryptionKey(b"do-not-show-this-key-either-0123")
    stager = world.stager(
        secret=SECRET, storage_options=options, url="s3://bucket/x", codec="aes-256-gcm", encryption_key=key
    )
    (pid,) = hello(world, stager)
    world.wait_until(lambda: os.readlink(f"/proc/{pid}/fd/2") == "/dev/null")
    secrets = [SECRET, SECRET.hex().encode(), b"s3cr3t", b"this-key-either", key.reveal().encode()]
    for entry in ("cmdline", "environ"):
        shown = Path(f"/proc/{pid}/{entry}").read_bytes()
        assert not any(secret in shown for secret in secrets)
    ps = subprocess.run(["ps", "auxwwwe"], capture_output=True, check=False).stdout
    assert not any(secret in ps for secret in secrets)
    assert not any(secret.decode() in repr(stager.plan) for secret in secrets)
    assert status(pid, "Name") == "tplayout-io"
    assert status(pid, "Umask") == "0077"
    assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)


def test_it_loads_no_engine_and_no_tensor_library(running, world):
    code = (
        "import sys, tplayout.staging.io_process, tplayout.staging.stager\n"
        "print(sorted({'torch', 'vllm', 'numpy', 'transformers'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
    stager, pid = running
    world.save(stager, world.chunks(1))
    maps = Path(f"/proc/{pid}/maps").read_text()
    assert not any(name in maps for name in ("torch", "vllm", "numpy"))
    assert int(status(pid, "RssAnon").split()[0]) < 100 * 1024


def test_it_keeps_no_output_of_ours_open(running, world):
    _, pid = running
    for fd in (0, 1, 2):
        world.wait_until(lambda fd=fd: os.readlink(f"/proc/{pid}/fd/{fd}") == "/dev/null")


def test_closing_publishes_what_is_complete_and_ends_it(world):
    stager = world.stager()
    chunks = world.chunks(2)
    (pid,) = hello(world, stager)
    refs = [stager.begin_save(chunk) for chunk in chunks]
    world.fill(stager, refs[0], chunks[0].key)
    stager.close()
    stager.close()
    world.wait_until(lambda: not world.alive(pid), 4.0)
    assert world.path(chunks[0]).exists()
    assert not world.path(chunks[1]).exists()


@pytest.mark.parametrize("mode", ["plain", "fork"])
def test_when_the_scheduler_is_killed_complete_slots_are_published_and_nothing_is_left(world, mode):
    code = [sys.executable, str(HERE / "scheduler_process.py"), str(world.store), "5", "2", mode]
    environment = {**os.environ, "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    scheduler = subprocess.Popen(code, stdout=subprocess.PIPE, text=True, env=environment)
    report = json.loads(scheduler.stdout.readline())
    assert {scheduler.pid, *report["pids"]} <= set(world.users_of_inode(report["inode"]))
    os.kill(scheduler.pid, signal.SIGKILL)
    scheduler.wait()
    killed = time.monotonic()
    try:
        for pid in report["pids"]:
            world.wait_until(lambda pid=pid: not world.alive(pid))
        assert time.monotonic() - killed < DRAIN_S + BUSY_S
    finally:
        if report["child"]:
            os.kill(report["child"], signal.SIGKILL)
    world.wait_until(lambda: not world.users_of_inode(report["inode"]))
    assert not [name for name in os.listdir("/dev/shm") if "tplayout" in name]
    chunks = world.chunks(7)
    assert [world.path(chunk).exists() for chunk in chunks] == [True] * 5 + [False] * 2
    layout = chunk_layout(world.plan().geometry, 0, "xxh3-128")
    for chunk in chunks[:5]:
        verify(world.path(chunk).read_bytes(), layout, world.plan().namespace, chunk.key, make_hasher())


def test_writers_that_outlive_the_scheduler_for_a_moment_still_count(world):
    stager = world.stager()
    ranks = world.ranks(stager)
    chunk = world.chunks(1)[0]
    ref = stager.begin_save(chunk)
    ranks.write(ref, chunk.key, [0])
    (pid,) = hello(world, stager)
    for channel in stager._pool.io._channels:
        channel.hang_up()
    ranks.write(ref, chunk.key, [1])
    world.wait_until(lambda: not world.alive(pid), 4.0)
    assert world.path(chunk).exists()


def test_killed_while_it_saves_it_is_replaced_and_nothing_wrong_is_accepted(world):
    stager = world.faulty_stager()
    chunks = world.chunks(4)
    world.save(stager, chunks[:1])
    world.fail(put={"delay": 30})
    refs = [stager.begin_save(chunk) for chunk in chunks[1:]]
    world.fill(stager, refs[0], chunks[1].key)
    world.fill(stager, refs[1], chunks[2].key)
    stager.start_lookup("sealed", chunks[1:3])
    assert world.finish(stager, "sealed").ready == 2
    os.kill(hello(world, stager)[0], signal.SIGKILL)
    world.fail()  # not before: a save that has not come to its put yet would find a store that works
    world.settle(stager)
    sums = stager.snapshot()
    assert sums["io_restarts"] == 1
    assert sums["save_errors"] == {"io-lost": 3}
    assert sums["slots"]["limbo"] == 1
    assert not any(world.path(chunk).exists() for chunk in chunks[1:])
    stager.start_lookup("again", chunks)
    assert world.finish(stager, "again").ready == 3
    stager.release("sealed")
    stager.release("again")
    assert stager.begin_save(chunks[1]) is None
    world.settle(stager)
    assert stager.snapshot()["save_skips"] == {"published-again": 1}
    assert world.path(chunks[1]).exists()


def test_killed_while_it_loads_the_lookup_is_a_miss_and_the_next_one_is_served(world):
    stager = world.faulty_stager()
    chunks = world.chunks(3)
    world.store_only(stager, chunks)
    world.fail(get_into={"delay": 30})
    stager.start_lookup("r", chunks)
    (pid,) = hello(world, stager)
    time.sleep(0.1)
    os.kill(pid, signal.SIGKILL)
    world.fail()
    state = world.finish(stager, "r")
    assert (state.ready, state.reason) == (0, "io-lost")
    stager.release("r")
    stager.start_lookup("r", chunks)
    assert world.finish(stager, "r").ready == 3
    for ref, chunk in zip(stager.claim("r", 0, 3), chunks, strict=True):
        assert world.cells(stager, ref) == world.expected(chunk)


def test_killed_at_random_moments_no_wrong_byte_is_ever_ready(world):
    stager = world.stager(io_processes=2, slots=6)
    chunks = world.chunks(6)
    layout, hasher = stager.plan.layouts[0], stager.plan.hasher
    for round_number in range(6):
        refs = [(stager.begin_save(chunk), chunk) for chunk in chunks]
        for ref, chunk in refs:
            if ref is not None:
                world.fill(stager, ref, chunk.key)
        time.sleep(0.003 * round_number)
        with contextlib.suppress(ProcessLookupError):
            os.kill(hello(world, stager, 1)[0], signal.SIGKILL)
        stager.start_lookup("r", chunks)
        state = world.finish(stager, "r")
        for ref, chunk in zip(stager.claim("r", 0, state.ready), chunks, strict=False):
            assert world.cells(stager, ref) == world.expected(chunk)
        stager.release("r")
        for chunk in chunks:
            with contextlib.suppress(FileNotFoundError):
                verify(world.path(chunk).read_bytes(), layout, stager.plan.namespace, chunk.key, hasher)
        world.settle(stager)
        world.wait_until(lambda: stager.poll() or stager.snapshot()["slots"]["limbo"] == 0)
        stager.reset()
        assert stager.snapshot()["slots"]["free"] == 6


def test_a_process_that_sends_garbage_is_killed_and_its_jobs_are_misses(world, caplog):
    script = world.root / "garbage.py"
    script.write_text(
        "import os, socket, sys, time\n"
        "s = socket.socket(fileno=int(sys.argv[1]))\n"
        's.sendall(b\'{"type":"hello","pid":%d}\\n\' % os.getpid())\n'
        "time.sleep(0.3); s.sendall(b'nonsense\\n'); time.sleep(60)\n"
    )
    from tplayout.staging.stager import Stager

    stager = Stager(world.plan(), command=[sys.executable, str(script)])
    try:
        stager.start_lookup("r", world.chunks(1))
        assert world.finish(stager, "r").reason == "io-lost"
        assert "garbage" in caplog.text
    finally:
        stager.close()


def test_processes_that_do_not_start_are_not_restarted_for_ever(world, caplog):
    from tplayout.staging.stager import Stager

    stager = Stager(world.plan(), command=["/bin/false"])
    try:
        deadline = time.monotonic() + 1.0
        while time.monotonic() < deadline:
            stager.wait(0.0)
        assert stager.snapshot()["io_restarts"] <= 5
        assert stager.health["io"] == "0 of 1 processes"
        assert stager.begin_save(world.chunks(1)[0]) is None
        assert stager.snapshot()["save_skips"] == {"io-down": 1}
        stager.start_lookup("r", world.chunks(1))
        assert stager.lookup("r").reason == "io-down"
        assert stager.snapshot()["slots"]["free"] == 8
        assert [record.getMessage() for record in caplog.records] == [
            "tplayout: an I/O process is gone or hangs: starting another one"
        ]
    finally:
        stager.close()


def test_a_store_that_cannot_be_opened_is_said_in_the_log(world, caplog):
    stager = world.stager(url="nonsense://x")
    world.wait_until(lambda: stager.poll() or "an I/O process ends" in caplog.text)


def test_wrong_bytes_never_verify(world):
    """The tests' own check: `verify` is what the others rely on."""
    stager = world.stager()
    chunk = world.chunks(1)[0]
    world.save(stager, [chunk])
    data = bytearray(world.path(chunk).read_bytes())
    data[-5000] ^= 1
    with pytest.raises(FormatError):
        verify(data, stager.plan.layouts[0], stager.plan.namespace, chunk.key, stager.plan.hasher)
