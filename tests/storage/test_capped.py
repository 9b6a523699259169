"""A local store under a limit: never over it, whoever writes, deletes, is killed, or takes the account away."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tplayout.errors import OverLimit, StorageError, StorageErrorKind, Unavailable
from tplayout.storage import capped
from tplayout.storage.capped import ACCOUNT, CappedStore
from tplayout.storage.local import LocalStore
from tplayout.storage.url import open_store

KIB = 1 << 10
LIMIT = 100 * KIB


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "kv"


@pytest.fixture
def store(root: Path) -> CappedStore:
    return CappedStore(str(root), LIMIT)


def sizes(root: Path) -> int:
    """Of all files but the account's own, in an order of looking that cannot tell what moves meanwhile."""
    total = 0
    for directory, below, names in os.walk(root):
        below[:] = [name for name in below if name != capped.DIRECTORY]
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                total += os.lstat(os.path.join(directory, name)).st_size
    return total


@contextlib.contextmanager
def held(path: Path) -> Iterator[None]:
    """The lock of the account, as another process would have it."""
    with path.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def account(root: Path) -> int:
    return int((root / ACCOUNT).read_bytes())


def test_what_would_exceed_the_limit_is_refused_and_changes_nothing(store: CappedStore, root: Path) -> None:
    store.put("ns/a", bytes(60 * KIB))
    with pytest.raises(OverLimit, match="raise max_bytes") as caught:
        store.put("ns/b", bytes(60 * KIB))
    assert (caught.value.kind, caught.value.nbytes) == (StorageErrorKind.LIMIT, 60 * KIB)
    assert store.exists(["ns/a", "ns/b"]) == [True, False]
    assert list(store.temporaries()) == []
    assert store.room() == 40 * KIB
    store.put("ns/b", bytes(40 * KIB))
    assert (store.room(), account(root), sizes(root)) == (0, LIMIT, LIMIT)


def test_deleting_gives_room(store: CappedStore, root: Path) -> None:
    store.put("ns/a", bytes(60 * KIB))
    store.delete(["ns/a", "ns/missing"])
    assert account(root) == 0
    store.put("ns/b", bytes(60 * KIB))
    store.put("ns/b", bytes(30 * KIB))
    assert (account(root), sizes(root)) == (30 * KIB, 30 * KIB)


def test_replacing_needs_room_for_both_until_it_is_done(store: CappedStore, root: Path) -> None:
    store.put("ns/a", bytes(60 * KIB))
    with pytest.raises(OverLimit):
        store.put("ns/a", bytes(60 * KIB))
    assert store.get("ns/a") == bytes(60 * KIB)


def test_what_is_begun_counts_in_full(store: CappedStore, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """So a directory can be summed up at any moment, and a writer that is killed promises nothing that is not there."""
    seen = []
    real = os.write

    def write(fd: int, data: bytes) -> int:
        seen.append((sizes(root), account(root)))
        return real(fd, data)

    monkeypatch.setattr("tplayout.storage.local.os.write", write)
    store.put("ns/a", bytes(60 * KIB))
    assert seen == [(60 * KIB, 60 * KIB)]


def test_a_write_that_fails_gives_its_room_back(
    store: CappedStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(fd: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "made up")

    with monkeypatch.context() as patch:
        patch.setattr("tplayout.storage.local.os.write", full)
        with pytest.raises(StorageError):
            store.put("ns/a", bytes(60 * KIB))
    assert (account(root), sizes(root)) == (0, 0)


@pytest.mark.parametrize("damage", [b"", b"nonsense", b"-5", b"7", b"9" * 30], ids=repr)
def test_an_account_that_says_nothing_is_made_anew(store: CappedStore, root: Path, damage: bytes) -> None:
    store.put("ns/a", bytes(60 * KIB))
    (root / ACCOUNT).write_bytes(damage)
    assert store.room() == 40 * KIB


def test_what_others_removed_is_noticed_when_the_limit_is_reached(store: CappedStore, root: Path) -> None:
    store.put("ns/a", bytes(60 * KIB))
    (root / "ns/a").unlink()
    assert account(root) == 60 * KIB
    store.put("ns/b", bytes(60 * KIB))
    assert account(root) == 60 * KIB


def test_what_others_added_is_noticed_by_the_next_process_and_after_a_while(
    store: CappedStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("ns/a", bytes(10 * KIB))
    LocalStore(str(root)).put("other/ns/file", bytes(60 * KIB))
    (root / "odd name").write_bytes(bytes(20 * KIB))
    assert store.room() == 90 * KIB
    assert CappedStore(str(root), LIMIT).room() == 10 * KIB
    monkeypatch.setattr(capped, "_SUM_UP_S", 0.0)
    assert store.room() == 10 * KIB


def test_a_directory_that_is_removed_meanwhile_is_begun_anew(store: CappedStore, root: Path) -> None:
    store.put("ns/a", bytes(60 * KIB))
    shutil.rmtree(root)
    store.put("ns/b", bytes(60 * KIB))
    assert account(root) == 60 * KIB


def test_a_lock_that_is_never_given_back_costs_a_timeout_and_nothing_else(
    store: CappedStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("ns/a", b"content")
    monkeypatch.setattr(capped, "_LOCK_S", 0.2)
    with held(root / ACCOUNT):
        started = time.monotonic()
        with pytest.raises(StorageError, match="look for one that is stopped") as caught:
            store.put("ns/b", b"content")
        assert caught.value.kind is StorageErrorKind.TIMEOUT
        assert 0.2 <= time.monotonic() - started < 10.0  # and not the store's 30 s
        assert store.get("ns/a") == b"content"
    store.put("ns/b", b"content")


def test_a_lock_that_is_lost_while_writing_leaves_nothing(
    store: CappedStore, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.put("ns/a", b"content")
    monkeypatch.setattr(capped, "_LOCK_S", 0.1)
    real = os.write
    with contextlib.ExitStack() as stack:

        def write(fd: int, data: bytes) -> int:
            stack.enter_context(held(root / ACCOUNT))
            return real(fd, data)

        monkeypatch.setattr("tplayout.storage.local.os.write", write)
        with pytest.raises(StorageError):
            store.put("ns/b", bytes(KIB))
    assert list(store.temporaries()) == []
    assert CappedStore(str(root), LIMIT).room() == LIMIT - len(b"content")


def test_a_file_system_without_locks_is_said_to_be_one(store: CappedStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(fd: int, operation: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("tplayout.storage.capped.fcntl.flock", no_locks)
    with pytest.raises(Unavailable, match="max_bytes cannot hold; leave it out, and run `tplayout gc`"):
        store.put("ns/a", b"x")


def test_only_local_stores_have_a_limit(tmp_path: Path) -> None:
    assert isinstance(open_store(tmp_path, max_bytes=1), CappedStore)
    assert not isinstance(open_store(tmp_path), CappedStore)
    for url in ("s3://bucket/prefix", "memory://x"):
        with pytest.raises(Exception, match="max_bytes holds for file:// stores only"):
            open_store(url, max_bytes=1)


def test_one_process_at_a_time_makes_room(store: CappedStore, root: Path) -> None:
    other = CappedStore(str(root), LIMIT, timeout_s=0.1)
    with store.evicting(), pytest.raises(StorageError), other.evicting():
        pass
    with other.evicting():
        pass


WRITER = """
import random, sys
from tplayout.errors import OverLimit
from tplayout.storage.capped import CappedStore
store = CappedStore(sys.argv[1], int(sys.argv[2]))
draw = random.Random(int(sys.argv[3]))
print("ready", flush=True)
while True:
    key = f"ns/{draw.randrange(8):02x}/{draw.randrange(40)}"
    try:
        store.put(key, bytes(draw.randrange(1, 16) * 1024))
    except OverLimit:
        with store.evicting():
            store.delete([info.key for info in store.list("ns/") if draw.random() < 0.3])
"""


@pytest.fixture
def writer(root: Path) -> Iterator[Callable[[int], subprocess.Popen[str]]]:
    """Starts processes that write and delete without pause until they are killed."""
    started = []

    def start(seed: int) -> subprocess.Popen[str]:
        command = [sys.executable, "-c", WRITER, str(root), str(LIMIT), str(seed)]
        started.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
        assert started[-1].stdout is not None
        assert started[-1].stdout.readline() == "ready\n"
        return started[-1]

    yield start
    for process in started:
        process.kill()
        process.communicate()


def test_four_processes_that_write_and_are_killed_never_exceed_it(
    root: Path, writer: Callable[[int], subprocess.Popen[str]]
) -> None:
    """Looked at while the account is locked, when nothing that counts can move; every 0.1 s one of them is killed."""
    writers = [writer(seed) for seed in range(4)]
    draw = random.Random(5)
    end, kill_at = time.monotonic() + 4.0, time.monotonic() + 0.1
    looks = most = found = 0
    while time.monotonic() < end:
        with contextlib.suppress(FileNotFoundError), held(root / ACCOUNT):
            found = sizes(root)
            assert found <= LIMIT
            assert account(root) >= found
        looks, most = looks + 1, max(most, found)
        if time.monotonic() > kill_at:
            victim = draw.randrange(4)
            os.kill(writers[victim].pid, signal.SIGKILL)
            writers[victim].wait()
            writers[victim] = writer(100 + looks)
            kill_at = time.monotonic() + 0.1
    assert looks > 20
    assert most > LIMIT // 2
