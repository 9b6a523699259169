"""The storage contract: one suite, run on every backend. A new backend is a subclass with a `place`."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tplayout.errors import NotFound, StorageError, StorageErrorKind, StorageTimeout, Unavailable
from tplayout.storage import Store, open_store

MIB = 1 << 20

BAD_KEYS = [
    "",
    "/",
    "/etc/passwd",
    "a/",
    "a//b",
    ".",
    "..",
    "../a",
    "a/../b",
    "a/..",
    "a/./b",
    ".hidden",
    "a/.b.1.0123456789abcdef.tmp",
    "a\\b",
    "a\0b",
    "a\nb",
    "a b",
    "a*",
    "a?versionId=1",
    "ä",
    "a\ud800",
    "x" * 201,
    "/".join(["x" * 100] * 11),
]


@dataclass
class Place:
    """Where a backend's test objects go. secrets: must never be shown."""

    url: str
    options: dict[str, Any] = field(default_factory=dict)
    secrets: tuple[str, ...] = ()

    def open(self, timeout_s: float = 30.0) -> Store:
        return open_store(self.url, self.options, timeout_s)

    def python(self, code: str) -> subprocess.Popen[str]:
        """Another process that has this place open as `store`."""
        setup = "import json, os, sys; from tplayout.storage import open_store\n"
        setup += "url, options = json.loads(os.environ['PLACE']); store = open_store(url, options)\n"
        env = {**os.environ, "PLACE": json.dumps([self.url, self.options]), "PYTHONPATH": os.pathsep.join(sys.path)}
        return subprocess.Popen([sys.executable, "-c", setup + code], env=env, stdout=subprocess.PIPE, text=True)


class StoreContract:
    @pytest.fixture
    def place(self) -> Place:
        raise NotImplementedError

    @pytest.fixture
    def store(self, place: Place) -> Iterator[Store]:
        with place.open() as store:
            yield store

    def keys(self, store: Store, prefix: str = "") -> list[str]:
        return sorted(info.key for info in store.list(prefix))

    def test_an_object_reads_back_as_written(self, store: Store) -> None:
        data = random.Random(1).randbytes(100_003)
        store.put("ns/ab/object.0.safetensors", data)
        buf = bytearray(100_003)
        assert store.get("ns/ab/object.0.safetensors") == data
        assert store.get_into("ns/ab/object.0.safetensors", memoryview(buf)) == len(data)
        assert buf == data

    def test_any_buffer_can_be_put(self, store: Store) -> None:
        for kind in (bytes, bytearray, memoryview, lambda data: memoryview(data).cast("H")):
            store.put("k", kind(b"0123456789"))
            assert store.get("k") == b"0123456789"

    def test_a_slice_of_a_larger_buffer_can_be_put_and_filled(self, store: Store) -> None:
        memory = bytearray(b"..payload..")
        store.put("k", memoryview(memory)[2:9])
        target = bytearray(12)
        assert store.get_into("k", memoryview(target)[3:10]) == 7
        assert target == b"\0\0\0payload\0\0"

    def test_an_empty_object(self, store: Store) -> None:
        store.put("empty", b"")
        assert store.get("empty") == b""
        assert store.get_into("empty", bytearray(4)) == 0
        assert store.get_into("empty", bytearray()) == 0
        assert store.exists(["empty"]) == [True]
        assert [info.size for info in store.list("empty")] == [0]

    def test_a_64_mib_object(self, store: Store) -> None:
        data = random.Random(2).randbytes(64 * MIB)
        store.put("large", memoryview(data))
        buf = bytearray(64 * MIB)
        assert store.get_into("large", buf) == len(data)
        assert buf == data
        assert store.get_range("large", 33 * MIB + 5, 7) == data[33 * MIB + 5 : 33 * MIB + 12]

    def test_get_into_takes_an_object_shorter_than_the_buffer(self, store: Store) -> None:
        data = random.Random(3).randbytes(MIB + 1)
        store.put("k", data)
        for room in (1, 5 * MIB, 40 * MIB):
            buf = bytearray(len(data) + room)
            assert store.get_into("k", buf) == len(data)
            assert buf[: len(data)] == data

    def test_get_into_refuses_a_buffer_that_is_too_small(self, store: Store) -> None:
        for size in (101, 33 * MIB):
            store.put("k", bytes(size))
            with pytest.raises(StorageError, match="'k'") as caught:
                store.get_into("k", bytearray(size - 1))
            assert caught.value.kind is StorageErrorKind.TOO_LARGE
            assert str(size) in str(caught.value)

    def test_get_with_a_cap(self, store: Store) -> None:
        store.put("k", bytes(1000))
        assert store.get("k", max_bytes=1000) == bytes(1000)
        with pytest.raises(StorageError) as caught:
            store.get("k", max_bytes=999)
        assert caught.value.kind is StorageErrorKind.TOO_LARGE

    def test_ranges(self, store: Store) -> None:
        store.put("k", b"0123456789")
        assert store.get_range("k", 0, 10) == b"0123456789"
        assert store.get_range("k", 3, 4) == b"3456"
        assert store.get_range("k", 9, 1) == b"9"
        assert store.get_range("k", 3, 0) == b""

    def test_a_range_past_the_end_is_an_error(self, store: Store) -> None:
        store.put("k", b"0123456789")
        for start, length in ((0, 11), (5, 6), (9, 2), (10, 1), (500, 5), (0, 1 << 60)):
            with pytest.raises(StorageError) as caught:
                store.get_range("k", start, length)
            assert caught.value.kind is StorageErrorKind.SHORT_READ, (start, length)

    def test_negative_ranges_are_a_mistake(self, store: Store) -> None:
        with pytest.raises(ValueError, match="negative"):
            store.get_range("k", -1, 5)
        with pytest.raises(ValueError, match="negative"):
            store.get_range("k", 1, -5)

    def test_a_missing_object_is_not_found(self, store: Store) -> None:
        for call in (
            lambda: store.get("ns/none"),
            lambda: store.get("ns/none", max_bytes=10),
            lambda: store.get_into("ns/none", bytearray(10)),
            lambda: store.get_into("ns/none", bytearray(40 * MIB)),
            lambda: store.get_range("ns/none", 0, 1),
        ):
            with pytest.raises(NotFound, match="ns/none") as caught:
                call()
            assert store.url in str(caught.value)

    def test_replacing_by_equal_bytes_is_success(self, store: Store) -> None:
        """[M33]"""
        for _ in range(3):
            store.put("ns/k", b"same")
        assert store.get("ns/k") == b"same"
        assert self.keys(store) == ["ns/k"]

    def test_replacing_shows_the_new_object(self, store: Store) -> None:
        store.put("k", b"old content")
        store.put("k", b"new")
        assert store.get("k") == b"new"
        assert [info.size for info in store.list()] == [3]

    def test_bad_names_are_refused_before_anything_happens(self, store: Store) -> None:
        verbs: list[Callable[[str], object]] = [
            store.get,
            lambda key: store.get_into(key, bytearray(1)),
            lambda key: store.get_range(key, 0, 1),
            lambda key: store.put(key, b"x"),
            lambda key: store.exists(["fine", key]),
            lambda key: store.delete(["fine", key]),
        ]
        for key in BAD_KEYS:
            for verb in verbs:
                with pytest.raises(StorageError) as caught:
                    verb(key)
                assert caught.value.kind is StorageErrorKind.INVALID_NAME, key
        assert self.keys(store) == []

    def test_bad_prefixes_are_refused(self, store: Store) -> None:
        for prefix in ("/", "/a", "../", "a/../", "a//", ".a", "a\0"):
            with pytest.raises(StorageError) as caught:
                list(store.list(prefix))
            assert caught.value.kind is StorageErrorKind.INVALID_NAME, prefix

    def test_names_are_plain_text(self, store: Store) -> None:
        names = ["A", "a", "n.s/x=1@2+3_4-5/6.7", "-dash", "x" * 200, "a.tmp", "d/a.1.2.tmp"]
        for name in names:
            store.put(name, name.encode())
        assert self.keys(store) == sorted(names)
        assert [store.get(name) for name in names] == [name.encode() for name in names]

    def test_listing_by_prefix(self, store: Store) -> None:
        for key in ("ns1/aa/x.0", "ns1/aa/y.0", "ns1/ab/z.0", "ns1/namespace.json", "ns2/aa/x.0", "top"):
            store.put(key, key.encode())
        assert len(self.keys(store)) == 6
        assert self.keys(store, "ns1/") == ["ns1/aa/x.0", "ns1/aa/y.0", "ns1/ab/z.0", "ns1/namespace.json"]
        assert self.keys(store, "ns1/a") == ["ns1/aa/x.0", "ns1/aa/y.0", "ns1/ab/z.0"]
        assert self.keys(store, "ns1/aa/x") == ["ns1/aa/x.0"]
        assert self.keys(store, "ns1/aa/x.0") == ["ns1/aa/x.0"]
        assert len(self.keys(store, "ns")) == 5
        assert self.keys(store, "none/") == []
        assert self.keys(store, "ns1/aa/x.0/deeper") == []

    def test_listing_says_size_and_time(self, store: Store) -> None:
        before = time.time()
        store.put("ns/k", bytes(1234))
        (info,) = store.list("ns/")
        assert (info.key, info.size) == ("ns/k", 1234)
        assert info.modified is not None
        assert before - 3 <= info.modified <= time.time() + 3

    def test_listing_an_empty_store(self, store: Store) -> None:
        assert self.keys(store) == []
        assert list(store.temporaries()) == []

    def test_listing_more_than_a_page(self, store: Store) -> None:
        names = [f"p/{i % 7}/{i:05}" for i in range(self.page_objects)]
        for name in names:
            store.put(name, b"")
        assert self.keys(store) == sorted(names)
        store.delete(names)
        assert self.keys(store) == []

    page_objects = 1100

    def test_exists_answers_in_order(self, store: Store) -> None:
        store.put("ns/a", b"")
        store.put("ns/b", b"1")
        asked = ["ns/b", "ns/none", "ns/a", "other/a", "ns", "ns/a/below", "ns/a"]
        assert store.exists(asked) == [True, False, True, False, False, False, True]
        assert store.exists([]) == []

    def test_exists_of_many(self, store: Store) -> None:
        store.put("ns/5", b"")
        assert store.exists([f"ns/{i}" for i in range(300)]) == [i == 5 for i in range(300)]

    def test_delete(self, store: Store) -> None:
        store.put("ns/a", b"")
        store.put("ns/b", b"")
        store.delete(["ns/a", "ns/none", "no/such"])
        assert self.keys(store) == ["ns/b"]
        assert store.exists(["ns/a", "ns/b"]) == [False, True]
        store.delete(["ns/a"])
        store.delete([])
        with pytest.raises(NotFound):
            store.get("ns/a")
        store.put("ns/a", b"again")
        assert store.get("ns/a") == b"again"

    def test_a_second_store_sees_everything_at_once(self, store: Store, place: Place) -> None:
        self.keys(store)
        store.exists(["ns/new"])
        with place.open() as other:
            other.put("ns/new", b"x")
            assert store.exists(["ns/new"]) == [True]
            assert self.keys(store) == ["ns/new"]
            assert store.get("ns/new") == b"x"
            other.put("ns/new", b"changed")
            assert store.get("ns/new") == b"changed"
            other.delete(["ns/new"])
            assert store.exists(["ns/new"]) == [False]
            assert self.keys(store) == []

    def test_readers_see_one_writer_or_another_never_a_mix(self, store: Store) -> None:
        """[M32] [M33]"""
        size, rounds = 3 * MIB, 6
        stop = threading.Event()
        wrong: list[bytes] = []
        store.put("k", bytes([0]) * size)

        def write(value: int) -> None:
            for _ in range(rounds):
                store.put("k", bytes([value]) * size)

        def read() -> None:
            buf = bytearray(size)
            while not stop.is_set():
                assert store.get_into("k", buf) == size
                if buf.count(buf[0]) != size:
                    wrong.append(bytes(set(buf)))

        writers = [threading.Thread(target=write, args=(value,)) for value in (1, 2, 3)]
        readers = [threading.Thread(target=read) for _ in range(2)]
        for thread in writers + readers:
            thread.start()
        for thread in writers:
            thread.join()
        stop.set()
        for thread in readers:
            thread.join()
        assert wrong == []
        assert self.keys(store) == ["k"]
        assert list(store.temporaries()) == []

    def test_many_threads(self, store: Store) -> None:
        failures: list[Exception] = []

        def work(number: int) -> None:
            try:
                for turn in range(5):
                    key = f"t/{number}/{turn}"
                    data = f"{number} {turn}".encode() * 1000
                    store.put(key, data)
                    assert store.get(key) == data
                    assert store.exists([key, key + "x"]) == [True, False]
            except Exception as exc:
                failures.append(exc)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(16)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert len(self.keys(store)) == 80

    def test_what_is_written_here_is_no_stranger(self, store: Store) -> None:
        store.put("ns/aa/k", b"data")
        assert list(store.strangers()) == []

    def test_only_temporaries_can_be_removed_as_such(self, store: Store) -> None:
        store.put("ns/k", b"")
        for key in ("ns/k", "../.x.1.0123456789abcdef.tmp", ".x.tmp", "ns"):
            with pytest.raises(StorageError) as caught:
                store.remove_temporaries([key])
            assert caught.value.kind is StorageErrorKind.INVALID_NAME
        store.remove_temporaries(["ns/.gone.1.0123456789abcdef.tmp"])
        assert self.keys(store) == ["ns/k"]

    def test_a_deadline_that_has_passed(self, store: Store) -> None:
        for call in self.verbs(store, 0.0) + self.verbs(store, -1.0):
            with pytest.raises(StorageTimeout):
                call()

    def test_a_tiny_deadline_ends_the_call(self, store: Store) -> None:
        store.put("k", bytes(100))
        for call in self.verbs(store, 1e-6):
            start = time.monotonic()
            with contextlib.suppress(StorageTimeout):
                call()
            assert time.monotonic() - start < 10

    def verbs(self, store: Store, deadline: float) -> list[Callable[[], object]]:
        """One call of each verb with that deadline."""
        return [
            lambda: store.get("k", deadline=deadline),
            lambda: store.get_into("k", bytearray(100), deadline=deadline),
            lambda: store.get_range("k", 1, 5, deadline=deadline),
            lambda: store.put("k", bytes(100), deadline=deadline),
            lambda: store.exists(["k"], deadline=deadline),
            lambda: list(store.list(deadline=deadline)),
            lambda: store.delete(["other"], deadline=deadline),
        ]

    def test_a_closed_store_says_so(self, place: Place) -> None:
        store = place.open()
        store.put("k", bytes(100))
        store.close()
        store.close()
        for call in self.verbs(store, 5.0):
            with pytest.raises(Unavailable, match="closed"):
                call()

    def test_a_forked_process_is_refused(self, store: Store) -> None:
        store.put("k", bytes(100))
        child = os.fork()
        if not child:
            try:
                store.get("k")
            except Unavailable as exc:
                os._exit(17 if "fork" in str(exc) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 17

    def test_no_secret_is_shown(self, store: Store, place: Place) -> None:
        store.put("k", b"")
        texts = [repr(store), str(store), store.url]
        for call in (
            lambda: store.get("none"),
            lambda: store.get("../x"),
            lambda: store.get("k", deadline=0.0),
            lambda: store.get_range("k", 5, 5),
        ):
            with pytest.raises(StorageError) as caught:
                call()
            texts += [str(caught.value), repr(caught.value)]
        for secret in place.secrets:
            assert all(secret not in text for text in texts)

    def test_a_store_is_not_pickled(self, store: Store) -> None:
        import pickle

        with pytest.raises(TypeError, match="credentials"):
            pickle.dumps(store)


class SharedContract(StoreContract):
    """And what holds of a backend that other processes see: of every one but memory."""

    def test_an_object_of_another_process_is_seen_at_once(self, store: Store, place: Place) -> None:
        assert self.keys(store) == []
        process = place.python("store.put('ns/new', b'x' * 1000)")
        assert process.wait(60) == 0
        assert store.exists(["ns/new"]) == [True]
        assert [(info.key, info.size) for info in store.list("ns/")] == [("ns/new", 1000)]
        assert store.get("ns/new") == b"x" * 1000

    def test_a_killed_writer_leaves_no_visible_object(self, store: Store, place: Place) -> None:
        """[M32]"""
        size = 8 * MIB
        for attempt in range(3):
            process = place.python(
                "for i in range(1000):\n"
                f"    store.put(f'w/{attempt}-{{i}}', bytes([i % 256]) * {size})\n"
                "    print(i, flush=True)"
            )
            assert process.stdout is not None
            assert process.stdout.readline() == "0\n"  # one object is there, and the next one is being written
            time.sleep(random.uniform(0.05, 0.3))
            process.send_signal(signal.SIGKILL)
            process.wait()
        time.sleep(0.5)  # a server notices a broken connection a moment later
        objects = list(store.list("w/"))
        assert len(objects) >= 3
        for info in objects:
            data = store.get(info.key)
            assert info.size == len(data) == size
            assert data == data[:1] * size
        left = [info.key for info in store.temporaries()]
        store.remove_temporaries(left)
        assert list(store.temporaries()) == []


class TestMemory(StoreContract):
    @pytest.fixture
    def place(self) -> Place:
        return Place(f"memory://tests/{uuid.uuid4().hex}")


class TestLocal(SharedContract):
    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        return Place(f"file://{tmp_path}/store")


class TestCapped(SharedContract):
    """A local store under a limit that it does not reach."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        class Capped(Place):
            def open(self, timeout_s: float = 30.0) -> Store:
                return open_store(self.url, self.options, timeout_s, max_bytes=1 << 30)

        return Capped(f"file://{tmp_path}/store")


class TestWithoutFaults(SharedContract):
    """The fault-injecting wrapper with no faults keeps the contract."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        from fault_store import FaultStore

        class Wrapped(Place):
            def open(self, timeout_s: float = 30.0) -> Store:
                return FaultStore(super().open(timeout_s))

        return Wrapped(f"file://{tmp_path}/store")


def _s3_place(server: Any) -> Place:
    return Place(f"{server.url}/{uuid.uuid4().hex}", server.storage_options, secrets=(server.key, server.secret))


@pytest.mark.s3
class TestRclone(SharedContract):
    page_objects = 1010

    @pytest.fixture
    def place(self, rclone_server: Any) -> Place:
        return _s3_place(rclone_server)


@pytest.mark.s3
@pytest.mark.ceph
class TestCeph(SharedContract):
    @pytest.fixture
    def place(self, ceph_server: Any) -> Place:
        return _s3_place(ceph_server)


class TestGenericRename(SharedContract):
    """The generic path of a backend that writes in place and renames (sftp, smb …), on fsspec's local files."""

    @pytest.fixture
    def place(self, tmp_path: Path) -> Place:
        from fsspec.implementations.local import LocalFileSystem

        return _generic_place(f"file://{tmp_path}/store", LocalFileSystem, f"{tmp_path}/store", "sftp", {})


@pytest.mark.s3
@pytest.mark.slow  # test_generic.py tries the same path in short
class TestGenericAsync(SharedContract):
    """The generic path of an asynchronous object store (gs, az …), on s3fs and a real server."""

    page_objects = 40

    @pytest.fixture
    def place(self, rclone_server: Any) -> Place:
        from s3fs import S3FileSystem

        place = _s3_place(rclone_server)
        config = {"response_checksum_validation": "when_required"}
        options = {**place.options, "config_kwargs": config, "use_listings_cache": False}
        return _generic_place(place.url, S3FileSystem, place.url.removeprefix("s3://"), "gs", options)


def _generic_place(url: str, kind: Any, root: str, protocol: str, options: dict[str, Any]) -> Place:
    from tplayout.storage.generic import GenericStore
    from tplayout.storage.redact import Scrubber

    class Generic(Place):
        def open(self, timeout_s: float = 30.0) -> Store:
            def connect() -> Any:
                return kind(skip_instance_cache=True, **options)

            return GenericStore(url, connect, root, protocol, Scrubber(options), timeout_s)

    public = {name: options[name] for name in ("endpoint_url", "key", "secret") if name in options}
    return Generic(url, public, secrets=tuple(str(options[n]) for n in ("key", "secret") if n in options))
