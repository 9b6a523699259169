"""Deadlines, daemon workers and leased buffers."""

from __future__ import annotations

import threading
import time

import pytest

from tplayout.storage.bounded import Deadline, Lease, LeaseEnded, Workers


class TestDeadline:
    def test_time_runs_out_and_does_not_go_below_zero(self) -> None:
        deadline = Deadline(0.05)
        assert 0 < deadline.left() <= 0.05
        time.sleep(0.06)
        assert deadline.left() == 0.0
        assert deadline.again().left() > 0


class TestLease:
    def test_reading_and_writing(self) -> None:
        memory = bytearray(b"0123456789")
        lease = Lease(memoryview(memory))
        assert lease.nbytes == 10
        assert lease.read(8, 5) == b"89"
        lease.write(2, b"ab")
        assert memory == b"01ab456789"
        assert bytes(lease.slice(2, 2)) == b"ab"

    def test_nothing_is_written_outside(self) -> None:
        lease = Lease(memoryview(bytearray(4)))
        for offset, data in ((3, b"xx"), (-1, b"x"), (5, b"x")):
            with pytest.raises(ValueError, match="do not fit"):
                lease.write(offset, data)

    def test_nothing_is_touched_after_the_end(self) -> None:
        memory = bytearray(4)
        lease = Lease(memoryview(memory))
        lease.end()
        for call in (
            lambda: lease.write(0, b"x"),
            lambda: lease.read(0, 1),
            lambda: lease.slice(0, 1),
            lambda: lease.fill(0, 1, len),
            lease.check,
        ):
            with pytest.raises(LeaseEnded):
                call()
        memory.extend(b"not exported any more")

    def test_the_end_waits_for_a_reader_that_fills_the_memory(self) -> None:
        memory = bytearray(4)
        lease = Lease(memoryview(memory))
        begun, done = threading.Event(), []

        def read(view: memoryview) -> int:
            begun.set()
            time.sleep(0.1)
            view[:] = b"xyz"
            done.append(len(view))
            return 2

        counts: list[int] = []
        thread = threading.Thread(target=lambda: counts.append(lease.fill(1, 9, read)))
        thread.start()
        assert begun.wait(10)
        lease.end()
        assert done == [3]
        thread.join()
        assert counts == [2]
        assert memory == b"\0xyz"
        memory.extend(b"not exported any more")

    def test_a_slice_is_for_reading(self) -> None:
        with pytest.raises(TypeError):
            Lease(memoryview(bytearray(4))).slice(0, 2)[0] = 1


class TestWorkers:
    def test_results_and_errors_come_back(self) -> None:
        workers = Workers(2)
        assert workers.run(lambda: 7, Deadline(5)) == 7
        with pytest.raises(KeyError, match="x"):
            workers.run(lambda: {}["x"], Deadline(5))

    def test_a_call_that_hangs_ends_at_the_deadline(self) -> None:
        workers, release = Workers(1), threading.Event()
        start = time.monotonic()
        with pytest.raises(TimeoutError):
            workers.run(lambda: release.wait(30), Deadline(0.1))
        assert time.monotonic() - start < 10
        release.set()
        assert workers.run(lambda: 1, Deadline(5)) == 1

    def test_what_waits_behind_a_hanging_call_is_dropped_at_its_deadline(self) -> None:
        workers, release, ran = Workers(1), threading.Event(), []
        with pytest.raises(TimeoutError):
            workers.run(lambda: release.wait(30), Deadline(0.05))
        with pytest.raises(TimeoutError):
            workers.run(lambda: ran.append(1), Deadline(0.05))
        release.set()
        workers.run(lambda: ran.append(2), Deadline(5))
        assert ran == [2]

    def test_calls_run_at_the_same_time_up_to_the_limit(self) -> None:
        workers, together = Workers(4), threading.Barrier(4)
        threads = [
            threading.Thread(target=workers.run, args=(lambda: together.wait(10), Deadline(10))) for _ in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not together.broken

    def test_threads_are_reused_and_are_daemons(self) -> None:
        workers = Workers(8, name="tplayout-test")
        for _ in range(50):
            workers.run(lambda: None, Deadline(5))
        mine = [thread for thread in threading.enumerate() if thread.name == "tplayout-test"]
        assert len(mine) <= 2
        assert all(thread.daemon for thread in mine)

    def test_many_callers(self) -> None:
        workers, results = Workers(3), []
        lock = threading.Lock()

        def call(number: int) -> None:
            for turn in range(50):
                value = workers.run(lambda: number * 100 + turn, Deadline(30))  # noqa: B023
                with lock:
                    results.append(value)

        threads = [threading.Thread(target=call, args=(number,)) for number in range(10)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert sorted(results) == sorted(number * 100 + turn for number in range(10) for turn in range(50))
