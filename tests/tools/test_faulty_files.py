"""The file system that breaks does what it says, in other processes too, and says what it did."""

import json
import os
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tools.fault_store import Fault
from tools.faulty_files import APPLICABLE, FaultyFiles, spread
from tplayout.errors import StorageError, StorageTimeout
from tplayout.storage import Store, open_store

DATA = bytes(range(200))


@pytest.fixture
def faults(tmp_path: Path) -> FaultyFiles:
    return FaultyFiles(tmp_path / "faults")


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def store(faults: FaultyFiles, root: Path) -> Store:
    opened = open_store(f"faulty+file://{root}", faults.storage_options, timeout_s=5.0)
    opened.put("ns/k", DATA)
    assert opened.exists(["ns/k", "ns/new"]) == [True, False]
    assert [info.key for info in opened.list()] == ["ns/k"]
    return opened


def always(fault: Fault, *methods: str) -> dict[str, dict[str, float]]:
    return {method: {fault.value: 1.0} for method in methods}


CALLS = {
    "cat_file": lambda store, deadline: store.get("ns/k", deadline=deadline),
    "pipe_file": lambda store, deadline: store.put("ns/k", DATA, deadline=deadline),
    "info": lambda store, deadline: store.exists(["ns/k"], deadline=deadline),
    "find": lambda store, deadline: list(store.list(deadline=deadline)),
    "rm_file": lambda store, deadline: store.delete(["ns/k"], deadline=deadline),
}


@pytest.mark.parametrize("method", APPLICABLE)
def test_errors_come_before_anything_is_done(store: Store, faults: FaultyFiles, root: Path, method: str) -> None:
    faults.inject(always(Fault.ERROR, method))
    with pytest.raises(StorageError, match="made up"):
        CALLS[method](store, 5.0)
    assert (root / "ns/k").read_bytes() == DATA
    assert faults.injected() == Counter({(method, Fault.ERROR): 1})
    faults.stop()
    CALLS[method](store, 5.0)
    assert faults.injected().total() == 1


@pytest.mark.parametrize("method", APPLICABLE)
def test_hangs_last_until_the_deadline_and_delays_pass(store: Store, faults: FaultyFiles, method: str) -> None:
    faults.inject(always(Fault.HANG, method))
    with pytest.raises(StorageTimeout):
        CALLS[method](store, 0.1)
    faults.inject(always(Fault.DELAY, method), delay_s=0.1)
    start = time.monotonic()
    CALLS[method](store, 5.0)
    assert 0.1 <= time.monotonic() - start < 3


@pytest.mark.parametrize("method", APPLICABLE)
def test_success_reported_as_failure(store: Store, faults: FaultyFiles, root: Path, method: str) -> None:
    faults.inject(always(Fault.REPORTED_FAILURE, method))
    with pytest.raises(StorageError, match="reported-failure"):
        CALLS[method](store, 5.0)
    assert (root / "ns/k").exists() == (method != "rm_file")
    assert faults.damaged(root) == set()


def test_reads_that_are_short_or_wrong(store: Store, faults: FaultyFiles) -> None:
    faults.inject(always(Fault.SHORT_READ, "cat_file"))
    short = store.get("ns/k")
    assert DATA.startswith(short)
    assert len(short) < len(DATA)
    faults.inject(always(Fault.FLIPPED_BIT, "cat_file"))
    wrong = store.get("ns/k")
    assert sum((a ^ b).bit_count() for a, b in zip(wrong, DATA, strict=True)) == 1
    faults.stop()
    assert store.get("ns/k") == DATA
    assert store.get_range("ns/k", 10, 20) == DATA[10:30]


def test_damaged_writes_are_known_until_they_are_replaced_or_deleted(
    store: Store, faults: FaultyFiles, root: Path
) -> None:
    faults.inject(always(Fault.FLIPPED_BIT, "pipe_file"))
    store.put("ns/k", DATA)
    assert sum((a ^ b).bit_count() for a, b in zip((root / "ns/k").read_bytes(), DATA, strict=True)) == 1
    faults.inject(always(Fault.FAILURE_AFTER_WRITE, "pipe_file"))
    with pytest.raises(StorageError, match="failure-after-write"):
        store.put("ns/half", DATA)
    assert (root / "ns/half").read_bytes() == DATA[:100]
    assert faults.damaged(root) == {"ns/k", "ns/half"}
    faults.stop()
    store.put("ns/k", DATA)
    assert faults.damaged(root) == {"ns/half"}
    store.delete(["ns/half"])
    assert faults.damaged(root) == set()


def test_stale_answers_are_the_first_ones(store: Store, faults: FaultyFiles) -> None:
    store.put("ns/new", DATA)
    store.delete(["ns/k"])
    faults.inject(always(Fault.STALE_LIST, "find", "info"))
    assert [info.key for info in store.list()] == ["ns/k"]
    assert store.exists(["ns/k", "ns/new"]) == [True, False]
    faults.stop()
    assert [info.key for info in store.list()] == ["ns/new"]
    assert store.exists(["ns/k", "ns/new"]) == [False, True]


def test_rates_that_are_none_are_refused(faults: FaultyFiles) -> None:
    for rates in ({"put": {"error": 0.1}}, {"find": {"flipped-bit": 0.1}}, {"info": {"error": 0.7, "hang": 0.7}}):
        with pytest.raises(ValueError, match="no"):
            faults.inject(rates)


OTHER = """
import os, sys
from tplayout.errors import StorageError
from tplayout.storage import open_store
store = open_store(sys.argv[1], {"control": sys.argv[2]}, timeout_s=10.0)
for turn in range(100):
    name = f"ns/{sys.argv[3]}-{turn}"
    for call in (lambda: store.put(name, bytes(99)), lambda: store.get(name, max_bytes=99)):
        try:
            call()
        except StorageError:
            pass
"""


def test_several_processes_know_it_and_count_together(faults: FaultyFiles, root: Path) -> None:
    """They find the protocol by its entry point, as a server's I/O processes do."""
    faults.inject(spread(0.5, faults=set(Fault) - {Fault.HANG}), seed=3, delay_s=0.001)
    arguments = [f"faulty+file://{root}", faults.storage_options["control"]]
    environment = {**os.environ, **faults.environment()}

    def others(names: str) -> dict[str, bytes]:
        processes = [
            subprocess.Popen([sys.executable, "-P", "-c", OTHER, *arguments, name], env=environment) for name in names
        ]
        assert [process.wait(60) for process in processes] == [0] * len(names)
        return {path.name: path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()}

    stored = others("ab")
    injected = faults.injected()
    assert injected.total() > 100
    assert {fault for _, fault in injected} == set(Fault) - {Fault.HANG}
    assert {name for name, data in stored.items() if data != bytes(99)} == {
        Path(name).name for name in faults.damaged(root)
    }
    log = Path(faults.storage_options["control"]).with_suffix(".log")
    assert all(json.loads(line) for line in log.read_text().splitlines())
    # The same seed and the same calls: the same faults, byte for byte.
    for path in root.rglob("*"):
        path.unlink() if path.is_file() else None
    assert others("ab") == stored
