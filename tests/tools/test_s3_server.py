"""tools/s3_server.py: starts, says where it is, stops when asked or when its starter is gone, leaves nothing."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tplayout.errors import Unavailable
from tplayout.storage import open_store

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "tools" / "s3_server.py"

pytestmark = pytest.mark.s3


@pytest.fixture
def temporary(tmp_path: Path) -> Iterator[dict[str, str]]:
    """An environment whose temporary directory is checked to be empty in the end."""
    directory = tmp_path / "tmp"
    directory.mkdir()
    yield {**os.environ, "TMPDIR": str(directory)}
    limit = time.monotonic() + 5
    while list(directory.iterdir()) and time.monotonic() < limit:
        time.sleep(0.05)
    assert list(directory.iterdir()) == []


def start(env: dict[str, str], *arguments: str) -> tuple[subprocess.Popen[str], dict[str, object]]:
    process = subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments],
        env=env,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, json.loads(process.stdout.readline())


def gone(pid: object) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def wait_until_gone(pid: object) -> None:
    limit = time.monotonic() + 10
    while not gone(pid):
        assert time.monotonic() < limit, "the server still runs"
        time.sleep(0.05)


@pytest.mark.parametrize("how", ["SIGTERM", "SIGINT", "end of stdin"])
def test_it_serves_and_stops(temporary: dict[str, str], how: str) -> None:
    process, told = start(temporary)
    with open_store(str(told["url"]), told["storage_options"]) as store:  # type: ignore[arg-type]
        store.put("ns/k", b"x")
        assert store.get("ns/k") == b"x"
    assert str(told["endpoint_url"]).startswith("http://127.0.0.1:")
    command = Path(f"/proc/{told['pid']}/cmdline").read_bytes()
    assert str(told["secret"]).encode() not in command
    assert process.stdin is not None
    if how == "end of stdin":
        process.stdin.close()
    else:
        process.send_signal(getattr(signal, how))
    assert process.wait(15) == 0
    assert gone(told["pid"])


def test_a_given_directory_is_kept(temporary: dict[str, str], tmp_path: Path) -> None:
    process, told = start(temporary, "--directory", str(tmp_path / "data"), "--bucket", "mine")
    with open_store(str(told["url"]), told["storage_options"]) as store:  # type: ignore[arg-type]
        store.put("ns/k", b"x")
    process.terminate()
    assert process.wait(15) == 0
    assert (tmp_path / "data/mine/kv/ns/k").read_bytes() == b"x"


def test_it_stops_when_its_starter_is_killed(tmp_path: Path) -> None:
    process, told = start({**os.environ, "TMPDIR": str(tmp_path)})
    process.kill()
    process.wait()
    wait_until_gone(told["pid"])


def test_as_a_module_with_a_kill_and_a_restart() -> None:
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        from s3_server import S3Server
    finally:
        sys.path.remove(str(SCRIPT.parent))
    with S3Server() as server, open_store(server.url, server.storage_options) as store:
        store.put("k", b"x")
        server.kill()
        with pytest.raises(Unavailable):
            store.get("k", deadline=10)
        server.start()
        assert store.get("k") == b"x"
        directory = server.directory
    assert str(directory).startswith(tempfile.gettempdir())
    assert not directory.exists()
