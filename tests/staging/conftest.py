"""A small staging pool on a real directory, with ranks that are real processes."""

import contextlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.keys import chain, object_name
from tplayout.format.layout import chunk_layout
from tplayout.staging.stager import Stager, StagingPlan

HERE = Path(__file__).parent
TOKENS = 16
NAMESPACE = bytes(range(32))
KV = (Part("k", 8), Part("v", 8))
ONE_GROUP = Geometry(TOKENS, (Group("full", "full", (0, 1, 2), 4, KV, "F32"),))
TWO_GROUPS = Geometry(TOKENS, (*ONE_GROUP.groups, Group("window", "window", (3, 4), 2, KV, "F32", window=32)))


def _load(name):
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


writer_process = _load("writer_process")


def wait_until(condition, seconds=20.0, pause=0.002):
    """Poll until the condition holds, and return its value. Fails the test after `seconds`."""
    end = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < end, f"not within {seconds} s: {condition}"
        time.sleep(pause)
    return value


def alive(pid):
    """A process that is neither gone nor a zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def regions(pid):
    """Inodes of the staging regions that a process maps or has open."""
    found = {int(inode) for inode in re.findall(r" (\d+) +/memfd:tplayout", Path(f"/proc/{pid}/maps").read_text())}
    for fd in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):
            if os.readlink(fd).startswith("/memfd:tplayout"):
                found.add(fd.stat().st_ino)
    return found


class Ranks:
    """Writers in processes of their own."""

    def __init__(self, stager, count):
        self._processes = [
            subprocess.Popen(
                [
                    *(sys.executable, str(HERE / "writer_process.py")),
                    json.dumps(stager.region_ref.to_json()),
                    json.dumps(stager.plan.geometry.to_json()),
                    *(str(rank), str(count)),
                ],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(count)
        ]

    def write(self, ref, key, ranks=None, **more):
        """All ranks (or some) fill their part of a slot and mark it; returns when they have."""
        order = {"slot": ref.slot, "generation": ref.generation, "groups": ref.groups, "key": key.hex(), **more}
        chosen = [self._processes[rank] for rank in (range(len(self._processes)) if ranks is None else ranks)]
        for process in chosen:
            process.stdin.write(json.dumps(order) + "\n")
            process.stdin.flush()
        for process in chosen:
            assert process.stdout.readline() == "done\n"

    def close(self):
        for process in self._processes:
            process.communicate()


class World:
    """Makes stagers on one store directory, and knows what must be in it."""

    TOKENS = TOKENS
    wait_until = staticmethod(wait_until)
    alive = staticmethod(alive)
    regions = staticmethod(regions)

    def __init__(self, root):
        self.root = root
        self.store = root / "store"
        self.faults = root / "faults.json"
        self.fail()
        self._stack = contextlib.ExitStack()

    def plan(self, geometry=ONE_GROUP, **changes):
        settings = {
            "url": f"file://{self.store}",
            "namespace": NAMESPACE,
            "geometry": geometry,
            "slots": 8,
            "writers": (2,) * len(geometry.groups),
            "io_processes": 1,
            "timeout_s": 5.0,
            "drain_s": 4.0,
        }
        return StagingPlan(**{**settings, **changes})

    def stager(self, plan=None, clock=time.monotonic, **changes):
        stager = Stager(plan or self.plan(**changes), clock)
        self._stack.callback(stager.close)
        return stager

    def faulty_stager(self, **changes):
        """A stager whose store obeys `fail`."""
        command = [sys.executable, str(HERE / "faulty_io_process.py")]
        stager = Stager(self.plan(**changes), command=command)
        self._stack.callback(stager.close)
        return stager

    def fail(self, **verbs):
        """What the store of `faulty_stager` does from now on, see faulty_io_process.py; nothing: it works."""
        temporary = self.faults.with_suffix(".new")
        temporary.write_text(json.dumps(verbs))
        temporary.rename(self.faults)

    def ranks(self, stager, count=2):
        ranks = Ranks(stager, count)
        self._stack.callback(ranks.close)
        return ranks

    def chunks(self, count, seed=0):
        return chain(NAMESPACE, [seed * 1000 + token for token in range(count * TOKENS)], TOKENS)

    def path(self, chunk, group=0):
        return self.store / object_name(NAMESPACE.hex()[:32], chunk.key, group)

    def fill(self, stager, ref, key):
        """Fill and mark a slot from this process, as all ranks."""
        for group in ref.groups:
            layout = stager.plan.layouts[group]
            order = {"slot": ref.slot, "key": key.hex()}
            writer_process.fill(stager.region, layout, order, group, range(layout.group.heads))
            for writer in range(stager.plan.writers[group]):
                stager.region.mark(ref.slot, group, writer, ref.generation)

    def save(self, stager, chunks, groups=None):
        """Save chunks and wait until they are in the store."""
        for chunk in chunks:
            ref = stager.begin_save(chunk, groups)
            assert ref is not None, stager.snapshot()["save_skips"]
            self.fill(stager, ref, chunk.key)
        self.settle(stager)

    def store_only(self, stager, chunks):
        """Save chunks and forget them: whoever wants them has to read them from the store."""
        self.save(stager, chunks)
        stager.reset()

    def settle(self, stager, seconds=20.0):
        """Poll until no job is unanswered."""

        def idle():
            stager.poll()
            return not stager.busy

        wait_until(idle, seconds)

    def settle_sending(self, stager, seconds=20.0):
        """Poll until the I/O processes have all that they were sent."""
        channels = stager._pool.io._channels

        def sent():
            stager.poll()
            return not any(channel._outgoing for channel in channels)

        wait_until(sent, seconds)

    def finish(self, stager, name, seconds=20.0):
        """Poll a lookup until it is done."""

        def done():
            state = stager.lookup(name)
            return state if state.done else None

        return wait_until(done, seconds)

    def expected(self, chunk, group=0, geometry=ONE_GROUP):
        """What `cell` says of every cell of a chunk: {(head, layer position): bytes}."""
        layout = chunk_layout(geometry, group, "xxh3-128")
        places = [(h, p) for h in range(layout.group.heads) for p in range(len(layout.group.layers))]
        size = layout.cell_bytes
        return {(h, p): writer_process.cell(chunk.key.hex(), group, h, p, size) for h, p in places}

    def cells(self, stager, ref, group=0):
        """The same, as it is in a slot."""
        layout = stager.plan.layouts[group]
        view = stager.region.slot(ref.slot, group)
        spans = {
            (h, p): layout.cell_range(h, p) for h in range(layout.group.heads) for p in range(len(layout.group.layers))
        }
        return {place: bytes(view[span.start : span.stop]) for place, span in spans.items()}

    def users_of_inode(self, inode):
        """Pids of processes that map the staging region with that inode, or have it open."""
        pids = []
        for entry in Path("/proc").iterdir():
            with contextlib.suppress(OSError):
                if entry.name.isdigit() and inode in regions(entry.name):
                    pids.append(int(entry.name))
        return pids

    def close(self):
        self._stack.close()


@pytest.fixture
def world(tmp_path, monkeypatch):
    world = World(tmp_path)
    monkeypatch.setenv("TPLAYOUT_TEST_FAULTS", str(world.faults))
    yield world
    world.close()


@pytest.fixture
def two_groups():
    return TWO_GROUPS
