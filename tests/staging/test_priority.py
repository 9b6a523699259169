"""I/O processes go before spinning ranks from their first instruction on, not only once they have started."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tplayout.staging.io_client import IoChannel
from tplayout.staging.priority import prefer
from tplayout.staging.region import Region, RegionPlan

SLEEP = [sys.executable, "-c", "import time; time.sleep(60)"]


def allowed() -> bool:
    """Whether this machine lets us raise a process."""
    child = subprocess.Popen(SLEEP, start_new_session=True)
    try:
        os.setpriority(os.PRIO_PROCESS, child.pid, -1)
    except PermissionError:
        return False
    finally:
        child.kill()
        child.wait()
    return True


def test_a_session_leader_is_raised_with_what_it_forks() -> None:
    child = subprocess.Popen(SLEEP, start_new_session=True)
    try:
        before = os.getpriority(os.PRIO_PROCESS, child.pid)
        prefer(child.pid)
        assert os.getpriority(os.PRIO_PROCESS, child.pid) == (-10 if allowed() else before)
    finally:
        child.kill()
        child.wait()


def test_a_process_that_is_gone_is_no_error() -> None:
    child = subprocess.Popen(["true"])
    child.wait()
    prefer(child.pid)


@pytest.mark.parametrize("wait", [0.0, 0.05])
def test_who_starts_an_io_process_raises_it(tmp_path: Path, wait: float) -> None:
    """A command that never raises itself: what it has, it has from us."""
    region = Region.create(RegionPlan(1, (4096,), (1,)))
    channel = IoChannel(SLEEP, b"", region, time.monotonic)
    try:
        time.sleep(wait)
        pid = channel._launcher.pid
        assert (os.getpriority(os.PRIO_PROCESS, pid) == -10) == allowed()
    finally:
        channel._launcher.kill()
        channel._launcher.wait()
        channel.close()
        region.close()
