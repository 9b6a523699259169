"""A server with a secret: what others have put into its store is a miss, and the secret is nowhere to be seen."""

import base64
import logging
import os
import pickle
import resource
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from blake3 import blake3
from sim_engine import SimEngine
from sim_model import Text
from sim_store import Sim

from tools.fault_store import Fault
from tools.faulty_files import FaultyFiles
from tplayout.admin.catalog import Secrets
from tplayout.admin.verify import verify_store
from tplayout.errors import ConfigError
from tplayout.format.chunk import write_digests
from tplayout.format.digest import make_hasher
from tplayout.format.layout import chunk_layout
from tplayout.storage.url import open_store
from tplayout_vllm.options import parse_options

SECRET = b"zebra-quilt-7361-marmalade-ocean"
OTHER = b"another secret of the same length"


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.write_bytes(SECRET)
    return path


def keyed(sim: Sim, key_file: Path, **options: Any) -> SimEngine:
    return sim.engine(caching=False, options={"secret_key_file": str(key_file), **options})


# -- poisoned stores -------------------------------------------------------------------------------------------------


def reseal(sim: Sim, text: Text, secret: bytes | None) -> bytes:
    """The object of the text's second chunk with KV of the attacker's, sealed as he can."""
    hasher, staging = make_hasher(None, secret), sim.engines[-1].side._staging
    ours = chunk_layout(staging.geometry, 0, staging.digest, staging.key_id)
    theirs = chunk_layout(staging.geometry, 0, hasher.name, hasher.key_id)
    chunk = sim._chunks(sim.engines[-1].side, text, 128)[1]
    old, new = sim.path(text, 1).read_bytes(), bytearray(theirs.nbytes)
    new[: theirs.data_start] = theirs.header
    new[theirs.data_start : theirs.head_section(0).start] = old[ours.data_start : ours.head_section(0).start]
    write_digests(new, theirs, chunk.key, hasher)
    return bytes(new)


def replayed(sim: Sim, text: Text, secret: bytes | None) -> bytes:
    """Another chunk of the same prompt, authentic under its own name."""
    return sim.path(text, 2).read_bytes()


def cell_of_another(sim: Sim, text: Text, secret: bytes | None) -> bytes:
    """One cell and its digest, authentic in another chunk."""
    staging = sim.engines[-1].side._staging
    layout = chunk_layout(staging.geometry, 0, staging.digest, staging.key_id)
    data, other = bytearray(sim.path(text, 1).read_bytes()), sim.path(text, 2).read_bytes()
    for span in (layout.cell_range(1, 1), layout.digest_range(1, 1)):
        data[span.start : span.stop] = other[span.start : span.stop]
    return bytes(data)


@pytest.mark.parametrize(
    ("poison", "secret"), [(reseal, None), (reseal, OTHER), (replayed, None), (cell_of_another, None)]
)
def test_a_poisoned_chunk_is_a_miss_that_is_counted(
    sim: Sim, key_file: Path, poison: Callable[[Sim, Text, bytes | None], bytes], secret: bytes | None
) -> None:
    text = sim.text(1)
    keyed(sim, key_file).run(text, 300, 1)
    sound = sim.path(text, 1).read_bytes()
    sim.path(text, 1).write_bytes(poison(sim, text, secret))
    engine = keyed(sim, key_file)
    name = engine.run(text, 300, 3)
    assert engine.loaded(name) == 64  # and what follows is computed, which sim_engine checks
    assert engine.stager.snapshot()["verification_failures"] == 1
    assert engine.stats("verification_failures") == 1
    assert sim.path(text, 1).read_bytes() == sound  # stored again
    with open_store(sim.url) as store:
        assert not verify_store(store, secrets=Secrets(SECRET)).findings


def test_an_authentic_chunk_of_another_namespace_is_a_miss(sim: Sim, key_file: Path) -> None:
    """Of a model with other weights, whose server has the same secret."""
    text = sim.text(2)
    keyed(sim, key_file, weights_label="other weights").run(text, 300, 1)
    theirs = [sim.path(text, index).read_bytes() for index in range(4)]
    engine = keyed(sim, key_file)
    for index, data in enumerate(theirs):
        sim.path(text, index).parent.mkdir(parents=True, exist_ok=True)
        sim.path(text, index).write_bytes(data)
    name = engine.run(text, 300, 3)
    assert engine.loaded(name) == 0
    assert engine.stager.snapshot()["verification_failures"] > 0


# -- where the secret is not -----------------------------------------------------------------------------------------


def shapes() -> list[bytes]:
    """The secret, and what replaces it, in all forms that a log, a file or a pickle could have."""
    derived = blake3(SECRET, derive_key_context="tplayout 1 cell digest secret").digest()
    assert make_hasher(None, SECRET)._key == derived  # type: ignore[attr-defined]
    return [
        shape
        for raw in (SECRET, derived)
        for shape in (raw, raw.hex().encode(), base64.b64encode(raw), base64.urlsafe_b64encode(raw), repr(raw).encode())
    ]


def shows(content: bytes | str) -> bool:
    data = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else content
    return any(shape.strip(b"=") in data or shape.strip(b"=").upper() in data for shape in shapes())


def test_the_search_finds_it_where_it_is(sim: Sim, key_file: Path) -> None:
    """Else the test below would show nothing."""
    assert shows(key_file.read_bytes())
    assert shows(f"secret={SECRET!r}")
    engine = keyed(sim, key_file)
    assert shows(engine.stager._pool.io._config)  # what I/O processes are told through their socket


@pytest.mark.parametrize("source", ["file", "environment"])
def test_the_secret_is_in_no_log_file_error_process_list_or_pickle(
    sim: Sim,
    key_file: Path,
    tmp_path: Path,
    source: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    caplog.set_level(logging.DEBUG)
    monkeypatch.setattr("tplayout.staging.breaker._FIRST_S", 0.01)
    faults = FaultyFiles(tmp_path / "faults")
    for name, value in faults.environment().items():
        monkeypatch.setenv(name, value)
    if source == "environment":
        key_file.unlink()
        monkeypatch.setenv("TPLAYOUT_SECRET_KEY", SECRET.decode())
    given = {"secret_key_file": str(key_file)} if source == "file" else {}
    sim.url = f"faulty+file://{sim.store}"
    options = {**given, "storage_options": faults.storage_options, "store_timeout_ms": 100}
    seen: list[str] = []
    # All goes well, and then nothing does.
    engine = sim.engine(caching=False, options=options, tp=2)
    sent = []
    plan = engine.side.planned
    monkeypatch.setattr(engine.side, "planned", lambda: (meta := plan(), sent.append(pickle.dumps(meta)))[0])
    text = sim.text(1)
    engine.run(text, 300, 1)
    for index, damage in ((1, b"short"), (2, bytes(40_960))):
        sim.path(text, index).write_bytes(damage)
    engine.connector.reset_cache()
    engine.run(text, 300, 1)
    for fault in Fault:
        faults.inject(
            {"cat_file": {fault.value: 1.0}} if fault is not Fault.STALE_LIST and "write" not in fault else {}
        )
        engine.connector.reset_cache()
        engine.run(text, 300, 1)
    faults.inject({"pipe_file": {Fault.ERROR.value: 1.0}})
    engine.run(sim.text(2), 300, 1)
    faults.stop()
    pids = engine.stager._pool.io.pids
    for pid in pids:
        for entry in ("cmdline", "environ", "status", "maps"):
            seen.append(Path(f"/proc/{pid}/{entry}").read_bytes().decode("latin-1"))
        assert resource.prlimit(pid, resource.RLIMIT_CORE) == (0, 0)
    seen.append(
        subprocess.run(
            ["ps", "auxwwwe"], capture_output=True, check=True, env={"PATH": os.environ["PATH"]}
        ).stdout.decode("latin-1")
    )
    os.kill(pids[0], signal.SIGKILL)
    engine.run(sim.text(3), 300, 1)
    # Who has no secret, or another one, is told so; who has a wrong one too.
    (tmp_path / "other").write_bytes(OTHER)
    (tmp_path / "short").write_bytes(SECRET[:9])
    monkeypatch.delenv("TPLAYOUT_SECRET_KEY", raising=False)
    for wrong in ({}, {"secret_key_file": str(tmp_path / "other")}, {"secret_key_file": str(tmp_path / "short")}):
        with pytest.raises(Exception, match=r"secret|key") as caught:
            sim.engine(options={**wrong, "storage_options": faults.storage_options})
        seen.append(f"{caught.value!r} {caught.value}")
    with pytest.raises(ConfigError) as told:
        parse_options({"url": "memory://x", **given, "chunk_tokens": 1})
    seen.append(str(told.value))
    # What is shown, and what travels.
    side, pool = engine.side, engine.stager._pool
    seen += [repr(vars(thing)) for thing in (side, engine.stager, pool, engine.connector)]
    seen += [repr(pool.plan), repr(pool.plan.hasher), repr(pool.plan.config(pool.region)), repr(engine.reported)]
    seen += [repr(parse_options({"url": "memory://x", **given}, os.environ))]
    assert sent
    seen += [data.decode("latin-1") for data in sent]
    seen += [record.getMessage() + str(record.exc_text) + repr(record.args) for record in caplog.records]
    assert {"damaged", "suspended", "gone"} <= {word for line in seen for word in line.split()}
    seen += list(capfd.readouterr())
    seen.append(bytes(engine.stager.region.memory).decode("latin-1"))
    for path in (path for path in tmp_path.rglob("*") if path.is_file() and path != key_file):
        seen += [str(path), path.read_bytes().decode("latin-1")]
    assert not [line[:300] for line in seen if shows(line.encode("latin-1", "replace"))]


def test_what_holds_the_secret_cannot_be_pickled(sim: Sim, key_file: Path) -> None:
    engine = keyed(sim, key_file)
    for holder in (
        engine.stager.plan.hasher,
        engine.stager.plan,
        parse_options({"url": "memory://x", "secret_key_file": str(key_file)}),
    ):
        with pytest.raises(TypeError, match="not pickled"):
            pickle.dumps(holder)
    with pytest.raises(TypeError):  # what it tells I/O processes holds it; its sockets no pickle takes
        pickle.dumps(engine.stager._pool.io)
