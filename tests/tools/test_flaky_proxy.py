"""The flaky proxy passes everything through to a real S3 server, and breaks as each fault says."""

from __future__ import annotations

import http.client
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

from flaky_proxy import Proxy, Wire
from s3_server import S3Server

from tplayout.errors import StorageError
from tplayout.storage import Store, open_store

DATA = bytes(range(256)) * 4096  # 1 MiB


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as running:
        yield running


@pytest.fixture
def proxy(server: S3Server) -> Iterator[Proxy]:
    with Proxy(server.port, seed=1) as running:
        yield running


def store_behind(proxy: Proxy, server: S3Server, timeout_s: float) -> Store:
    options = {**server.storage_options, "endpoint_url": f"http://127.0.0.1:{proxy.port}"}
    return open_store(server.url, options, timeout_s=timeout_s)


def test_what_is_not_broken_goes_through(proxy: Proxy, server: S3Server) -> None:
    with store_behind(proxy, server, 20) as store:
        store.put("through/a", DATA)
        assert store.get("through/a") == DATA
        assert store.get_range("through/a", 70_000, 5) == DATA[70_000:70_005]
        assert store.exists(["through/a", "through/b"]) == [True, False]
        assert [info.key for info in store.list("through/")] == ["through/a"]
        store.delete(["through/a"])
        assert store.exists(["through/a"]) == [False]
    assert proxy.requests >= 7
    assert not proxy.injected


@pytest.mark.parametrize("fault", list(Wire))
def test_a_store_reads_right_bytes_or_raises_in_time(proxy: Proxy, server: S3Server, fault: Wire) -> None:
    with store_behind(proxy, server, 20) as patient, store_behind(proxy, server, 2) as store:
        patient.put("faults/a", DATA)
        proxy.faults, proxy.rate = (fault,), 1.0
        start = time.monotonic()
        with pytest.raises(StorageError):
            store.get("faults/a")
        assert time.monotonic() - start < 2 + 10
        assert proxy.injected[fault] > 0
        proxy.rate = 0.0
        assert patient.get("faults/a") == DATA


def test_a_part_of_the_requests_fails_the_same_for_the_same_seed(server: S3Server) -> None:
    def met(seed: int) -> list[int]:
        with Proxy(server.port, seed, (Wire.ERROR_500,)) as proxy:
            proxy.rate = 0.3
            return [status(proxy) for _ in range(20)]

    first = met(7)
    assert set(first) > {500}
    assert first == met(7) != met(8)


def status(proxy: Proxy) -> int:
    connection = http.client.HTTPConnection("127.0.0.1", proxy.port, timeout=10)
    connection.request("GET", "/")
    return connection.getresponse().status


def test_a_narrow_line_is_shared_by_all(proxy: Proxy, server: S3Server) -> None:
    with store_behind(proxy, server, 20) as store, ThreadPoolExecutor(4) as pool:
        store.put("narrow/a", DATA)
        proxy.bytes_per_s = 4 * len(DATA) / 2  # four of them take two seconds
        start = time.monotonic()
        assert list(pool.map(store.get, ["narrow/a"] * 4)) == [DATA] * 4
        assert 1.8 < time.monotonic() - start < 15


def test_hanging_and_refusing_until_it_passes_again(proxy: Proxy, server: S3Server) -> None:
    with store_behind(proxy, server, 20) as patient, store_behind(proxy, server, 1) as store:
        patient.put("modes/a", DATA)
        for stop in (proxy.hang, proxy.refuse):
            stop()
            with pytest.raises(StorageError):
                store.get("modes/a")
            proxy.pass_()
            assert patient.get("modes/a") == DATA
