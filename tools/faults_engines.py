"""Faults under real vLLM engines: their traffic, what is killed, what must be left of them.

Every stage writes the requests to the log and returns what it injected. Nothing is judged here.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import demo_models
from faults_log import Answer, Entry, RequestLog
from flaky_proxy import Proxy
from s3_server import S3Server
from vllm_engine import Engine, EngineFailed, Output, engine

from tools.faulty_files import FaultyFiles, spread
from tplayout.admin.prune import Limits, carry_out, plan
from tplayout.admin.verify import verify_store
from tplayout.errors import TPLayoutError
from tplayout.format.chunk import chunk_layout
from tplayout.format.identity import parse_namespace_document
from tplayout.storage import open_store

MODEL = "llama"
PLANTED = Path(__file__).with_name("planted_bug")
CHUNK_TOKENS = 64
ANSWER_TOKENS = 6
LENGTHS = (70, 130, 260, 390, 520)
LOAD_DEADLINE_S = 1.0
STORE_TIMEOUT_S = 2.0
SLOWEST_S = 60.0  # a request that takes longer hangs; two cores and four engines are slow
IO_PROCESS = "tplayout.staging.io_process"
ENDED_S = 30.0  # drain time of an I/O process, and one store operation beyond it
_THREADS = 3
RATE = 0.04  # of a store's calls: with more the server leaves the store alone most of the time


@dataclass
class Ground:
    """What stages share. directory: for stores and logs. prompts: by name. leaks: what was left behind, in words."""

    directory: Path
    log: RequestLog
    prompts: dict[str, list[int]]
    chance: random.Random
    leaks: list[str] = field(default_factory=list)
    unsound: list[str] = field(default_factory=list)

    def path(self, name: str) -> Path:
        """A new file or directory of a stage."""
        return self.directory / name


def make_prompts(count: int, seed: int) -> dict[str, list[int]]:
    """Prompts of which many begin alike: half of each is one of a few beginnings."""
    chance = random.Random(seed)
    stems = [demo_models.random_prompt(max(LENGTHS), seed + stem) for stem in range(max(1, count // 6))]
    prompts = {}
    for number in range(count):
        length = chance.choice(LENGTHS)
        kept = chance.randrange(length // 2, length)
        tail = demo_models.random_prompt(length - kept, seed + 1000 + number)
        prompts[f"p{number}"] = chance.choice(stems)[:kept] + tail
    return prompts


def engine_args(tp: int, url: str = "", block_size: int = 32, **options: Any) -> dict[str, Any]:
    """A small engine: its own cache and the staging hold a part of the prompts, so that the store is read.

    url: of the store; none: without the connector.
    """
    args: dict[str, Any] = {
        "model": str(demo_models.ensure(MODEL, "float32")),
        "tensor_parallel_size": tp,
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": 1024,
        "max_num_seqs": 8,
        "block_size": block_size,
        "num_gpu_blocks_override": 2048 // block_size,
        "skip_tokenizer_init": True,
    }
    if url:
        extra = {
            "url": url,
            "chunk_tokens": CHUNK_TOKENS,
            "staging_bytes": "8 MiB",
            "load_deadline_ms": int(1000 * LOAD_DEADLINE_S),
            "store_timeout_ms": int(1000 * STORE_TIMEOUT_S),
            "never_slower": False,  # so small a model computes faster than a disk reads
            **options,
        }
        args["kv_transfer_config"] = {
            "kv_connector": "TPLayoutConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }
    return args


def cold_answers(ground: Ground) -> dict[str, Answer]:
    """What an engine without the connector says to each prompt, computed from the first token on."""
    args = {**engine_args(1), "enable_prefix_caching": False}
    with engine(args, ground.path("cold.log")) as plain:
        return {name: _answer(plain.generate(tokens, ANSWER_TOKENS)) for name, tokens in ground.prompts.items()}


def _answer(output: Output) -> Answer:
    return Answer(output.tokens, output.logprobs)


class Traffic:
    """Clients of one engine, which ask one prompt after another until they are told to stop.

    doomed: set it before the engine is killed; requests that end without an answer afterwards are excused.
    """

    def __init__(self, ground: Ground, stage: str, running: Engine, pause_s: float = 0.0) -> None:
        self.doomed = False
        self.answered = 0
        self._ground = ground
        self._stage = stage
        self._engine = running
        self._pause_s = pause_s
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._ask_on, args=(random.Random(ground.chance.random()),), daemon=True)
            for _ in range(_THREADS)
        ]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self, chance: random.Random) -> None:
        names = sorted(self._ground.prompts)
        while not self._over.is_set() and self._ask(chance.choice(names)):
            self._over.wait(self._pause_s)

    def _ask(self, name: str) -> bool:
        """One request. False if the engine is gone."""
        server = f"tp{self._engine.args['tensor_parallel_size']}"
        start = time.monotonic()
        try:
            output = self._engine.submit(self._ground.prompts[name], ANSWER_TOKENS).result(2 * SLOWEST_S)
        except (EngineFailed, OSError) as error:
            text = str(error).partition("\n")[0]
            self._ground.log.add(Entry(self._stage, server, name, None, text, excused=self.doomed))
            return False
        seconds = time.monotonic() - start
        self._ground.log.add(Entry(self._stage, server, name, _answer(output), "", False, output.cached, seconds))
        self.answered += 1
        return True


def until(injected: Callable[[], int], least: int, seconds: float) -> None:
    """Wait until as many faults have happened, or the time is over."""
    end = time.monotonic() + seconds
    while injected() < least and time.monotonic() < end:
        time.sleep(0.2)


def on_faulty_files(ground: Ground, tp: int, least: int, seconds: float, kills: int) -> tuple[int, int]:
    """Traffic while every verb of the store breaks in every way, and then while I/O processes are killed.

    The engine goes on. Returns faults and kills.
    """
    root = ground.path("faulty-store")
    faults = FaultyFiles(ground.path("faulty-control"))
    args = engine_args(tp, f"faulty+file://{root}", storage_options=faults.storage_options)
    log = ground.path("faulty.log")
    with (
        engine(args, log, orderly=True, env=faults.environment()) as running,
        Traffic(ground, "faulty files", running),
    ):
        time.sleep(3)  # something is stored
        faults.inject(spread(RATE), ground.chance.randrange(2**31))
        until(lambda: faults.injected().total(), least, seconds)
        faults.stop()
        killed = kill_io_processes(ground, running, kills)
        time.sleep(3)
    check_store(ground, root, damaged=faults.damaged(root))
    check_remains(ground, running)
    return faults.injected().total(), killed


def kill_io_processes(ground: Ground, running: Engine, kills: int) -> int:
    """Kill I/O processes of an engine, one after another, at random moments of saving and loading."""
    done = 0
    while done < kills:
        time.sleep(ground.chance.uniform(0.1, 2.0))
        done += _kill_one(ground, running, IO_PROCESS)
    return done


def behind_a_flaky_proxy(ground: Ground, tp: int, least: int, seconds: float, away_s: float) -> int:
    """Traffic on S3 while its requests break in every way, it hangs, is refused, and is restarted. Faults injected.

    away_s: how long it is gone.
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(S3Server(ground.path("s3")))
        proxy = stack.enter_context(Proxy(server.port, ground.chance.randrange(2**31)))
        options = {**server.storage_options, "endpoint_url": f"http://127.0.0.1:{proxy.port}"}
        args = engine_args(tp, server.url, storage_options=options)
        log = ground.path("proxy.log")
        with engine(args, log, orderly=True) as running, Traffic(ground, "flaky proxy", running):
            time.sleep(3)
            proxy.rate = RATE
            until(lambda: proxy.injected.total(), least, seconds)
            proxy.rate = 0.0
            for stop in (proxy.hang, proxy.refuse):
                stop()
                time.sleep(min(away_s, 5))
                proxy.pass_()
                time.sleep(2)
            server.stop()
            time.sleep(away_s)
            again = S3Server(server.directory, port=server.port, key=server.key, secret=server.secret)
            stack.enter_context(again)
            time.sleep(3)
        check_store(ground, server.directory / server.bucket / "kv")
        check_remains(ground, running)
        return proxy.injected.total() + 3


def _kill_one(ground: Ground, running: Engine, words: str) -> int:
    """kill -9 one of the processes whose command line holds `words`; 0 if none lives at this moment."""
    pids = sorted(pid for pid, line in running.pids().items() if words in line)
    if not pids:
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(ground.chance.choice(pids), signal.SIGKILL)
        return 1
    return 0


def kill_servers(ground: Ground, kills: int, victims: tuple[tuple[int, str], ...]) -> int:
    """Start an engine on the same store, kill one of its processes at a random moment, look what is left; again. Kills.

    victims: (TP size, words in the command line), one after another; no words: all processes at once.
    """
    root = ground.path("server-kills-store")
    done = 0
    for number in range(kills):
        tp, words = victims[number % len(victims)]
        running = Engine(engine_args(tp, f"file://{root}"), ground.path("server-kills.log")).start()
        try:
            with Traffic(ground, "kills of servers", running) as traffic:
                time.sleep(ground.chance.uniform(0.2, 3.0))
                traffic.doomed = True
                done += _kill_one(ground, running, words) if words else _kill_all(running)
                check_remains(ground, running)  # while the clients' requests end
                running.kill()
        finally:
            running.kill()
        check_store(ground, root)
    sweep(ground, root)
    return done


def _kill_all(running: Engine) -> int:
    for pid in running.pids():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return 1


def several_servers(ground: Ground, shapes: tuple[tuple[int, int], ...], seconds: float) -> int:
    """Engines of these (TP size, block size) on one store at once; the first is killed half-way. Kills."""
    root = ground.path(f"shared-by-{len(shapes)}")
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(engine(engine_args(tp, f"file://{root}", block), ground.path(f"shared-{number}.log")))
            for number, (tp, block) in enumerate(shapes)
        ]
        stage = f"{len(shapes)} servers"
        traffic = [stack.enter_context(Traffic(ground, stage, running, pause_s=0.05)) for running in engines]
        time.sleep(seconds / 2)
        traffic[0].doomed = True
        _kill_all(engines[0])
        time.sleep(seconds / 2)
        for each in traffic[1:]:
            each.__exit__()
        for running in engines[1:]:
            running.stop()
    for running in engines:
        check_remains(ground, running)
    check_store(ground, root)
    sweep(ground, root)
    return 1


def check_remains(ground: Ground, running: Engine) -> None:
    """Without any help, nothing of ours is left of an engine that has ended: no I/O process, no shared memory."""
    end = time.monotonic() + ENDED_S
    while left := [*_holders(running)]:
        if time.monotonic() > end:
            ground.leaks += left
            return
        time.sleep(0.2)
    ground.leaks += [str(path) for path in Path("/dev/shm").iterdir() if "tplayout" in path.name]


def _holders(running: Engine) -> Iterator[str]:
    """Living processes of an engine that hold memory of ours, or are I/O processes."""
    for pid, line in running.pids().items():
        with contextlib.suppress(OSError):
            if "memfd:tplayout" in Path(f"/proc/{pid}/maps").read_text() or IO_PROCESS in line:
                yield f"{pid} {line}"


def check_store(ground: Ground, root: Path, damaged: set[str] = frozenset()) -> None:  # type: ignore[assignment]
    """What verification finds is what the faults have damaged, and nothing else."""
    try:
        with open_store(root) as store:
            found = {finding.name for finding in verify_store(store).damage}
    except TPLayoutError as error:
        ground.unsound.append(f"{root.name}: {error}")
        return
    ground.unsound += [f"{root.name}: damaged though no fault did it: {name}" for name in sorted(found - damaged)]
    ground.unsound += [f"{root.name}: damaged by a fault and not found: {name}" for name in sorted(damaged - found)]


def sweep(ground: Ground, root: Path) -> None:
    """Remove what dead writers have left, as `tplayout gc` does; what is left then is a leak."""
    with open_store(root) as store:
        carry_out(store, plan(store, Limits(temporary_age=0.0)))
        ground.leaks += [info.key for info in store.temporaries()]


def planted_bug(ground: Ground) -> None:
    """An engine that verifies nothing, and one wrong cell in every object: its answers must not pass.

    The control of the whole harness; its log is not that of the other stages.
    """
    root = ground.path("planted-store")
    planted = {"PYTHONPATH": os.pathsep.join([str(PLANTED), *filter(None, [os.environ.get("PYTHONPATH")])])}
    with engine(engine_args(1, f"file://{root}"), ground.path("planted.log"), env=planted) as running:
        for _ in range(2):
            for name, tokens in ground.prompts.items():
                output = running.generate(tokens, ANSWER_TOKENS)
                ground.log.add(Entry("planted bug", "tp1", name, _answer(output), cached=output.cached))
            time.sleep(3)  # all is stored
            _negate_a_cell(root)
            running.call("reset_prefix_cache", connector=True)


def _negate_a_cell(root: Path) -> None:
    """Change the sign of every element of the first cell of every object: layer 0 of head 0, in float32."""
    (document,) = root.glob("*/namespace.json")
    stored = parse_namespace_document(document.read_bytes(), document.parent.name)
    span = chunk_layout(stored.identity.geometry, 0, stored.storage.digest, None).cell_range(0, 0)
    signs = slice(span.start + 3, span.stop, 4)
    for file in root.rglob("*.safetensors"):
        data = bytearray(file.read_bytes())
        data[signs] = bytes(byte ^ 0x80 for byte in data[signs])
        file.write_bytes(data)
