"""Reloading through vLLM, against LMCache in multi-process mode: its server, with files behind its memory.

LMCache brings another NumPy and is not part of this project's environment. Where it is installed, engines of both sides
are there at once and answer in turn.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from time import sleep
from typing import Any

from vllm_engine import Engine, engine
from vllm_server import cpu_environment, free_port

from bench.engines import (
    CHUNK,
    COMPUTED,
    HOST,
    PREFIX,
    PROMPT,
    REST_S,
    STORE,
    WARM_UP,
    NotMeasured,
    Source,
    ask,
    connector,
    engine_args,
    forget,
    offload,
    prompt,
    wait_until_stored,
    warm_up,
)
from bench.measure import Note, Result, Row, Sense, Setting, row_of

VERSION = "0.5.6"
MISSING = (
    "LMCache is not installed here, so nothing was compared with it: tools/setup_venv.sh .venv-lmcache; "
    f".venv-lmcache/bin/pip install lmcache=={VERSION}; "
    "PYTHONPATH=tools .venv-lmcache/bin/python -m bench --only lmcache"
)
LMCACHE = "LMCache (multi-process mode)"
FROM_DISK, FROM_MEMORY = 5.0, 1.3
ITS_OWN = Source(cached=PREFIX, supplied=PREFIX)  # it does not say from which tier
START_S = 120.0


def lmcache_rows(setting: Setting, directory: Path) -> Iterator[Result]:
    """From disk and from memory at TP=1, then what is found after TP=1 to 2."""
    if find_spec("lmcache") is None:
        yield Note(MISSING)
        return
    store = directory / "store"
    with Server(directory / "lmcache") as server:
        with _engines(store, server, directory, 1) as (ours, other):
            ask(ours, prompt(1), COMPUTED)
            ask(other, prompt(1), COMPUTED)
            wait_until_stored(store, (WARM_UP + PREFIX) // CHUNK)
            server.wait_until_stored((WARM_UP + PREFIX) // CHUNK)
            times = [_round(ours, other, server) for _ in range(1 + setting.reloads)][1:]
        for place, target in (("local disk", FROM_DISK), ("host memory", FROM_MEMORY)):
            seconds = ([each[place, side] for each in times] for side in ("ours", "other"))
            name = f"reload through vLLM from {place}, TP=1 to 1: first token of {PROMPT:,}"
            yield row_of(name, LMCACHE, *seconds, target=target)
        with _engines(store, server, directory, 2) as sides:
            found = [side.submit(prompt(1), 1, logprobs=None).result().cached / PREFIX for side in sides]
    name = "share of stored tokens that are found after TP=1 to 2"
    yield Row(name, LMCACHE, found[0], found[1], found[0], found[0], found[0], Sense.SPEED, 1, unit="of all")


def _round(ours: Engine, other: Engine, server: Server) -> dict[tuple[str, str], float]:
    """Seconds to the first token by tier and side."""
    seconds = {}
    for place, source in (("local disk", STORE), ("host memory", HOST)):
        for name, running in (("ours", ours), ("other", other)):
            forget(running, host=running is ours and place == "local disk")
            if running is other and place == "local disk":
                server.clear_memory()
            sleep(REST_S)
            wanted = source if running is ours else ITS_OWN
            seconds[place, name] = ask(running, prompt(1), wanted).first_token_s
    return seconds


@contextmanager
def _engines(store: Path, server: Server, directory: Path, tp: int) -> Iterator[tuple[Engine, Engine]]:
    extra = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": server.port}
    with (
        engine(engine_args(tp, **offload(store)), directory / f"ours-{tp}.log") as ours,
        engine(engine_args(tp, **connector("LMCacheMPConnector", extra)), directory / f"lmcache-{tp}.log") as other,
    ):
        warm_up(ours)
        warm_up(other)
        yield ours, other


class Server:
    """LMCache's server on this machine."""

    def __init__(self, directory: Path) -> None:
        """directory: for its files and its log."""
        self._files = directory / "files"
        self._files.mkdir(parents=True)
        self.port, self._http = free_port(), free_port()
        command: list[Any] = [
            *(Path(sys.executable).parent / "lmcache", "server"),
            *("--host", "127.0.0.1", "--port", self.port, "--http-host", "127.0.0.1", "--http-port", self._http),
            *("--l1-size-gb", 2, "--eviction-policy", "LRU", "--chunk-size", CHUNK),
            *("--supported-transfer-mode", "auto"),
            *("--l2-prefetch-policy", "retain"),  # else nothing that it has read from files is in memory
            *("--l2-adapter", json.dumps({"type": "fs", "base_path": str(self._files)})),
        ]
        self._log = directory / "server.log"
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                list(map(str, command)), stdout=log, stderr=log, env={**os.environ, **cpu_environment()}
            )

    def __enter__(self) -> Server:
        end = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > end:
                self._process.kill()
                raise NotMeasured(f"LMCache's server did not start\n{self._log.read_text()[-2000:]}")
            sleep(0.2)
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.wait()

    def clear_memory(self) -> None:
        """Leave only what is in files."""
        self._open("/cache/clear", b'{"force": true}')  # what is locked too: nothing is under way

    def wait_until_stored(self, chunks: int) -> None:
        """Wait for its files."""
        end = time.monotonic() + START_S
        while (stored := len(list(self._files.rglob("*.data")))) < chunks:
            if time.monotonic() > end:
                raise NotMeasured(f"LMCache has stored {stored} of {chunks} chunks")
            sleep(0.05)

    def _answers(self) -> bool:
        try:
            self._open("/healthcheck", None)
        except OSError:
            return False
        return True

    def _open(self, path: str, body: bytes | None) -> None:
        url, header = f"http://127.0.0.1:{self._http}{path}", {"Content-Type": "application/json"}
        urllib.request.urlopen(urllib.request.Request(url, body, header), timeout=10).close()
