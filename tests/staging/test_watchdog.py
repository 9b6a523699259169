"""A process that does not answer is told from one that may not run; a stopped one is killed and replaced."""

import os
import signal
import subprocess
import sys
import time

import pytest

from tplayout.staging import watchdog
from tplayout.staging.watchdog import HUNG_S, Sight, Verdict, Watch, look_at


class Play:
    """A watch on a process that is what the test says, with a clock of its own."""

    def __init__(self):
        self.now = 100.0
        self.sight = Sight("SSS", 5.0)
        self.watch = Watch(lambda: self.now, lambda pid: self.sight)

    def verdicts(self, seconds, step=0.5, cpu=0.0, busy=True):
        """What comes of so many seconds, in which it uses `cpu` of a CPU."""
        found = []
        for _ in range(round(seconds / step)):
            self.now += step
            if self.sight is not None:
                self.sight = Sight(self.sight.states, self.sight.cpu + cpu * step)
            found.append(self.watch.check(1, busy))
        return [verdict for verdict in found if verdict is not Verdict.NOTHING]


@pytest.fixture
def play():
    return Play()


def test_one_that_is_silent_and_could_run_hangs(play):
    assert play.verdicts(HUNG_S - 1) == [Verdict.ASK]
    assert play.verdicts(4)[0] is Verdict.HUNG


def test_one_that_answers_is_asked_again_and_again(play):
    for _ in range(100):
        assert play.verdicts(1) == [Verdict.ASK]
        play.watch.heard()


def test_an_answer_makes_up_for_all_silence_before(play):
    for _ in range(5):
        assert play.verdicts(HUNG_S - 2) == [Verdict.ASK]
        play.watch.heard()


def test_one_without_work_is_not_asked(play):
    assert play.verdicts(100, busy=False) == []


@pytest.mark.parametrize("states", ["R", "SRS", "t"])
def test_one_that_is_kept_from_running_does_not_hang(play, states):
    """27 ms of CPU in 28 s were seen."""
    play.sight = Sight(states, 5.0)
    assert play.verdicts(600, cpu=0.001) == [Verdict.ASK]


def test_one_that_runs_all_the_time_and_does_not_answer_hangs(play):
    play.sight = Sight("SRS", 5.0)
    assert play.verdicts(HUNG_S - 1, cpu=1.0) == [Verdict.ASK]
    assert Verdict.HUNG in play.verdicts(5, cpu=1.0)


@pytest.mark.parametrize("states", ["T", "TTT", "D", "SDS"])
def test_one_that_is_stopped_or_waits_in_the_kernel_hangs(play, states):
    play.sight = Sight(states, 5.0)
    assert Verdict.HUNG in play.verdicts(HUNG_S + 3)


def test_seconds_in_which_we_were_not_there_do_not_count(play):
    """An engine compiles for minutes, or all is stopped together."""
    assert play.verdicts(600, step=60) == [Verdict.ASK]


def test_one_that_cannot_be_seen_does_not_hang(play):
    play.sight = None
    assert play.verdicts(600) == [Verdict.ASK]


def child(code):
    return subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)


def test_looking_at_real_processes(world):
    process = child("import time\nprint(1, flush=True)\ntime.sleep(1)\nwhile True: pass")
    process.stdout.readline()
    try:
        world.wait_until(lambda: look_at(process.pid).states == "S")
        before = look_at(process.pid)
        world.wait_until(lambda: look_at(process.pid).excused)
        world.wait_until(lambda: look_at(process.pid).cpu > before.cpu)
        process.send_signal(signal.SIGSTOP)
        world.wait_until(lambda: look_at(process.pid).states == "T")
        assert not look_at(process.pid).excused
    finally:
        process.kill()
        process.communicate()
    assert look_at(process.pid) is None


@pytest.fixture
def impatient(monkeypatch):
    monkeypatch.setattr(watchdog, "HUNG_S", 1.5)
    monkeypatch.setattr(watchdog, "_LOOK_S", 0.25)


def pid_of(world, stager):
    return world.wait_until(lambda: stager.poll() or stager._pool.io.pids)[0]


def test_a_stopped_io_process_costs_misses_is_killed_and_replaced(world, impatient, caplog):
    stager = world.stager(slots=4, load_deadline_s=0.3)
    chunks = world.chunks(2)
    world.store_only(stager, chunks)
    pid = pid_of(world, stager)
    os.kill(pid, signal.SIGSTOP)
    stager.start_lookup("r", chunks)
    assert world.finish(stager, "r").reason == "deadline"
    stager.release("r")
    unsaved = world.chunks(1, seed=1)[0]
    ref = stager.begin_save(unsaved)
    world.fill(stager, ref, unsaved.key)
    held = stager.snapshot()["slots"]
    assert held["loading"] == 2
    began = time.monotonic()

    def replaced():
        stager.poll()
        if world.alive(pid):  # it could still write to them
            assert stager.snapshot()["slots"]["loading"] == 2
        return stager.counters()["io_restarts"] == 1 and not world.alive(pid) and not stager.busy

    world.wait_until(replaced)
    assert time.monotonic() - began < 10.0
    slots = stager.snapshot()["slots"]
    assert (slots["loading"], slots["filling"], slots["publishing"], slots["limbo"]) == (0, 0, 0, 0)
    assert stager.counters()["save_errors"] == {"io-lost": 1}
    said = [record.getMessage() for record in caplog.records if "does not answer" in record.getMessage()]
    assert len(said) == 1
    assert f"pid {pid}, its threads are in state T" in said[0]

    def hit():
        stager.start_lookup("r", chunks)
        ready = world.finish(stager, "r").ready
        stager.release("r")
        return ready == 2

    world.wait_until(hit)
    assert pid_of(world, stager) != pid


def test_of_two_processes_the_other_one_goes_on(world, impatient):
    stager = world.stager(io_processes=2, load_deadline_s=10.0, slots=16)
    chunks = world.chunks(8)
    world.store_only(stager, chunks)
    world.wait_until(lambda: stager.poll() or len(stager._pool.io.pids) == 2)
    pids = stager._pool.io.pids
    os.kill(pids[0], signal.SIGSTOP)
    stager.start_lookup("r", chunks)
    state = world.finish(stager, "r")
    assert state.reason == "io-lost"
    world.wait_until(lambda: stager.poll() or not world.alive(pids[0]))
    assert pids[1] in stager._pool.io.pids
    stager.release("r")
    stager.start_lookup("r", chunks)
    assert world.finish(stager, "r").ready == 8


def test_a_store_that_hangs_does_not_look_like_a_process_that_does(world, impatient):
    stager = world.faulty_stager(load_deadline_s=0.2, timeout_s=30.0)
    chunks = world.chunks(1)
    world.store_only(stager, chunks)
    pid = pid_of(world, stager)
    world.fail(get_into={"hang": True})
    stager.start_lookup("r", chunks)
    assert world.finish(stager, "r").reason == "deadline"
    end = time.monotonic() + 4.0
    while time.monotonic() < end:
        stager.wait(0.01)
    assert stager.busy
    assert stager._pool.io.pids == [pid]
    assert stager.counters()["io_restarts"] == 0


def test_a_process_that_is_stopped_for_a_moment_goes_on(world, impatient):
    stager = world.stager(load_deadline_s=10.0)
    chunks = world.chunks(2)
    world.store_only(stager, chunks)
    pid = pid_of(world, stager)
    os.kill(pid, signal.SIGSTOP)
    stager.start_lookup("r", chunks)
    end = time.monotonic() + 0.7
    while time.monotonic() < end:
        assert not stager.lookup("r").done
        stager.wait(0.01)
    os.kill(pid, signal.SIGCONT)
    assert world.finish(stager, "r").ready == 2
    assert stager._pool.io.pids == [pid]
