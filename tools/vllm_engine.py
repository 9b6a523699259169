"""Start, command and kill real vLLM engines: what talks to `vllm_engine_driver.py`, and what `/proc` knows of them.

Every process of one engine, the detached ones included, is found by a marker in its environment.
"""

import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import vllm_server

DRIVER = Path(__file__).with_name("vllm_engine_driver.py")
ONE_PROCESS = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}  # environment: engine, scheduler and worker in the driver


class EngineFailed(Exception):
    """The engine did not start or died; the text ends with its log's last lines."""


@dataclass(frozen=True)
class Output:
    """What one request gave: counts of tokens, the text, the tokens, top log-probabilities a token, seconds."""

    prompt: int
    cached: int
    text: str
    tokens: list[int]
    finish: str
    logprobs: list[dict[str, float]]
    first_token_s: float
    total_s: float


@dataclass
class Pending:
    """A request in flight: `result()` waits for its end, `abort()` hangs up."""

    engine: "Engine"
    name: str
    box: "queue.Queue[dict[str, Any]]"

    def result(self, timeout: float = 180) -> Output:
        return Output(**self.engine.wait(self.box, f"request {self.name}", timeout))

    def abort(self) -> bool:
        return bool(self.engine.call("abort", request=self.name))


@dataclass
class Engine:
    """One engine. `args` are vLLM's engine arguments; `log` receives everything that it prints."""

    args: dict[str, Any]
    log: Path
    env: dict[str, str] = field(default_factory=dict)
    start_timeout: float = 240
    run: str = field(default_factory=lambda: uuid.uuid4().hex)

    def start(self) -> "Engine":
        """Start and wait until it can serve. EngineFailed if it ends instead."""
        self.ids, self.names = 0, 0
        self.boxes: dict[int, queue.Queue[dict[str, Any]]] = {}
        self.ready: queue.Queue[bool] = queue.Queue()
        self.lock = threading.Lock()
        self.started = time.monotonic()
        self.shared_memory: set[Path] = set()
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(
                [sys.executable, str(DRIVER), json.dumps(self.args)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **vllm_server.cpu_environment(), **self.env, vllm_server.RUN_MARK: self.run},
                start_new_session=True,
            )
        threading.Thread(target=self._read, daemon=True).start()
        try:
            up = self.ready.get(timeout=self.start_timeout)
        except queue.Empty:
            up = False
        if not up:
            self.kill()
            raise EngineFailed(f"the engine did not start: {self.args}\n{self.tail()}")
        self.start_s = time.monotonic() - self.started
        # Here, since a process that is killed later says nothing of it any more.
        self.shared_memory = vllm_server.shared_memory_of(self.pids())
        return self

    def _read(self) -> None:
        """Distribute the replies; at the end of the pipe everybody who still waits is told."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            try:
                message = json.loads(line)
            except ValueError:
                continue
            if message.get("event") == "ready":
                self.ready.put(True)
            elif box := self.boxes.pop(message.get("id"), None):
                box.put(message)
        self.ready.put(False)
        with self.lock:
            for box in self.boxes.values():
                box.put({"error": "the engine's driver ended"})

    def send(self, op: str, **fields: Any) -> "queue.Queue[dict[str, Any]]":
        """Send a command; the reply arrives in the queue returned."""
        box: queue.Queue[dict[str, Any]] = queue.Queue()
        with self.lock:
            self.ids += 1
            self.boxes[self.ids] = box
            assert self.process.stdin is not None
            self.process.stdin.write((json.dumps({"id": self.ids, "op": op, **fields}) + "\n").encode())
            self.process.stdin.flush()
        return box

    def wait(self, box: "queue.Queue[dict[str, Any]]", what: str, timeout: float) -> Any:
        """The result of a command; EngineFailed on an error or when it takes too long."""
        try:
            message = box.get(timeout=timeout)
        except queue.Empty:
            raise EngineFailed(f"{what}: no answer in {timeout:g} s\n{self.tail()}") from None
        if "error" in message:
            raise EngineFailed(f"{what}: {message['error']}\n{self.tail()}")
        return message["result"]

    def call(self, op: str, timeout: float = 60, **fields: Any) -> Any:
        """Send a command and wait for its result."""
        return self.wait(self.send(op, **fields), op, timeout)

    def restart(self, args: dict[str, Any]) -> "Engine":
        """Another engine in this driver's process: saves the imports, all of them with ONE_PROCESS."""
        self.call("restart", self.start_timeout, engine_args=args)
        self.args = args
        return self

    def submit(
        self,
        tokens: list[int],
        max_tokens: int = 8,
        salt: str | None = None,
        lora: tuple[str, int, str] | None = None,
        embeds: Path | None = None,
        audio: Path | None = None,
        rank: int | None = None,
        **params: Any,
    ) -> Pending:
        """Start a request (greedy, with five log-probabilities a token, unless `params` say otherwise).

        lora: name, id and path of an adapter. embeds: a safetensors file with the prompt's embeddings "embeds", where
        `tokens` is empty. audio: one with samples "audio", for the prompt's one audio token. rank: the data-parallel
        engine that runs it.
        """
        self.names += 1
        name = f"r{self.names}"
        extra = {"cache_salt": salt} if salt else {}
        files = {kind: str(file) for kind, file in (("embeds", embeds), ("audio", audio)) if file is not None}
        kind = {"lora": lora, "rank": rank, **files}
        params = {"max_tokens": max_tokens, "min_tokens": max_tokens, "detokenize": True, **params}
        if self.args.get("skip_tokenizer_init"):
            params.update(detokenize=False, min_tokens=0, ignore_eos=True)
        return Pending(
            self, name, self.send("generate", request=name, tokens=tokens, params=params, extra=extra, **kind)
        )

    def generate(self, tokens: list[int], max_tokens: int = 8, **params: Any) -> Output:
        """Run one request to its end."""
        return self.submit(tokens, max_tokens, **params).result()

    def metrics(self) -> dict[str, float]:
        """`/metrics` as {name{labels}: value} and {name: sum over all labels}."""
        return vllm_server.parse_metrics(self.call("metrics"))

    def stop(self) -> None:
        """Shut down in order and wait until the driver has ended. I/O processes may still publish."""
        with contextlib.suppress(EngineFailed, OSError):
            self.call("shutdown")
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(20)

    def kill(self) -> None:
        """End every process of this engine that is still there, by pid, and remove what vLLM leaves then."""
        pids = self.pids()
        left_behind = self.shared_memory | vllm_server.shared_memory_of(pids)
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()
        vllm_server.remove_shared_memory(left_behind)

    def pids(self) -> dict[int, str]:
        """The living processes of this engine: {pid: command line}."""
        return vllm_server.processes_of(self.run, self.process.pid)

    def pid_of(self, words: str) -> int:
        """The one process whose command line holds `words`."""
        found = [pid for pid, line in self.pids().items() if words in line]
        assert found, f"no process named {words!r} in {self.pids()}"
        return found[0]

    def gone(self, words: str, within: float) -> bool:
        """True once no process whose command line holds `words` lives; False after `within` seconds."""
        deadline = time.monotonic() + within
        while any(words in line for line in self.pids().values()):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.1)
        return True

    def text(self) -> str:
        """Everything that the engine has printed."""
        return self.log.read_text(errors="replace")

    def tail(self, lines: int = 40) -> str:
        """The last lines of the log."""
        return "\n".join(self.text().splitlines()[-lines:])


@contextlib.contextmanager
def engine(args: dict[str, Any], log: Path, **options: Any) -> Iterator[Engine]:
    """A started engine that is killed at the end, which is quick; `stop` it before that where order matters."""
    running = Engine(args, log, **options)
    try:
        yield running.start()
    finally:
        running.kill()
