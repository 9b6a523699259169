"""The tool as people run it: a process of its own, a real S3 server, Ctrl-C in the middle."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.support.filled_store import fill, flip, identity, layout_of_group, name_of, rewrite
from tests.support.sample_stores import content
from tests.support.tool import ask, call
from tools.s3_server import S3Server
from tplayout.cache import Cache
from tplayout.storage.url import open_store

TOOL = [sys.executable, "-c", "from tplayout.cli.main import main; main()"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*TOOL, *arguments], capture_output=True, text=True, check=False, timeout=120)


def take_ctrl_c() -> None:
    """A shell's background job, such as a test run may be, hands down that SIGINT is ignored; a terminal does not."""
    signal.signal(signal.SIGINT, signal.default_int_handler)


def test_ctrl_c_leaves_a_journal_with_which_verification_goes_on(tmp_path: Path):
    cache = Cache.open(tmp_path / "store", identity())
    fill(cache, range(4 * 300))
    url, journal = cache.store.url, tmp_path / "journal"
    nbytes = layout_of_group(cache).nbytes
    arguments = ["verify", url, "--journal", str(journal), "--jobs", "2"]
    process = subprocess.Popen(
        [*TOOL, *arguments, "--max-rate", str(nbytes * 50)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=take_ctrl_c,
    )
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and (not journal.exists() or journal.read_text().count("\n") < 20):
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, "")
    assert err.strip() == "tplayout: interrupted"
    done = journal.read_text().count("\n")
    assert 20 <= done < 250
    result = run(*arguments, "--json")
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["checked"] == 300
    assert not journal.exists()


def test_one_document_on_stdout_and_nothing_drawn_in_a_pipe(tmp_path: Path):
    cache = Cache.open(tmp_path / "store", identity())
    fill(cache, range(40))
    cache.store.put("foreign", b"")
    for verb in (["ls"], ["ls", cache.store.url, cache.namespace], ["du"], ["du", "--by", "prefix"], ["verify"]):
        arguments = verb if cache.store.url in verb else [*verb, cache.store.url]
        result = run(*arguments, "--json")
        assert isinstance(json.loads(result.stdout), dict)
        assert result.stderr == ""
        assert "\x1b" not in run(*arguments).stdout


def test_every_verb_on_a_packed_store(tmp_path: Path):
    """What people see is the same as with a plain one, but for the bytes."""
    url = tmp_path / "store"
    with Cache.open(url, identity(), model="tiny", codec="shuffle-zstd") as cache:
        names = [name_of(cache, chunk) for chunk in fill(cache, range(40))]
        document = tmp_path / "namespace.json"
        document.write_bytes(cache.store.get(f"{cache.namespace}/namespace.json"))
    tokens = tmp_path / "tokens"
    tokens.write_text(" ".join(map(str, range(39))))
    nbytes = sum(file.stat().st_size for file in url.rglob("*.safetensors"))

    (space,) = ask("ls", url)["namespaces"]
    assert (space["codec"], space["chunks"], space["bytes"]) == ("shuffle-zstd", 10, nbytes)
    assert [prefix["tokens"] for prefix in ask("ls", url, space["namespace"])["prefixes"]] == [40]
    assert ask("du", url)["bytes"] >= nbytes
    assert [share["bytes"] for share in ask("du", url, "--by", "prefix")["rows"]] == [nbytes]
    for depth in ([], ["--quick"]):
        explained = ask("explain", url, "--model", document, "--tokens", tokens, *depth)
        assert explained["hit_tokens"] == 36
    assert ask("inspect", url)["namespaces"][0]["codec"] == "shuffle-zstd"
    shown = ask("inspect", url, names[3])
    assert (shown["codec"], shown["sound"], shown["bytes"]) == ("shuffle-zstd", True, (url / names[3]).stat().st_size)
    assert "codec shuffle-zstd" in call("inspect", url, names[3]).stdout
    assert ask("verify", url)["bytes"] == nbytes
    assert ask("verify", url, "--quick")["findings"] == []

    ask("export", url, tmp_path / "bundle")
    ask("import", tmp_path / "bundle", tmp_path / "imported")
    ask("cp", url, tmp_path / "copied")
    assert content(tmp_path / "imported") == content(tmp_path / "copied") == content(url)
    ask("mv", tmp_path / "copied", tmp_path / "moved", "--yes")
    assert content(tmp_path / "moved") == content(url)
    ask("gc", url, "--max-bytes", str(nbytes // 2), "--grace", "0", "--yes")
    assert 0 < len(content(url)) < 8
    assert ask("explain", url, "--model", document, "--tokens", tokens, code=1)["hit_tokens"] == 16
    rewrite(open_store(url), names[0], flip((url / names[0]).stat().st_size - 1))
    (finding, *_) = ask("verify", url, code=1)["findings"]
    assert (finding["object"], finding["reason"]) == (names[0], "digest-mismatch")
    assert "damaged" in call("explain", url, "--model", document, "--tokens", tokens).stdout
    assert ask("inspect", url, names[0], code=1)["fault"]["reason"] == "digest-mismatch"


@pytest.mark.s3
def test_every_looking_verb_on_s3(tmp_path: Path):
    with S3Server() as server:
        options = [f"{name}={value}" for name, value in server.storage_options.items() if isinstance(value, str)]
        flags = [item for option in options for item in ("--storage-option", option)]
        store = open_store(server.url, server.storage_options)
        cache = Cache.open(store, identity(), model="tiny")
        names = [name_of(cache, chunk) for chunk in fill(cache, range(80))]
        last = max(names[10:], key=names.index)
        rewrite(store, last, flip(layout_of_group(cache).cell_range(0, 0).start))
        model = tmp_path / "namespace.json"
        model.write_bytes(store.get(f"{cache.namespace}/namespace.json"))
        tokens = tmp_path / "tokens"
        tokens.write_text(" ".join(map(str, range(76))))

        def ask(*arguments: str, code: int = 0) -> dict[str, object]:
            result = run(*arguments, *flags, "--json")
            assert result.returncode == code, result.stderr
            assert not [value for value in server.storage_options.values() if str(value) in result.stderr]
            return json.loads(result.stdout)

        (space,) = ask("ls", server.url)["namespaces"]
        assert (space["chunks"], space["model"]) == (20, "tiny")
        (prefix,) = ask("ls", server.url, cache.namespace)["prefixes"]
        assert prefix["tokens"] == 80
        assert ask("du", server.url)["objects"] == 20
        assert ask("explain", server.url, "--model", str(model), "--tokens", str(tokens))["hit_tokens"] == 76
        assert ask("inspect", server.url, last, code=1)["sound"] is False
        report = ask("verify", server.url, code=1)
        assert [finding["object"] for finding in report["findings"]] == [last]
        ask("verify", server.url, "--quarantine", "--yes")
        assert ask("verify", server.url)["checked"] == 19
        assert ask("doctor", server.url, "--size", "1M")["url"] == server.url
        assert run("ls", "s3://no-such-bucket/x", *flags).returncode == 3
        store.close()


def test_the_tool_is_found_as_a_command():
    tool = Path(sys.executable).with_name("tplayout")
    assert os.access(tool, os.X_OK), f"{tool} is not there: pip install -e . makes it (make setup)"
    result = subprocess.run([tool, "--version"], capture_output=True, text=True, check=False)
    assert (result.returncode, result.stdout.split()[0]) == (0, "tplayout")
