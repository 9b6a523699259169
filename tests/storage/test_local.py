"""file://: permissions, links, full and read-only disks, directories that vanish, file systems that hang."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.rights import unprivileged
from tplayout.errors import Forbidden, NotFound, StorageError, StorageErrorKind, StorageFull, StorageTimeout, Unusable
from tplayout.storage.base import is_temporary, target_of, temporary_name
from tplayout.storage.local import LocalStore

MIB = 1 << 20


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "cache" / "kv"


@pytest.fixture
def store(root: Path) -> LocalStore:
    return LocalStore(str(root))


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 2 MiB and 20 inodes."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("NOT TESTED: only root can mount the small tmpfs that a full disk is tested on")
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-o", "size=2m,nr_inodes=20"]
    done = subprocess.run(
        ["mount", "-t", "tmpfs", *options, "tplayout-test", str(disk)], capture_output=True, text=True
    )
    if done.returncode:
        pytest.skip(f"NOT TESTED: this machine does not let us mount a tmpfs: {done.stderr.strip()}")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    old = os.umask(mask)
    try:
        yield
    finally:
        os.umask(old)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def files(root: Path) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())


@pytest.mark.parametrize("mask", [0o000, 0o022, 0o077, 0o377, 0o777])
def test_files_and_directories_are_private_whatever_the_umask(store: LocalStore, root: Path, mask: int) -> None:
    with umask(mask):
        store.put("ns/ab/key.0", b"x")
    assert mode(root / "ns/ab/key.0") == 0o600
    assert [mode(path) for path in (root.parent, root, root / "ns", root / "ns/ab")] == [0o700] * 4
    assert store.get("ns/ab/key.0") == b"x"


def test_a_directory_that_was_there_keeps_its_mode(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir(mode=0o755)
    root.chmod(0o755)
    LocalStore(str(root)).put("ns/k", b"x")
    assert (mode(root), mode(root / "ns")) == (0o755, 0o700)


def test_nothing_is_touched_before_the_first_put(store: LocalStore, root: Path) -> None:
    assert list(store.list()) == []
    assert store.exists(["k"]) == [False]
    store.delete(["k"])
    with pytest.raises(NotFound):
        store.get("k")
    assert not root.parent.exists()


def test_a_write_leaves_no_temporary(store: LocalStore, root: Path) -> None:
    store.put("ns/k", bytes(3 * MIB))
    assert files(root) == ["ns/k"]


def test_temporaries_are_recognised_and_never_listed(store: LocalStore, root: Path) -> None:
    store.put("ns/ab/k.0.safetensors", b"x")
    left = root / "ns/ab/.k.0.safetensors.4711.0123456789abcdef.tmp"
    left.write_bytes(b"half")
    (root / "ns/ab/.hidden").write_bytes(b"foreign")
    (root / "ns/ab/a b").write_bytes(b"foreign")
    assert [info.key for info in store.list()] == ["ns/ab/k.0.safetensors"]
    assert [(info.key, info.size) for info in store.temporaries()] == [(str(left.relative_to(root)), 4)]
    store.remove_temporaries([str(left.relative_to(root))])
    assert files(root) == ["ns/ab/.hidden", "ns/ab/a b", "ns/ab/k.0.safetensors"]


def test_files_that_no_key_can_name_are_strangers(store: LocalStore, root: Path) -> None:
    assert list(store.strangers()) == []
    store.put("ns/aa/k", b"data")
    (root / "ns" / "aa" / ".k.1.0123456789abcdef.tmp").write_bytes(b"half")
    (root / "two words.txt").write_bytes(b"12345")
    (root / ".hidden" / "in here").mkdir(parents=True)
    (root / ".hidden" / "in here" / "k").write_bytes(b"")
    (root / "ns" / "link").symlink_to("aa/k")
    os.mkfifo(root / "ns" / "pipe")
    found = {info.key: info.size for info in store.strangers()}
    assert found.keys() == {"two words.txt", ".hidden/in here/k", "ns/link", "ns/pipe"}
    assert found["two words.txt"] == 5
    assert [info.key for info in store.list()] == ["ns/aa/k"]


def test_a_failed_write_removes_its_temporary(store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def rename(*args: object, **kwargs: object) -> None:
        assert [is_temporary(Path(path).name) for path in files(root)] == [True]
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(StorageError, match="ns/k") as caught:
        store.put("ns/k", bytes(100))
    assert caught.value.kind is StorageErrorKind.UNAVAILABLE
    assert files(root) == []


def test_deleting_removes_empty_directories(store: LocalStore, root: Path) -> None:
    store.put("ns/ab/a", b"")
    store.put("ns/ab/b", b"")
    store.delete(["ns/ab/a"])
    assert (root / "ns/ab").is_dir()
    store.delete(["ns/ab/b"])
    assert list(root.iterdir()) == []


def test_directories_removed_while_serving_come_back(store: LocalStore, root: Path) -> None:
    store.put("ns/k", b"1")
    shutil.rmtree(root.parent)
    with pytest.raises(NotFound):
        store.get("ns/k")
    assert list(store.list()) == []
    store.put("ns/k", b"2")
    assert store.get("ns/k") == b"2"


def test_writers_survive_directories_removed_all_the_time(store: LocalStore, root: Path) -> None:
    stop = threading.Event()

    def remove() -> None:
        while not stop.is_set():
            shutil.rmtree(root, ignore_errors=True)

    thread = threading.Thread(target=remove)
    thread.start()
    try:
        for turn in range(200):
            with contextlib.suppress(StorageError):  # Unavailable, if it was unlucky five times
                store.put(f"ns/{turn % 5}/k", b"x")
    finally:
        stop.set()
        thread.join()
    store.put("ns/k", b"x")
    assert store.get("ns/k") == b"x"


def test_deletes_and_puts_in_one_directory_do_not_hurt_each_other(root: Path) -> None:
    failures: list[Exception] = []

    def work(number: int) -> None:
        try:
            with LocalStore(str(root)) as store:
                for _ in range(100):
                    store.put(f"ns/ab/{number}", b"x")
                    store.delete([f"ns/ab/{number}"])
        except Exception as exc:
            failures.append(exc)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


class TestLinks:
    """Nothing in the store leads out of it. The root itself may be a link: the user named it."""

    @pytest.fixture
    def outside(self, tmp_path: Path) -> Path:
        outside = tmp_path / "outside"
        outside.mkdir()
        (outside / "secret").write_bytes(b"secret")
        return outside

    def calls(self, store: LocalStore, key: str) -> list[Callable[[], object]]:
        return [
            lambda: store.get(key),
            lambda: store.get_into(key, bytearray(10)),
            lambda: store.get_range(key, 0, 1),
        ]

    def test_a_linked_directory_is_not_followed(self, store: LocalStore, root: Path, outside: Path) -> None:
        store.put("k", b"")
        (root / "ns").symlink_to(outside)
        for call in [*self.calls(store, "ns/secret"), lambda: store.put("ns/new", b"x")]:
            with pytest.raises(Forbidden, match="link"):
                call()
        assert store.exists(["ns/secret"]) == [False]
        assert [info.key for info in store.list()] == ["k"]
        assert list(store.list("ns/")) == []
        store.delete(["ns/secret"])
        assert files(outside) == ["secret"]

    def test_a_linked_file_is_not_read_and_is_replaced(self, store: LocalStore, root: Path, outside: Path) -> None:
        store.put("ns/k", b"")
        (root / "ns/link").symlink_to(outside / "secret")
        for call in self.calls(store, "ns/link"):
            with pytest.raises(Forbidden, match="link"):
                call()
        assert store.exists(["ns/link"]) == [False]
        assert [info.key for info in store.list()] == ["ns/k"]
        store.put("ns/link", b"ours")
        assert store.get("ns/link") == b"ours"
        assert (outside / "secret").read_bytes() == b"secret"

    def test_deleting_a_link_leaves_its_target(self, store: LocalStore, root: Path, outside: Path) -> None:
        store.put("ns/k", b"")
        (root / "ns/link").symlink_to(outside / "secret")
        store.delete(["ns/link"])
        assert files(outside) == ["secret"]
        assert not (root / "ns/link").is_symlink()

    def test_the_root_may_be_a_link(self, tmp_path: Path, outside: Path) -> None:
        (tmp_path / "link").symlink_to(outside)
        LocalStore(str(tmp_path / "link")).put("ns/k", b"x")
        assert (outside / "ns/k").read_bytes() == b"x"

    def test_pipes_and_sockets_are_no_objects(self, store: LocalStore, root: Path) -> None:
        store.put("ns/k", b"")
        os.mkfifo(root / "ns/pipe")
        with socket.socket(socket.AF_UNIX) as listener:
            here = os.getcwd()
            os.chdir(root / "ns")  # a socket's path is short
            try:
                listener.bind("socket")
            finally:
                os.chdir(here)
            for name in ("ns/pipe", "ns/socket"):
                for call in self.calls(store, name):
                    with pytest.raises(Forbidden):
                        call()
            assert store.exists(["ns/pipe", "ns/socket"]) == [False, False]
            assert [info.key for info in store.list()] == ["ns/k"]


@pytest.mark.parametrize("below", ["", "/and/below"])
def test_a_file_where_the_root_should_be_is_no_miss(tmp_path: Path, below: str) -> None:
    """Nobody stores there until a person changes it; a missing directory is made by the first put."""
    (tmp_path / "file").write_text("mine")
    store = LocalStore(f"{tmp_path}/file{below}")
    for call in (
        lambda: store.get("ns/k"),
        lambda: store.get_range("ns/k", 0, 1),
        lambda: store.get_into("ns/k", bytearray(1)),
        lambda: store.put("ns/k", b"x"),
        lambda: store.exists(["ns/k"]),
        lambda: list(store.list()),
        lambda: list(store.strangers()),
        lambda: store.delete(["ns/k"]),
        lambda: store.touch(["ns/k"]),
    ):
        with pytest.raises(Unusable, match="is a file, or below one, and a store is a directory"):
            call()
    assert (tmp_path / "file").read_text() == "mine"


def test_a_directory_is_no_object(store: LocalStore, root: Path) -> None:
    store.put("ns/ab/k", b"x")
    with pytest.raises(NotFound):
        store.get("ns/ab")
    with pytest.raises(NotFound):
        store.get("ns/ab/k/below")
    store.delete(["ns/ab"])
    for key in ("ns/ab", "ns/ab/k/below"):
        with pytest.raises(StorageError, match="same name") as caught:
            store.put(key, b"x")
        assert caught.value.kind is StorageErrorKind.EXISTS
    assert files(root) == ["ns/ab/k"]


class TestDisk:
    def test_a_full_disk(self, small_disk: Path) -> None:
        store = LocalStore(str(small_disk / "store"))
        store.put("ns/a", bytes(MIB))
        with pytest.raises(StorageFull, match="No space left") as caught:
            store.put("ns/b", bytes(2 * MIB))
        assert "tplayout gc" in str(caught.value)
        assert files(small_disk) == ["store/ns/a"]
        with pytest.raises(StorageFull):
            store.put("ns/a", bytes(2 * MIB))
        assert store.get("ns/a") == bytes(MIB)
        store.delete(["ns/a"])
        store.put("ns/b", bytes(MIB))
        assert store.get("ns/b") == bytes(MIB)

    def test_no_inodes_left(self, small_disk: Path) -> None:
        store = LocalStore(str(small_disk / "store"))
        fill = [f"ns/{number}/k" for number in range(30)]
        with pytest.raises(StorageFull):
            _ = [store.put(key, b"") for key in fill]
        stored = [info.key for info in store.list()]
        store.delete(stored[:3])
        store.put(stored[0], b"again")
        assert list(store.temporaries()) == []

    def test_a_read_only_file_system(self, small_disk: Path) -> None:
        store = LocalStore(str(small_disk / "store"))
        store.put("ns/k", b"x")
        subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
        with pytest.raises(Forbidden, match="read-only"):
            store.put("ns/new", b"x")
        with pytest.raises(Forbidden):
            store.delete(["ns/k"])
        assert store.get("ns/k") == b"x"


def test_permission_denied(tmp_path: Path) -> None:
    root = tmp_path / "locked"
    store = LocalStore(str(root))
    store.put("ns/k", b"x")
    root.chmod(0o000)
    try:
        with unprivileged(tmp_path):
            for call in (
                lambda: store.put("ns/new", b"x"),
                lambda: store.get("ns/k"),
                lambda: store.exists(["ns/k"]),
                lambda: list(store.list()),
                lambda: store.delete(["ns/k"]),
            ):
                with pytest.raises(Forbidden, match="owner and mode"):
                    call()
    finally:
        root.chmod(0o700)


class TestHanging:
    """A file system that hangs: the calls block in the kernel, as on a dead NFS server."""

    @pytest.fixture
    def stuck(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], threading.Event]]:
        """stuck(name): from now on os.<name> blocks until the returned event is set.

        Except a read that must not wait (preadv with RWF_NOWAIT): there the kernel says that it would have to.
        """
        events: list[threading.Event] = []

        def block(name: str) -> threading.Event:
            event, original = threading.Event(), getattr(os, name)

            def blocking(*args: object, **kwargs: object) -> object:
                if name == "preadv" and len(args) == 4:
                    raise BlockingIOError
                event.wait(60)
                return original(*args, **kwargs)

            monkeypatch.setattr(os, name, blocking)
            events.append(event)
            return event

        yield block
        for event in events:
            event.set()

    @pytest.mark.parametrize("name", ["open", "preadv", "pread", "write", "stat", "rename", "scandir", "unlink"])
    def test_every_verb_ends_at_its_deadline(
        self, store: LocalStore, stuck: Callable[[str], threading.Event], name: str
    ) -> None:
        store.put("ns/k", bytes(10))
        stuck(name)
        timeouts = 0
        for call in (
            lambda: store.get("ns/k", deadline=0.1),
            lambda: store.get_into("ns/k", bytearray(10), deadline=0.1),
            lambda: store.get_range("ns/k", 0, 5, deadline=0.1),
            lambda: store.put("ns/k", bytes(10), deadline=0.1),
            lambda: store.exists(["ns/k"], deadline=0.1),
            lambda: list(store.list(deadline=0.1)),
            lambda: store.delete(["ns/other", "ns/k"], deadline=0.1),
        ):
            start = time.monotonic()
            try:
                call()
            except StorageTimeout as exc:
                timeouts += 1
                assert "0.1 s" in str(exc)  # noqa: PT017
            assert time.monotonic() - start < 5  # the call is stuck for a minute
        assert timeouts

    def test_a_late_read_does_not_touch_the_buffer(
        self, store: LocalStore, stuck: Callable[[str], threading.Event]
    ) -> None:
        store.put("k", b"x" * 100)
        event = stuck("preadv")
        buf = bytearray(100)
        with pytest.raises(StorageTimeout):
            store.get_into("k", buf, deadline=0.1)
        event.set()
        time.sleep(0.2)
        assert buf == bytes(100)
        buf.extend(b"the buffer is not exported any more")

    def test_a_late_write_is_not_published(
        self, store: LocalStore, root: Path, stuck: Callable[[str], threading.Event]
    ) -> None:
        store.put("k", b"old")
        event = stuck("write")
        buf = bytearray(b"new")
        with pytest.raises(StorageTimeout):
            store.put("k", buf, deadline=0.1)
        buf[:] = b"bad"  # the caller's memory holds something else by then
        event.set()
        time.sleep(0.2)
        assert store.get("k") == b"old"
        assert files(root) == ["k"]

    def test_the_store_works_again_afterwards(self, store: LocalStore, stuck: Callable[[str], threading.Event]) -> None:
        store.put("k", b"x")
        event = stuck("open")
        for _ in range(80):  # more than there are threads
            with pytest.raises(StorageTimeout):
                store.get("k", deadline=0.005)
        event.set()
        assert store.get("k", deadline=10) == b"x"

    def test_a_hung_call_does_not_hold_up_the_exit_of_the_process(self, root: Path) -> None:
        code = f"""
import os, time
from tplayout.errors import StorageTimeout
from tplayout.storage.local import LocalStore
store = LocalStore({str(root)!r})
store.put("k", b"x")
def preadv(fd, buffers, offset, flags=0):
    if flags:
        raise BlockingIOError
    time.sleep(60)
os.preadv = preadv
try:
    store.get_into("k", bytearray(1), deadline=0.1)
except StorageTimeout:
    print("timeout")
"""
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=50)
        assert (done.stdout, done.returncode) == ("timeout\n", 0)
        assert time.monotonic() - start < 20


class TestReadingFromThePageCache:
    """get_into reads what is cached straight into the caller's memory, and everything else through a buffer."""

    CONTENT = bytes(range(256)) * 20_000  # several pieces

    @pytest.fixture
    def cached(self, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], int]], list[int]]:
        """cached(f): a read that must not wait finds f(offset) bytes; returns the offsets of those that may wait."""
        original = os.preadv

        def install(answer: Callable[[int], int]) -> list[int]:
            waited: list[int] = []

            def preadv(fd: int, buffers: list[memoryview], offset: int, flags: int = 0) -> int:
                if not flags:
                    waited.append(offset)
                    return original(fd, buffers, offset)
                return original(fd, [buffers[0][: answer(offset)]], offset)

            monkeypatch.setattr(os, "preadv", preadv)
            return waited

        return install

    @pytest.mark.parametrize("answer", [lambda at: MIB * 100, lambda at: 70_001, lambda at: 5000 if at < MIB else 0])
    def test_any_part_may_be_cached(
        self,
        store: LocalStore,
        cached: Callable[[Callable[[int], int]], list[int]],
        answer: Callable[[int], int],
    ) -> None:
        store.put("k", self.CONTENT)
        waited = cached(answer)
        buf = bytearray(len(self.CONTENT) + 7)
        assert store.get_into("k", buf) == len(self.CONTENT)
        assert buf == self.CONTENT + bytes(7)
        assert bool(waited) == (answer(2 * MIB) == 0)

    @pytest.mark.parametrize("error", [BlockingIOError(11, "would wait"), OSError(95, "not supported")])
    def test_a_file_system_that_always_waits(
        self, store: LocalStore, cached: Callable[[Callable[[int], int]], list[int]], error: OSError
    ) -> None:
        store.put("k", self.CONTENT)

        def refuse(offset: int) -> int:
            raise error

        cached(refuse)
        buf = bytearray(len(self.CONTENT))
        assert store.get_into("k", buf) == len(self.CONTENT)
        assert buf == self.CONTENT

    def test_a_file_that_grows_meanwhile_is_read_as_long_as_it_was(
        self, store: LocalStore, root: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        store.put("k", b"old")
        original = os.preadv

        def preadv(fd: int, *args: object) -> int:
            with (root / "k").open("ab") as file:
                file.write(b" and more")
            return original(fd, *args)  # type: ignore[arg-type]

        monkeypatch.setattr(os, "preadv", preadv)
        buf = bytearray(20)
        assert store.get_into("k", buf) == 3
        assert buf == b"old" + bytes(17)


def test_a_relative_root_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="absolute"):
        LocalStore("cache")


@pytest.mark.parametrize("key", ["x", "ab/cd/a.0.safetensors", "ns/namespace.json"])
def test_a_temporary_tells_what_is_written(key: str) -> None:
    parent, slash, name = key.rpartition("/")
    assert target_of(parent + slash + temporary_name(name)) == key
