"""A disk that fails under a server: full, without inodes, read-only, forbidden, emptied. Disk and processes are real.

Each time: saving stops with one line that names place and cause, and is counted; what is stored is served; saving
resumes by itself within the breaker's pause; nothing half-written is left, and the store verifies.
"""

import itertools
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import pytest

from tplayout.admin.verify import verify_store
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.identity import Identity, NamespaceDocument, StorageFacts
from tplayout.format.keys import chain, object_name
from tplayout.staging.io_client import COMMAND
from tplayout.staging.stager import Stager
from tplayout.storage.url import open_store

HEADS = Group("full", "full", (0, 1, 2), 4, (Part("k", 8), Part("v", 8)), "F32")
IDENTITY = Identity("files:01", {}, "float32", None, Geometry(16, (HEADS,)))
DOCUMENT = NamespaceDocument(IDENTITY, StorageFacts("xxh3-128"), "m").to_bytes()
KIB = 1024
OUTAGE_S = 2.0
FIRST_PAUSE_S = 1.0  # of the breaker; each is twice the one before, so the next is over after as long as all of them
BUSY_S = 5.0  # what a busy machine may add


@pytest.fixture
def disk(tmp_path):
    """A file system of 1 MiB and 400 inodes."""
    if os.geteuid() != 0 or not shutil.which("mount"):
        pytest.skip("NOT TESTED: servers on a disk that fails: only root can mount the small tmpfs for it")
    place = tmp_path / "disk"
    place.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1m,nr_inodes=400", "tplayout-test", str(place)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"NOT TESTED: servers on a disk that fails: no tmpfs can be mounted here: {done.stderr.strip()}")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


@dataclass
class Server:
    """A stager with its store, and prompts of one chunk each that never come again."""

    stager: Stager
    world: object
    seeds: itertools.count

    def chunk(self):
        return chain(IDENTITY.digest(), [next(self.seeds)] * 16, 16)[0]

    def path(self, chunk):
        return self.world.store / object_name(IDENTITY.namespace, chunk.key, 0)

    def save(self, chunk):
        """Offer one chunk. Whether it is in the store afterwards."""
        ref = self.stager.begin_save(chunk)
        if ref is not None:
            self.world.fill(self.stager, ref, chunk.key)
            self.world.settle(self.stager)
        return self.path(chunk).exists()

    def hits(self, chunk):
        """Whether it can be had from the store."""
        self.stager.reset()
        self.stager.start_lookup("r", [chunk])
        try:
            return self.world.finish(self.stager, "r").ready == 1
        finally:
            self.stager.release("r")


@pytest.fixture
def serve(world, disk):
    def start(max_bytes=0, command=COMMAND):
        world.store = disk / "kv"
        plan = world.plan(namespace=IDENTITY.digest(), document=DOCUMENT, writers=(1,), max_bytes=max_bytes)
        stager = Stager(plan, command=command)
        world._stack.callback(stager.close)
        return Server(stager, world, itertools.count(1))

    return start


def outage(server: Server, caplog, kind: str, cause: str, mend: Callable[[], None]):
    """What all of them have in common. The store is broken when this is called."""
    stored = server.known
    began = time.monotonic()
    skips = server.stager.counters()["save_skips"]
    while time.monotonic() - began < OUTAGE_S or skips.get(f"store-{kind}", 0) < 5:
        assert not server.save(server.chunk())
        assert server.hits(stored)
        time.sleep(0.05)
        skips = server.stager.counters()["save_skips"]
    sums = server.stager.counters()
    assert set(sums["save_errors"]) == {kind}
    assert sums["save_errors"][kind] < 8  # and not once a chunk
    assert server.stager.health["saves"].startswith(f"suspended ({kind})")
    assert (server.stager.health["loads"], server.stager.health["io"]) == ("ok", "ok")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("tplayout: saves are suspended after 3 failure(s) in a row, the last:")
    assert f"file://{server.world.store}: {cause}" in line
    mend()
    lasted, began = time.monotonic() - began, time.monotonic()
    server.world.wait_until(lambda: server.save(server.chunk()), lasted + FIRST_PAUSE_S + BUSY_S, 0.05)
    print(f"{kind}: saving resumed {time.monotonic() - began:.2f} s after the disk was mended")
    assert [record.getMessage() for record in caplog.records][1:] == [
        "tplayout: the store works again, saves are resumed"
    ]
    sound(server)


def sound(server: Server):
    """Nothing is damaged, misplaced or half-written."""
    with open_store(server.world.store) as store:
        assert verify_store(store, temporary_age=-1).findings == []
        assert list(store.strangers()) == []


@pytest.fixture
def running(serve):
    """A server that has stored a chunk; with and without a limit, which is not reached."""

    def start(limited=False, command=COMMAND):
        server = serve(1 << 30 if limited else 0, command)
        server.known = server.chunk()
        assert server.save(server.known)
        return server

    return start


@pytest.mark.parametrize("limited", [False, True])
def test_a_full_disk(running, disk, caplog, limited):
    server = running(limited)
    filler = disk / "filler"
    free = os.statvfs(disk)
    filler.write_bytes(bytes(free.f_bavail * free.f_bsize - 12 * KIB))  # less than a chunk
    outage(server, caplog, "full", "No space left on device; free space", filler.unlink)


@pytest.mark.parametrize("limited", [False, True])
def test_no_inodes_left(running, disk, caplog, limited):
    server = running(limited)
    fillers = disk / "fillers"
    fillers.mkdir()
    for number in range(os.statvfs(disk).f_favail):
        (fillers / str(number)).touch()
    with pytest.raises(OSError, match="No space left"):
        (disk / "one more").touch()
    outage(server, caplog, "full", "No space left on device; free space or inodes", lambda: shutil.rmtree(fillers))


@pytest.mark.parametrize("limited", [False, True])
def test_a_disk_that_is_remounted_read_only(running, disk, caplog, limited):
    server = running(limited)

    def remount(how):
        subprocess.run(["mount", "-o", f"remount,{how}", str(disk)], check=True)

    remount("ro")
    outage(server, caplog, "forbidden", "Read-only file system; check", lambda: remount("rw"))


def test_permission_denied(running, caplog):
    """Root is not asked for permission, unless it has given up that right."""
    if not shutil.which("setpriv"):
        pytest.skip("NOT TESTED: permission denied under a server: no setpriv, with which root gives up its rights")
    rights = "-dac_override,-dac_read_search"
    server = running(command=("setpriv", "--bounding-set", rights, "--inh-caps", rights, *COMMAND))
    namespace = server.world.store / IDENTITY.namespace
    assert stat.S_IMODE(namespace.stat().st_mode) == 0o700
    directories = [namespace, *(path for path in namespace.iterdir() if path.is_dir())]

    def allow(mode):
        for directory in directories:
            directory.chmod(mode)

    allow(0o500)
    outage(server, caplog, "forbidden", "Permission denied; check the owner and mode", lambda: allow(0o700))


@pytest.mark.parametrize("limited", [False, True])
def test_a_directory_that_is_removed_under_it_is_begun_anew(running, caplog, limited):
    """namespace.json too, which is looked for once a minute; here it is every second."""
    code = "from tplayout.staging import io_jobs, io_process; io_jobs._DOCUMENT_S = 1.0; io_process.main()"
    server = running(limited, (sys.executable, "-P", "-c", code))
    document = server.world.store / IDENTITY.namespace / "namespace.json"
    assert document.exists()
    shutil.rmtree(server.world.store)
    assert not server.hits(server.known)
    chunk = server.chunk()
    assert server.save(chunk)
    assert server.hits(chunk)
    assert server.save(server.known)
    assert server.stager.health == {"loads": "ok", "saves": "ok", "io": "ok"}
    assert [record.getMessage() for record in caplog.records] == []
    server.world.wait_until(lambda: server.save(server.chunk()) and document.exists(), 10.0, 0.2)
    sound(server)


def test_a_process_that_dies_while_the_disk_is_full_is_replaced(running, disk):
    server = running()
    filler = disk / "filler"
    free = os.statvfs(disk)
    filler.write_bytes(bytes(free.f_bavail * free.f_bsize - 12 * KIB))
    assert not server.save(server.chunk())
    os.kill(server.stager._pool.io.pids[0], 9)
    filler.unlink()
    server.world.wait_until(lambda: server.save(server.chunk()), FIRST_PAUSE_S + BUSY_S, 0.05)
    sound(server)
