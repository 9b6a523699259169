"""Start and stop a real vLLM OpenAI server on this machine, and talk to it: used by the demo and by the tests.

It imports nothing that must be installed: vLLM runs in its own process and is only reached over HTTP and signals.
"""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from s3_server import free_port

# The same server as `vllm serve`; the CPU build's `vllm` command does not start.
SERVER_MODULE = "vllm.entrypoints.openai.api_server"

# Children inherit it, so that processes which left the family tree are still found as ours.
RUN_MARK = "TPLAYOUT_RUN"

TAIL_LINES = 25  # of a server's log, in errors


class ServerError(Exception):
    """The server did not start, died, or refused a request. The text says where its log is and how it ends."""


@dataclass(frozen=True)
class Answer:
    """One answer: text, prompt tokens, how many of them came from a cache, seconds to the first token and in all."""

    text: str
    prompt_tokens: int
    cached_tokens: int
    first_token_s: float
    total_s: float


def interrupt_on_sigterm() -> None:
    """Make SIGTERM end a program as Ctrl-C does: the servers that it has started are stopped first."""

    def handler(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, handler)


def cpu_environment() -> dict[str, str]:
    """Environment that lets several tensor-parallel ranks share few CPU cores, and keeps vLLM off the network."""
    return {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def parse_metrics(text: str) -> dict[str, float]:
    """Prometheus text as {name{labels}: value}, plus {name: sum over all label sets}."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if line.startswith("#") or not line.strip():
            continue
        name, _, value = line.rpartition(" ")
        number = float(value)
        values[name] = number
        if "{" in name:
            bare = name.partition("{")[0]
            values[bare] = values.get(bare, 0.0) + number
    return values


def transfer_config(url: str, role: str = "kv_both", **extra: Any) -> str:
    """The value of `--kv-transfer-config` that offloads to `url`; `extra` are further options of the connector."""
    return json.dumps(
        {
            "kv_connector": "TPLayoutConnector",
            "kv_role": role,
            "kv_connector_extra_config": {"url": url, **extra},
        }
    )


@dataclass
class VLLMServer:
    """One server process and its children. `args` follow vLLM's own command line; `log` gets all that it prints."""

    model: Path
    tp: int
    log: Path
    args: Sequence[str] = ()
    env: dict[str, str] = field(default_factory=dict)
    name: str = "model"
    dev_mode: bool = False
    run: str = field(default_factory=lambda: uuid.uuid4().hex)
    process: "subprocess.Popen[bytes] | None" = None
    start_s: float = 0.0

    def start(self, timeout: float = 300, waiting: Callable[[float], None] = lambda elapsed: None) -> None:
        """Start and wait until it answers `/health`; `waiting(elapsed)` is called about twice a second meanwhile."""
        self.port = free_port()
        command = [
            *(sys.executable, "-m", SERVER_MODULE, "--model", str(self.model), "--served-model-name", self.name),
            *("--host", "127.0.0.1", "--port", str(self.port), "--tensor-parallel-size", str(self.tp)),
            *("--enable-prompt-tokens-details", *self.args),
        ]
        begin = time.monotonic()
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            # A session of its own: Ctrl-C in a terminal reaches only us, and we stop the server in order.
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=self._environment(),
                start_new_session=True,
            )
        while not self._healthy():
            if self.process.poll() is not None:
                raise ServerError(
                    f"{self._title()} ended with status {self.process.returncode} at start\n{self.tail()}"
                )
            if time.monotonic() - begin > timeout:
                raise ServerError(f"{self._title()} is not ready after {timeout:g} s\n{self.tail()}")
            waiting(time.monotonic() - begin)
            time.sleep(0.5)
        self.start_s = time.monotonic() - begin

    def _environment(self) -> dict[str, str]:
        mode = {"VLLM_SERVER_DEV_MODE": "1"} if self.dev_mode else {}
        return {**os.environ, **cpu_environment(), **mode, **self.env, RUN_MARK: self.run}

    def _title(self) -> str:
        return f"the vLLM server (TP={self.tp})"

    def _healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=5) as response:
                return bool(response.status == 200)
        except OSError:
            return False

    def tail(self) -> str:
        """Where the log is, and its last lines."""
        text = self.log.read_text(errors="replace") if self.log.exists() else ""
        last = "\n".join(f"  | {line}" for line in text.splitlines()[-TAIL_LINES:])
        return f"log: {self.log}\n{last}"

    def _open(self, path: str, body: dict[str, Any] | None, timeout: float) -> Any:
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}{path}")
        if body is not None:
            request.data = json.dumps(body).encode()
            request.add_header("Content-Type", "application/json")
        try:
            return urllib.request.urlopen(request, timeout=timeout)
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:500]
            raise ServerError(f"{self._title()} answered {path} with {error.code}: {said}\n{self.tail()}") from None
        except OSError as error:
            raise ServerError(f"{self._title()} did not answer {path}: {error}\n{self.tail()}") from None

    def _stream(self, body: dict[str, Any], timeout: float) -> Iterator[dict[str, Any]]:
        with self._open("/v1/chat/completions", body, timeout) as response:
            try:
                for line in response:
                    data = line.decode().strip().removeprefix("data:").strip()
                    if data and data != "[DONE]":
                        yield json.loads(data)
            except OSError as error:
                raise ServerError(f"{self._title()} broke off its answer: {error}\n{self.tail()}") from None

    def chat(self, prompt: str, max_tokens: int, salt: str | None = None, timeout: float = 300) -> Answer:
        """Send one user message (greedy, streamed) and wait for the whole answer.

        salt: keeps the request apart from every cached one that has another salt or none.
        """
        body = {
            "model": self.name,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
            **({"cache_salt": salt} if salt else {}),
        }
        begin, first, pieces = time.monotonic(), None, []
        usage: dict[str, Any] = {}
        for event in self._stream(body, timeout):
            if "error" in event:
                raise ServerError(f"{self._title()} failed in its answer: {event['error']}\n{self.tail()}")
            piece = "".join(choice["delta"].get("content") or "" for choice in event["choices"])
            if piece and first is None:
                first = time.monotonic() - begin
            pieces.append(piece)
            usage = event.get("usage") or usage
        if first is None or not usage:
            raise ServerError(f"{self._title()} gave an empty answer\n{self.tail()}")
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            text="".join(pieces),
            prompt_tokens=int(usage["prompt_tokens"]),
            cached_tokens=int(details.get("cached_tokens") or 0),
            first_token_s=first,
            total_s=time.monotonic() - begin,
        )

    def metrics(self) -> dict[str, float]:
        """The server's `/metrics`, parsed."""
        with self._open("/metrics", None, 30) as response:
            return parse_metrics(response.read().decode())

    def reset_prefix_cache(self) -> None:
        """Empty the server's own prefix cache (one of vLLM's development endpoints: `dev_mode` must be set)."""
        self._open("/reset_prefix_cache", {}, 30).close()

    def stop(self, timeout: float = 60) -> float:
        """SIGTERM, as an operator or an orchestrator stops it. Returns the seconds until the server had ended.

        The connector's I/O processes, in sessions of their own, are left alone: they may still be publishing.
        """
        if self.process is None:
            return 0.0
        begin = time.monotonic()
        left_behind = shared_memory_of(self.processes())
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        seconds = time.monotonic() - begin
        if not self._wait_for_end(5, lambda pid: session_of(pid) == self._session):
            self._kill(lambda pid: session_of(pid) == self._session)
        remove_shared_memory(left_behind)
        return seconds

    def settle(self, timeout: float) -> bool:
        """Wait until the I/O processes have ended too; after `timeout` seconds kill them and return False."""
        ended = self._wait_for_end(timeout, lambda pid: True)
        self._kill(lambda pid: True)
        return ended

    def processes(self) -> dict[int, str]:
        """Everything that this server started and that still lives: {pid: command line}."""
        return processes_of(self.run, self._session)

    @property
    def _session(self) -> int:
        return self.process.pid if self.process else -1

    def _wait_for_end(self, timeout: float, which: Callable[[int], bool]) -> bool:
        limit = time.monotonic() + timeout
        while any(which(pid) for pid in processes_of(self.run, self._session)):
            if time.monotonic() > limit:
                return False
            time.sleep(0.1)
        return True

    def _kill(self, which: Callable[[int], bool]) -> None:
        for pid in processes_of(self.run, self._session):
            if which(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)


def session_of(pid: int) -> int | None:
    """The session id of a process, None when it is gone."""
    try:
        return os.getsid(pid)
    except ProcessLookupError:
        return None


def processes_of(run: str, session: int) -> dict[int, str]:
    """Living processes of a session, or with RUN_MARK=run in their environment: {pid: command line}.

    Both are needed: processes that gave themselves a title have overwritten their environment, as /proc shows it, and
    detached ones have left the session.
    """
    wanted = f"{RUN_MARK}={run}".encode()
    found = {}
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            pid = int(entry.name)
            if session_of(pid) == session or wanted in (entry / "environ").read_bytes().split(b"\0"):
                line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                if line:  # a zombie has none
                    found[pid] = line
    return found


def shared_memory_of(pids: Iterable[int]) -> set[Path]:
    """Files in /dev/shm that these processes have mapped: vLLM's message queues, which it leaves there at SIGTERM."""
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
                _, slash, name = line.partition(" /dev/shm/")
                if slash:
                    found.add(Path("/dev/shm") / name.removesuffix(" (deleted)"))
    return found


def remove_shared_memory(paths: Iterable[Path]) -> None:
    """Remove what `shared_memory_of` found, once its processes have ended."""
    for path in paths:
        path.unlink(missing_ok=True)
