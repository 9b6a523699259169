"""The delay line passes everything on, later, and many requests at a time wait once."""

from __future__ import annotations

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "tools"))

from bench.delay_line import DelayLine
from s3_server import S3Server

from tplayout.storage import open_store

DATA = bytes(range(256)) * 4096  # 1 MiB


def test_what_passes_is_whole_and_late_but_not_one_after_the_other() -> None:
    with S3Server() as server, DelayLine(server.port, 0.3) as line:
        options = {**server.storage_options, "endpoint_url": f"http://127.0.0.1:{line.port}"}
        with open_store(server.url, options) as store, ThreadPoolExecutor(8) as pool:
            store.put("a", DATA)
            start = time.monotonic()
            assert store.get("a") == DATA
            assert time.monotonic() - start >= 0.3
            start = time.monotonic()
            assert list(pool.map(store.get, ["a"] * 8)) == [DATA] * 8
            assert time.monotonic() - start < 8 * 0.3
