"""Tenants on one server and one store: they share nothing, see nothing of each other, and nobody else sees them.

That a tenant cannot tell by timing what another has stored is shown by what is done for a request, not by a clock: for
a prompt that another tenant has stored the same calls are made as for one that nobody has ever sent.
"""

import json
import os
import stat
from collections import Counter
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
from sim_engine import SimEngine
from sim_model import Text
from sim_store import Sim

from tools.fault_store import Fault
from tools.faulty_files import APPLICABLE, FaultyFiles
from tplayout.staging.plan import StagingPlan
from tplayout.staging.region import Region
from tplayout.storage.local import LocalStore

NOBODY = 65534


@pytest.fixture
def calls(sim: Sim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyFiles:
    """Writes down every call of the store that a server makes: as delays, of no time. One after the other, so that what
    is still asked for behind a miss does not depend on how threads meet."""
    faults = FaultyFiles(tmp_path / "faults")
    for name, value in faults.environment().items():
        monkeypatch.setenv(name, value)
    one_by_one = {"load_threads": 1, "save_threads": 1, "loads_in_flight": 1}
    monkeypatch.setattr("tplayout_vllm.opening.StagingPlan", partial(StagingPlan, **one_by_one))
    faults.inject({method: {Fault.DELAY.value: 1.0} for method in APPLICABLE}, delay_s=0.0)
    sim.url = f"faulty+file://{sim.store}"
    return faults


def engine_of(sim: Sim, calls: FaultyFiles) -> SimEngine:
    return sim.engine(caching=True, options={"storage_options": calls.storage_options})


def copy_of(text: Text, salt: str | None) -> Text:
    return Text(text.tokens[:300], salt)


def done_for(sim: Sim, calls: FaultyFiles, engine: SimEngine, text: Text) -> Counter[tuple[str, str]]:
    """What a request for a text makes the server do in the store: each call, and to which of its own chunks."""
    own = {str(sim.path(text, chunk)): f"chunk {chunk}" for chunk in range(5)}
    before = len(calls.broken())
    name = engine.run(text, 300, 1)
    assert engine.loaded(name) == 0
    made = [(method, path) for method, _, path in calls.broken()[before:]]
    foreign = {path for _, path in made if path not in own and not path.endswith("namespace.json")}
    assert not foreign  # nothing of another tenant's is looked at
    return Counter((method, own[path]) for method, path in made if path in own)


@pytest.mark.parametrize(("theirs", "ours"), [("a", "b"), (None, "b"), ("a", None), ("a", "aa")])
def test_another_tenant_s_prompt_is_like_one_that_nobody_has_sent(
    sim: Sim, calls: FaultyFiles, theirs: str | None, ours: str | None
) -> None:
    first = sim.text(1, salt=theirs)
    unseen = sim.text(2, salt=ours)
    same = copy_of(first, ours)
    sim.texts.append(same)
    engine = engine_of(sim, calls)  # which has all of `first` in memory too
    engine.run(first, 300, 1)
    engine.stager.poll()
    before = engine.stager.snapshot()
    for_same = done_for(sim, calls, engine, same)
    for_unseen = done_for(sim, calls, engine, unseen)
    assert for_same == for_unseen
    assert {(method, "chunk 0") for method in ("info", "cat_file", "pipe_file")} <= for_same.keys()  # asked for, stored
    assert for_same[("cat_file", "chunk 1")] == 0
    after = engine.stager.snapshot()
    assert after["host_hits"] == before["host_hits"]
    # A server that has just started finds nothing either, and its own tenant's all the same.
    other = engine_of(sim, calls)
    assert other.loaded(other.run(first, 300, 1)) == 256
    assert {str(sim.path(one, 0)) for one in (first, same)} != {str(sim.path(first, 0))}
    sim.check_store()


def test_tenants_that_send_the_same_at_the_same_time(sim: Sim, calls: FaultyFiles) -> None:
    base = sim.text(3)
    tenants = [base, *(copy_of(base, salt) for salt in ("a", "b", "c"))]
    sim.texts += tenants[1:]
    engine = engine_of(sim, calls)
    for _ in range(2):
        names = [engine.add(text, 300, 20) for text in tenants]
        engine.until(lambda names=names: all(map(engine.finished, names)))
        engine.settle()
        engine.connector.reset_cache()
        engine.scheduler.reset_prefix_cache()
    assert [engine.loaded(name) for name in names] == [256] * 4  # each its own
    assert sim.check_store() == 4 * 4  # and each is checked to hold what its salt makes of the tokens
    assert all(all(sim.stored(text, 256)) for text in tenants)


# -- who may look ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=[0o000, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def test_what_a_server_stores_is_private_whatever_the_umask(sim: Sim, umask: int) -> None:
    engine = sim.engine()
    engine.run(sim.text(4), 300, 1)
    assert sim.check_store() == 4
    for path in (sim.store, *sim.store.rglob("*")):
        wanted = 0o700 if path.is_dir() else 0o600
        assert stat.S_IMODE(path.stat().st_mode) == wanted, path


def test_a_temporary_is_private_while_it_is_written(sim: Sim, umask: int, tmp_path: Path) -> None:
    """Seen by the process that writes it, at the moment of the rename."""
    seen: list[int] = []
    real = os.rename

    def rename(source: str, *args: object, **more: int) -> None:
        seen.append(stat.S_IMODE(os.stat(source, dir_fd=more["src_dir_fd"]).st_mode))
        real(source, *args, **more)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "rename", rename)
        LocalStore(str(tmp_path / "s")).put("ns/k", b"prompt")
    assert seen == [0o600]


def test_staging_is_private_whatever_the_umask(sim: Sim, umask: int) -> None:
    """It has no name in a file system; who may not look into our processes does not get at it."""
    engine = sim.engine()
    text = sim.text(5)
    engine.run(text, 300, 1)
    ref = engine.stager.region_ref
    place = f"/proc/{ref.pid}/fd/{ref.fd}"
    assert stat.S_IMODE(os.stat(place).st_mode) == 0o600
    assert os.readlink(place).startswith("/memfd:tplayout-staging")
    Region.attach(ref).close()  # we may
    if os.geteuid() != 0:
        pytest.skip("NOT TESTED: that another user cannot open the staging region, which only root can try")
    reading, writing = os.pipe()
    if (child := os.fork()) == 0:  # somebody else on this machine, who knows all that vLLM tells its workers
        said = "opened"
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            os.close(os.open(place, os.O_RDONLY))
        except OSError as error:
            said = type(error).__name__
        os.write(writing, json.dumps(said).encode())
        os._exit(0)
    os.waitpid(child, 0)
    assert json.loads(os.read(reading, 100)) == "PermissionError"
