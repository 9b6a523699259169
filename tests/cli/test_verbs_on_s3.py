"""The verbs that move and prune, against a real S3 server; and Ctrl-C in the middle of one."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.sample_stores import Noise, content
from tests.support.tool import ask, call
from tools.s3_server import S3Server
from tplayout.admin.namespaces import begin_namespace
from tplayout.admin.transfer import store_prefix
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.identity import Identity
from tplayout.format.keys import chain
from tplayout.storage.url import open_store

PARTS = (Part("k", 128), Part("v", 128))
IDENTITY = Identity("files:01", {}, "float16", None, Geometry(64, (Group("full", "full", (0, 1), 4, PARTS, "F16"),)))


def fill(path: Path, chunks: int) -> None:
    with open_store(path) as store:
        target = begin_namespace(store, IDENTITY, "m")
        store_prefix(Noise(), chain(target.digest, list(range(64 * chunks)), 64), target)


@pytest.mark.s3
def test_moving_and_pruning_on_s3(tmp_path):
    fill(tmp_path / "store", 4)
    before = content(tmp_path / "store")
    with S3Server() as server:
        options = [f"--storage-option={name}:={json.dumps(value)}" for name, value in server.storage_options.items()]

        def run(*arguments: object, code: int = 0) -> dict:
            return ask(*arguments, *options, code=code)

        url = f"{server.url.rstrip('/')}/kv"
        (report,) = run("cp", tmp_path / "store", url)["namespaces"].values()
        assert (report["copied"], report["present"]) == (4, 0)
        (report,) = run("cp", tmp_path / "store", url)["namespaces"].values()
        assert report["present"] == 4
        run("export", url, tmp_path / "bundle")
        run("convert", url, f"{url}2", "--chunk-tokens", 128)
        run("convert", f"{url}2", tmp_path / "shards", "--tp", 2)
        run("mv", url, tmp_path / "back", "--yes")
        assert content(tmp_path / "back") == before
        report = run("gc", f"{url}2", "--max-bytes", 700000, "--grace", "0", "--yes")
        assert (report["order"], report["chunks"], report["limit_met"]) == ("age", 1, True)


def test_ctrl_c_leaves_nothing_half_written(tmp_path):
    """A copy of many objects is stopped after the first, and goes on later."""
    fill(tmp_path / "store", 400)
    code = "from tplayout.cli.main import main; main()"
    command = [sys.executable, "-c", code, "cp", str(tmp_path / "store"), str(tmp_path / "copy"), "--jobs", "2"]
    root = Path(__file__).resolve().parents[2]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(root)},
        # A shell's background job, such as a test run may be, hands down that SIGINT is ignored; a terminal does not.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )
    deadline = time.monotonic() + 60
    while not list((tmp_path / "copy").rglob("*.0.safetensors")) and time.monotonic() < deadline:
        time.sleep(0.005)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130, stderr
    assert stderr.strip() == "tplayout: interrupted"
    copied, whole = content(tmp_path / "copy"), content(tmp_path / "store")
    assert 1 < len(copied) < len(whole)
    assert all(whole[name] == data for name, data in copied.items())
    result = call("cp", tmp_path / "store", tmp_path / "copy")
    assert result.exit_code == 0
    assert content(tmp_path / "copy") == whole
