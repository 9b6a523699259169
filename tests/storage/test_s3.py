"""s3://: deadlines, retries, error kinds and transfers against a server that misbehaves on demand."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from scripted_s3 import (
    ScriptedS3,
    done_but_lost,
    drip,
    error,
    hang,
    ignoring_ranges,
    proper,
    reset,
    serve,
    slowly,
    together,
    truncated,
)

from tplayout.errors import (
    Forbidden,
    NotFound,
    StorageError,
    StorageErrorKind,
    StorageFull,
    StorageTimeout,
    Unavailable,
)
from tplayout.storage import Store, open_store
from tplayout.storage.s3 import ATTEMPTS, MAX_PUT, PART, S3Store, merged

MIB = 1 << 20


@pytest.fixture
def server() -> Iterator[ScriptedS3]:
    with ScriptedS3() as server:
        yield server


@pytest.fixture
def store(server: ScriptedS3) -> Iterator[Store]:
    with open_store("s3://bucket/kv", server.options, 20.0) as store:
        yield store


def verbs(store: Store, deadline: float) -> dict[str, Callable[[], object]]:
    return {
        "get": lambda: store.get("k", deadline=deadline),
        "get_into": lambda: store.get_into("k", bytearray(1000), deadline=deadline),
        "get_into parts": lambda: store.get_into("k", bytearray(3 * PART), deadline=deadline),
        "get_range": lambda: store.get_range("k", 1, 500, deadline=deadline),
        "put": lambda: store.put("k", bytes(1000), deadline=deadline),
        "exists": lambda: store.exists(["k", "l"], deadline=deadline),
        "list": lambda: list(store.list(deadline=deadline)),
        "delete": lambda: store.delete(["k"], deadline=deadline),
    }


BUSY_S = 5.0  # what a busy machine may add; the servers here would hang for ever


class TestDeadlines:
    def check(self, store: Store, seconds: float, names: set[str] | None = None) -> None:
        for name, call in verbs(store, seconds).items():
            if names is None or name in names:
                start = time.monotonic()
                with pytest.raises(StorageTimeout, match=f"{seconds:g} s"):
                    call()
                assert seconds - 0.01 <= time.monotonic() - start < seconds + BUSY_S, name

    def test_a_server_that_accepts_and_never_answers(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            options = {"endpoint_url": f"http://127.0.0.1:{listener.getsockname()[1]}", "key": "k", "secret": "s"}
            with open_store("s3://bucket", options) as store:
                self.check(store, 0.3)

    def test_a_server_that_takes_no_connection(self) -> None:
        with socket.create_server(("127.0.0.1", 0), backlog=0) as listener:
            address = listener.getsockname()
            waiting = [socket.socket() for _ in range(8)]
            for conn in waiting:  # fill the backlog: a further connect gets no answer
                conn.setblocking(False)
                conn.connect_ex(address)
            options = {"endpoint_url": f"http://127.0.0.1:{address[1]}", "key": "k", "secret": "s"}
            with open_store("s3://bucket", options) as store:
                self.check(store, 0.3, {"get", "put"})
            for conn in waiting:
                conn.close()

    def test_a_server_that_hangs_in_mid_service(self, server: ScriptedS3, store: Store) -> None:
        store.put("k", bytes(1000))
        server.otherwise = hang
        self.check(store, 0.3)
        server.otherwise = proper
        assert store.get("k") == bytes(1000)

    def test_ten_bytes_a_second(self, server: ScriptedS3, store: Store) -> None:
        store.put("k", bytes(1000))
        server.otherwise = drip
        self.check(store, 1.2, {"get", "get_into"})

    def test_a_server_that_is_down_for_ever(self, server: ScriptedS3, store: Store) -> None:
        server.otherwise = error("SlowDown", 503)
        start = time.monotonic()
        with pytest.raises(StorageError):
            store.get("k", deadline=0.5)
        assert time.monotonic() - start < 0.5 + BUSY_S

    def test_a_late_answer_does_not_touch_the_buffer(self, server: ScriptedS3, store: Store) -> None:
        store.put("k", b"x" * 1000)
        server.otherwise = slowly(0.5, proper)
        buf = bytearray(1000)
        with pytest.raises(StorageTimeout):
            store.get_into("k", buf, deadline=0.2)
        time.sleep(0.6)
        assert buf == bytes(1000)

    def test_a_deadline_in_mid_upload_stores_nothing(self, server: ScriptedS3, store: Store) -> None:
        server.otherwise = hang  # reads no body: the upload stops when the sockets' buffers are full
        data = bytearray(64 * MIB)
        with pytest.raises(StorageTimeout):
            store.put("k", data, deadline=0.5)
        data[:] = b"y" * len(data)
        server.stopped.set()
        time.sleep(0.2)
        assert server.objects == {}

    def test_a_hanging_store_does_not_hold_up_the_exit_of_the_process(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            code = f"""
from tplayout.errors import StorageTimeout
from tplayout.storage import open_store
options = {{"endpoint_url": "http://127.0.0.1:{listener.getsockname()[1]}", "key": "k", "secret": "s"}}
try:
    open_store("s3://bucket", options).get("k", deadline=0.3)
except StorageTimeout:
    print("timeout")
"""
            env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
            done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=50)
        assert (done.stdout, done.stderr, done.returncode) == ("timeout\n", "", 0)


class TestRetries:
    @pytest.mark.parametrize(
        "behaviour",
        [error("SlowDown", 503), error("InternalError", 500), error("Whatever", 429), reset],
        ids=["503", "500", "429", "reset"],
    )
    def test_a_passing_fault_is_not_seen(self, server: ScriptedS3, store: Store, behaviour: Any) -> None:
        store.put("k", bytes(1000))
        for verb in ("get", "get_into", "get_range", "put"):
            server.script = [behaviour, behaviour]
            verbs(store, 20)[verb]()
            assert store.get("k") == bytes(1000)

    def test_a_body_that_breaks_off_is_read_again(self, server: ScriptedS3, store: Store) -> None:
        store.put("k", b"0123456789")
        for call in (lambda: store.get("k"), lambda: store.get_into("k", bytearray(10))):
            server.script = [truncated]
            assert call() in (b"0123456789", 10)

    def test_a_put_whose_answer_is_lost_is_success(self, server: ScriptedS3, store: Store) -> None:
        server.script = [done_but_lost]
        store.put("k", b"x" * 1000)
        assert store.get("k") == b"x" * 1000

    def test_attempts_do_not_multiply(self, server: ScriptedS3, store: Store) -> None:
        server.otherwise = error("InternalError", 500)
        with pytest.raises(Unavailable):
            store.get("k")
        assert len(server.requests) == ATTEMPTS

    @pytest.mark.parametrize(
        ("code", "status"),
        [("AccessDenied", 403), ("NoSuchKey", 404), ("NoSuchBucket", 404), ("QuotaExceeded", 403), ("Odd", 400)],
    )
    def test_what_does_not_pass_is_not_tried_again(
        self, server: ScriptedS3, store: Store, code: str, status: int
    ) -> None:
        server.otherwise = error(code, status)
        with pytest.raises(StorageError):
            store.put("k", bytes(1000))
        assert len(server.requests) == 1

    def test_nobody_listens(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        with open_store(
            "s3://bucket", {"endpoint_url": f"http://127.0.0.1:{port}", "key": "k", "secret": "s"}
        ) as store:
            start = time.monotonic()
            with pytest.raises(Unavailable, match="endpoint_url"):
                store.get("k")
            assert time.monotonic() - start < 5

    def test_a_server_that_comes_back(self, server: ScriptedS3) -> None:
        store = open_store("s3://bucket", server.options)
        store.put("k", b"x")
        server.otherwise = reset
        with pytest.raises(Unavailable):
            store.get("k")
        server.otherwise = proper
        assert store.get("k") == b"x"
        store.close()


class TestErrors:
    def test_kinds(self, server: ScriptedS3, store: Store) -> None:
        cases: list[tuple[str, int, type[StorageError], str]] = [
            ("NoSuchKey", 404, NotFound, ""),
            ("AccessDenied", 403, Forbidden, "credentials"),
            ("InvalidAccessKeyId", 403, Forbidden, "credentials"),
            ("SignatureDoesNotMatch", 403, Forbidden, "credentials"),
            ("ExpiredToken", 400, Forbidden, "credentials"),
            ("RequestTimeTooSkewed", 403, Forbidden, "clock"),
            ("Odd", 401, Forbidden, "credentials"),
            ("QuotaExceeded", 403, StorageFull, "tplayout gc"),
            ("XMinioStorageFull", 507, StorageFull, "tplayout gc"),
            ("NoSuchBucket", 404, Unavailable, "create the bucket"),
            ("AuthorizationHeaderMalformed", 400, Unavailable, "region_name"),
            ("InternalError", 500, Unavailable, "endpoint_url"),
            ("Odd", 418, Unavailable, "Odd"),
        ]
        for code, status, kind, hint in cases:
            server.otherwise = error(code, status)
            for verb in ("get", "put"):
                with pytest.raises(kind) as caught:
                    verbs(store, 20)[verb]()
                text = str(caught.value)
                assert hint in text, code
                assert f"{verb} 'k' on s3://bucket/kv" in text, code
                assert "\n" not in text, code

    def test_a_missing_bucket_is_no_miss(self, server: ScriptedS3, store: Store) -> None:
        server.otherwise = error("NoSuchBucket", 404)
        with pytest.raises(Unavailable, match="create the bucket"):
            store.get_into("k", bytearray(10))

    def test_a_refused_listing_and_deletion(self, server: ScriptedS3, store: Store) -> None:
        server.otherwise = error("AccessDenied", 403)
        for verb in ("list", "delete", "exists"):
            with pytest.raises(Forbidden):
                verbs(store, 20)[verb]()

    def test_a_deletion_that_fails_for_one_object(self, server: ScriptedS3, store: Store) -> None:
        body = (
            b"<DeleteResult><Error><Key>kv/b</Key><Code>AccessDenied</Code><Message>no</Message></Error></DeleteResult>"
        )

        def partial(handler: Any) -> None:
            handler.body()
            handler.answer(200, body)

        server.otherwise = partial
        with pytest.raises(Forbidden, match="'b'"):
            store.delete(["a", "b"])

    def test_secrets_that_a_server_repeats_are_hidden(self, server: ScriptedS3, store: Store) -> None:
        server.otherwise = error("AccessDenied", 403, "key access-key-id with very-secret is wrong")
        with pytest.raises(Forbidden) as caught:
            store.get("k")
        assert "secret" not in str(caught.value).replace("storage_options key and secret", "")
        assert "access-key-id" not in str(caught.value)

    def test_without_credentials(self, server: ScriptedS3, monkeypatch: pytest.MonkeyPatch) -> None:
        for name in list(os.environ):
            if name.startswith("AWS_"):
                monkeypatch.delenv(name)
        monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
        monkeypatch.setenv("HOME", "/nonexistent")
        with (
            open_store("s3://bucket", {"endpoint_url": server.options["endpoint_url"]}) as store,
            pytest.raises(Forbidden, match="AWS_"),
        ):
            store.get("k")

    def test_credentials_from_the_environment(self, server: ScriptedS3, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "from-environment")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
        with open_store("s3://bucket", {"endpoint_url": server.options["endpoint_url"]}) as store:
            store.put("k", b"x")
            server.otherwise = error("AccessDenied", 403, "from-environment may not")
            with pytest.raises(Forbidden, match="may not") as caught:
                store.get("k")
        assert "from-environment" in server.requests[0][2]["Authorization"]
        assert "from-environment" not in str(caught.value)

    def test_more_than_one_put_can_take(self, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("tplayout.storage.s3.MAX_PUT", 10)
        assert MAX_PUT == 5 << 30
        with pytest.raises(StorageError, match="chunk_tokens") as caught:
            store.put("k", bytes(11))
        assert caught.value.kind is StorageErrorKind.TOO_LARGE


class TestTransfers:
    SIZE = 2 * PART + PART // 2

    def test_large_objects_are_read_in_parallel_ranges(self, server: ScriptedS3, store: Store) -> None:
        data = os.urandom(self.SIZE)
        store.put("k", data)
        server.requests.clear()
        server.otherwise = together(3, proper)
        buf = bytearray(self.SIZE)
        assert store.get_into("k", buf) == self.SIZE
        assert buf == data
        assert sorted(headers["Range"] for _, _, headers in server.requests) == [
            f"bytes=0-{PART - 1}",
            f"bytes={PART}-{2 * PART - 1}",
            f"bytes={2 * PART}-{self.SIZE - 1}",
        ]

    def test_small_objects_take_one_request(self, server: ScriptedS3, store: Store) -> None:
        store.put("k", bytes(1000))
        server.requests.clear()
        store.get_into("k", bytearray(1000))
        store.get("k")
        assert [method for method, _, _ in server.requests] == ["GET", "GET"]

    def test_an_object_replaced_in_mid_read_is_not_mixed(self, server: ScriptedS3, store: Store) -> None:
        old, new = bytes(self.SIZE), b"\1" * self.SIZE
        store.put("k", old)

        def replacing(handler: Any) -> None:
            proper(handler)
            server.objects["/bucket/kv/k"] = new

        server.script = [replacing]
        buf = bytearray(self.SIZE)
        assert store.get_into("k", buf) == self.SIZE
        assert bytes(buf) in (old, new)

    def test_an_object_replaced_all_the_time_is_an_error(self, server: ScriptedS3, store: Store) -> None:
        store.put("k", bytes(self.SIZE))
        turn = [0]

        def replacing(handler: Any) -> None:
            with server.lock:
                turn[0] += 1
                data = bytes([turn[0]]) * self.SIZE
            serve(handler, data)

        server.otherwise = replacing
        with pytest.raises(Unavailable, match="replaced"):
            store.get_into("k", bytearray(self.SIZE))

    def test_a_server_that_ignores_ranges(self, server: ScriptedS3, store: Store) -> None:
        data = os.urandom(self.SIZE)
        store.put("k", data)
        server.otherwise = ignoring_ranges
        buf = bytearray(self.SIZE)
        assert store.get_into("k", buf) == self.SIZE
        assert buf == data
        with pytest.raises(Unavailable, match="Range"):
            store.get_range("k", 5, 10)

    def test_a_put_is_one_request_without_a_round_trip_before(self, server: ScriptedS3, store: Store) -> None:
        store.put("k", bytearray(70 * MIB))
        assert [method for method, _, _ in server.requests] == ["PUT"]
        headers = server.requests[0][2]
        assert "Expect" not in headers
        assert headers["Content-Length"] == str(70 * MIB)
        assert headers["X-Amz-Content-SHA256"] == "UNSIGNED-PAYLOAD"
        assert len(server.objects["/bucket/kv/k"]) == 70 * MIB

    def test_payload_signing_can_be_switched_on(self, server: ScriptedS3) -> None:
        options = {**server.options, "config_kwargs": {"s3": {"payload_signing_enabled": True}}}
        with open_store("s3://bucket", options) as store:
            store.put("k", b"x" * 1000)
        assert len(server.requests[0][2]["X-Amz-Content-SHA256"]) == 64
        assert server.objects["/bucket/k"] == b"x" * 1000

    def test_additional_arguments_reach_the_server(self, server: ScriptedS3) -> None:
        options = {**server.options, "s3_additional_kwargs": {"StorageClass": "ONEZONE_IA"}}
        with open_store("s3://bucket", options) as store:
            store.put("k", b"x")
            assert store.get("k") == b"x"
        assert server.requests[0][2]["x-amz-storage-class"] == "ONEZONE_IA"

    def test_connections_are_reused(self, server: ScriptedS3, store: Store) -> None:
        seen: set[Any] = set()

        def noting(handler: Any) -> None:
            seen.add(handler.client_address)
            proper(handler)

        server.otherwise = noting
        for _ in range(5):
            store.put("k", bytes(100_000))
            store.get("k")
            store.get_into("k", bytearray(200_000))
            store.get_range("k", 5, 100)
        assert len(seen) == 1


def test_closing_ends_connections_and_threads_stay_usable(server: ScriptedS3) -> None:
    before = threading.active_count()
    for _ in range(3):
        with open_store("s3://bucket", server.options) as store:
            store.put("k", b"x")
    assert threading.active_count() <= before + 8


def test_user_options_are_merged_into_ours() -> None:
    options = {"config_kwargs": {"read_timeout": 3, "s3": {"addressing_style": "path"}}, "key": "k", "secret": "s"}
    store = open_store("s3://bucket", options)
    assert isinstance(store, S3Store)
    config = store._fs.config_kwargs
    assert config["read_timeout"] == 3
    assert config["s3"] == {"payload_signing_enabled": False, "addressing_style": "path"}
    assert config["retries"]["total_max_attempts"] == 1
    assert options["config_kwargs"] == {"read_timeout": 3, "s3": {"addressing_style": "path"}}


def test_merging() -> None:
    base = {"a": 1, "t": {"x": 1, "y": 2}}
    assert merged(base, {"t": {"y": 3}, "b": 2}) == {"a": 1, "b": 2, "t": {"x": 1, "y": 3}}
    assert merged(base, {"t": None}) == {"a": 1, "t": None}
    assert base == {"a": 1, "t": {"x": 1, "y": 2}}
