"""What a server that is killed while it writes leaves behind: no memory, and temporaries that `gc` removes."""

import itertools
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from click.testing import CliRunner

from tplayout.cli.main import main
from tplayout.staging.watchdog import look_at
from tplayout.storage.base import is_temporary

HERE = Path(__file__).parent
MIB = 1 << 20


def temporaries(world):
    return [path for path in world.store.rglob("*") if is_temporary(path.name)]


def stop_in_mid_write(world, pid):
    """SIGSTOP, at moments taken at random, until the process has a temporary open."""
    for number in itertools.count():
        assert number < 5000, "never caught while it writes"
        os.kill(pid, signal.SIGSTOP)
        world.wait_until(lambda: set(look_at(pid).states) == {"T"})
        if temporaries(world):
            return
        os.kill(pid, signal.SIGCONT)
        time.sleep(0.001)


def gc(world, *arguments):
    result = CliRunner().invoke(main, ["gc", str(world.store), "--yes", "--json", *arguments])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)["temporaries"]


def test_a_server_that_is_killed_while_it_writes(world):
    command = [sys.executable, str(HERE / "server_process.py"), str(world.store), str(MIB), "1"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        (pid,) = json.loads(server.stdout.readline())
        world.wait_until(lambda: list(world.store.rglob("*.safetensors")))
        (inode,) = world.regions(server.pid) | world.regions(pid)
        assert set(world.users_of_inode(inode)) == {server.pid, pid}
        stop_in_mid_write(world, pid)
    finally:
        server.kill()
        os.kill(pid, signal.SIGKILL)
        server.communicate()
    world.wait_until(lambda: not world.users_of_inode(inode))
    left = temporaries(world)  # one for each chunk that it was writing at that moment
    assert left

    again = world.stager(writers=(1,))  # the next server does not touch it: another one may be writing it
    world.save(again, world.chunks(2, seed=9))
    again.close()
    assert sorted(temporaries(world)) == sorted(left)

    assert gc(world) == 0  # nor does gc, for an hour
    for path in left:
        os.utime(path, (time.time() - 3700, time.time() - 3700))
    assert gc(world) == len(left)
    assert temporaries(world) == []
