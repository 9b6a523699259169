"""A real Ceph RADOS Gateway on loopback: one monitor, one OSD (BlueStore on a file) and the S3 gateway.

Needs the programs ceph-mon, ceph-osd, radosgw, radosgw-admin, monmaptool and ceph (tools/setup_ceph.sh). Starts in
about 6 s. Authentication between its daemons is off, which is why it only listens on 127.0.0.1.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
import uuid
from pathlib import Path

from s3_server import S3Account, answers, die_with_parent, free_port

PROGRAMS = ("ceph", "ceph-mon", "ceph-osd", "monmaptool", "radosgw", "radosgw-admin")
START_TIMEOUT_S = 90.0

_CONF = """
[global]
fsid = {fsid}
mon host = v2:127.0.0.1:{mon_port}/0
mon initial members = a
auth cluster required = none
auth service required = none
auth client required = none
public addr = 127.0.0.1
cluster addr = 127.0.0.1
ms bind ipv6 = false
ms bind msgr1 = false
ms mon client mode = crc
run dir = {root}
admin socket = {root}/$name.asok
log file = {root}/$name.log
pid file =
osd pool default size = 1
osd pool default min size = 1
osd pool default pg num = 4
osd pool default pgp num = 4
osd pool default pg autoscale mode = off
rgw rados pool pg num min = 4
osd crush chooseleaf type = 0
mon allow pool size one = true
mon max pg per osd = 2000
[mon.a]
mon data = {root}/mon
[osd.0]
osd data = {root}/osd
osd objectstore = bluestore
bluestore block size = 10737418240
osd memory target = 1073741824
[client.rgw]
rgw data = {root}/rgw
rgw frontends = beast endpoint=127.0.0.1:{port}
rgw thread pool size = 64
rgw enable usage log = false
rgw dynamic resharding = false
rgw override bucket index max shards = 1
"""


def missing_programs() -> list[str]:
    """The programs that this needs and the machine lacks."""
    return [program for program in PROGRAMS if shutil.which(program) is None]


class CephServer(S3Account):
    """One gateway with one bucket, for as long as the context lasts."""

    def __init__(self, bucket: str = "tplayout") -> None:
        super().__init__(bucket)
        self._root = Path(tempfile.mkdtemp(prefix="tplayout-ceph-"))
        self._env = {**os.environ, "CEPH_CONF": str(self._root / "ceph.conf")}
        self._daemons: list[subprocess.Popen[bytes]] = []

    def __enter__(self) -> CephServer:
        try:
            self._start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        self.stop()

    def stop(self) -> None:
        """SIGKILL the daemons, the gateway first, and remove their data."""
        for daemon in reversed(self._daemons):
            daemon.kill()
            daemon.wait()
        self._daemons.clear()
        shutil.rmtree(self._root, ignore_errors=True)

    def _start(self) -> None:
        mon_port = free_port()
        fsid = str(uuid.uuid4())
        for name in ("mon", "osd", "rgw"):
            (self._root / name).mkdir()
        conf = self._root / "ceph.conf"
        conf.write_text(_CONF.format(fsid=fsid, mon_port=mon_port, root=self._root, port=self.port))
        addresses = f"[v2:127.0.0.1:{mon_port}]"
        monmap = str(self._root / "monmap")
        self._run("monmaptool", "--create", "--clobber", "--fsid", fsid, "--addv", "a", addresses, monmap)
        self._run("ceph-mon", "--mkfs", "-i", "a", "--monmap", monmap)
        self._daemon("ceph-mon", "-f", "-i", "a")
        osd = str(uuid.uuid4())
        self._run("ceph", "osd", "new", osd, "0")
        self._run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd)
        self._daemon("ceph-osd", "-f", "-i", "0")
        self._wait_for("the OSD", lambda: "1 up" in self._run("ceph", "osd", "stat"))
        user = ("--uid=test", "--display-name=test", f"--access-key={self.key}", f"--secret-key={self.secret}")
        self._run("radosgw-admin", "-n", "client.rgw", "user", "create", *user)
        self._daemon("radosgw", "-f", "-n", "client.rgw")
        self._wait_for("the gateway", lambda: answers(self.port))
        self._create_bucket()

    def _run(self, *command: str) -> str:
        done = subprocess.run(command, env=self._env, capture_output=True, text=True, timeout=START_TIMEOUT_S)
        if done.returncode:
            raise RuntimeError(f"{command[0]} failed ({done.returncode}): {done.stderr[-2000:]}")
        return done.stdout

    def _daemon(self, *command: str) -> None:
        with (self._root / f"{command[0]}.out").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(
                    [*die_with_parent(), *command],
                    env=self._env,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    start_new_session=True,
                )
            )

    def _wait_for(self, what: str, ready: object) -> None:
        limit = time.monotonic() + START_TIMEOUT_S
        while not ready():  # type: ignore[operator]
            if time.monotonic() > limit or self._daemons[-1].poll() is not None:
                logs = "\n".join(path.read_text(errors="replace")[-1000:] for path in self._root.glob("*.out"))
                raise RuntimeError(f"Ceph: {what} did not start:\n{logs}")
            time.sleep(0.1)

    def _create_bucket(self) -> None:
        from s3fs import S3FileSystem

        S3FileSystem(**self.storage_options, skip_instance_cache=True).call_s3("create_bucket", Bucket=self.bucket)
