"""Faults under real vLLM engines: their traffic, what is killed, what must be left of them.

Every stage writes the requests to the log and returns what it did. Nothing is judged here.
"""

from __future__ import annotations

import contextlib
import os
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import demo_models
from faults_log import Answer, Entry, RequestLog, decided
from flaky_proxy import Proxy
from s3_server import S3Server
from vllm_engine import Engine, EngineFailed, Output, engine

from tools.faulty_files import FaultyFiles, spread
from tplayout.admin.prune import Limits, carry_out, plan
from tplayout.admin.verify import verify_store
from tplayout.errors import TPLayoutError
from tplayout.format.identity import parse_namespace_document
from tplayout.format.layout import chunk_layout
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
REPLACED_S = 60.0  # after some deaths in a row a server takes half a minute to start the next I/O process
_THREADS = 3
RATE = 0.04  # of a store's calls: with more the server leaves the store alone most of the time


@dataclass
class Tally:
    """What was done: faults, kill -9 of processes, bytes of mutated input. The verdict is about what came of it."""

    injected: int = 0
    kills: int = 0
    fuzzed: int = 0

    def add(self, other: Tally) -> None:
        self.injected += other.injected
        self.kills += other.kills
        self.fuzzed += other.fuzzed


@dataclass
class Ground:
    """What stages share. directory: for stores and logs. prompts: by name.

    leaks: what was left behind, in words. unsound: what else must not be, in words.
    """

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
    """What an engine without the connector says to each prompt, computed from the first token on.

    Prompts whose answer hangs on rounding are taken out of the ground: they say nothing about a cache.
    """
    args = {**engine_args(1), "enable_prefix_caching": False}
    with engine(args, ground.path("cold.log")) as plain:
        cold = {name: _answer(plain.generate(tokens, ANSWER_TOKENS)) for name, tokens in ground.prompts.items()}
    for name in [name for name, answer in cold.items() if not decided(answer)]:
        del ground.prompts[name]
    return cold


def _answer(output: Output) -> Answer:
    return Answer(output.tokens, output.logprobs)


class Traffic:
    """Clients of one engine, which ask one prompt after another until they are told to stop.

    doomed: set it before the engine is killed; requests that end without an answer afterwards are excused.
    hang_ups: the share of requests whose client hangs up before the answer; they are owed none, and not written down.
    """

    def __init__(
        self, ground: Ground, stage: str, running: Engine, pause_s: float = 0.0, hang_ups: float = 0.0
    ) -> None:
        self.doomed = False
        self._ground = ground
        self._stage = stage
        self._engine = running
        self._pause_s = pause_s
        self._hang_ups = hang_ups
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
        self.stop()

    def stop(self) -> None:
        """Ask nothing more, and wait for the answers."""
        self._over.set()
        for thread in self._threads:
            thread.join()

    def _ask_on(self, chance: random.Random) -> None:
        names = sorted(self._ground.prompts)
        while not self._over.is_set() and self._ask(chance.choice(names), chance):
            self._over.wait(self._pause_s)

    def _ask(self, name: str, chance: random.Random) -> bool:
        """One request. False if the engine is gone."""
        server = f"tp{self._engine.args['tensor_parallel_size']}"
        start = time.monotonic()
        try:
            request = self._engine.submit(self._ground.prompts[name], ANSWER_TOKENS)
            if chance.random() < self._hang_ups:
                time.sleep(chance.uniform(0.0, 0.3))
                if request.abort():
                    return True
            output = request.result(2 * SLOWEST_S)
        except (EngineFailed, OSError) as error:
            text = str(error).partition("\n")[0]
            self._ground.log.add(Entry(self._stage, server, name, None, text, excused=self.doomed))
            return False
        seconds = time.monotonic() - start
        self._ground.log.add(Entry(self._stage, server, name, _answer(output), "", False, output.cached, seconds))
        return True


def until(injected: Callable[[], int], least: int, seconds: float) -> None:
    """Wait until as many faults have happened, or the time is over."""
    end = time.monotonic() + seconds
    while injected() < least and time.monotonic() < end:
        time.sleep(0.2)


def on_faulty_files(ground: Ground, tp: int, least: int, seconds: float, kills: int) -> Tally:
    """Traffic while every verb of the store breaks in every way, and then while I/O processes are killed.

    The engine goes on.
    """
    root = ground.path("faulty-store")
    faults = FaultyFiles(ground.path("faulty-control"))
    args = engine_args(tp, f"faulty+file://{root}", storage_options=faults.storage_options)
    with engine(args, ground.path("faulty.log"), env=faults.environment()) as running:
        with Traffic(ground, "faulty files", running):
            _wait_for_an_object(root)
            faults.inject(spread(RATE), ground.chance.randrange(2**31))
            until(lambda: faults.injected().total(), least, seconds)
            faults.stop()
            killed = kill_io_processes(ground, [running], kills)
            time.sleep(3)
        check_end(ground, running, "faulty files")
    check_store(ground, root, damaged=faults.damaged(root))
    sweep(ground, root)
    return Tally(faults.injected().total(), killed)


def _wait_for_an_object(root: Path) -> None:
    """Until namespace.json is stored and an object behind it: without the first, nothing damaged would be found."""
    end = time.monotonic() + SLOWEST_S
    while not any(root.rglob("*.safetensors")) and time.monotonic() < end:
        time.sleep(0.2)


def kill_io_processes(ground: Ground, running: Sequence[Engine], kills: int) -> int:
    """Kill I/O processes of these engines, one after another, at random moments of saving and loading. How many.

    An engine that does not replace them is unsound.
    """
    done, seen_at = 0, time.monotonic()
    while done < kills:
        time.sleep(ground.chance.uniform(0.1, 2.0))
        if _kill_one(ground, ground.chance.choice(running), IO_PROCESS):
            done, seen_at = done + 1, time.monotonic()
        elif time.monotonic() > seen_at + REPLACED_S:
            ground.unsound.append(f"no I/O process in {REPLACED_S:g} s, after {done} had been killed")
            break
    return done


def behind_a_flaky_proxy(ground: Ground, tp: int, least: int, seconds: float, away_s: float) -> Tally:
    """Traffic on S3 while its requests break in every way, it hangs, is refused, and is restarted.

    away_s: how long it is gone.
    """
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(S3Server(ground.path("s3")))
        proxy = stack.enter_context(Proxy(server.port, ground.chance.randrange(2**31)))
        options = {**server.storage_options, "endpoint_url": f"http://127.0.0.1:{proxy.port}"}
        args = engine_args(tp, server.url, storage_options=options)
        with engine(args, ground.path("proxy.log")) as running:
            with Traffic(ground, "flaky proxy", running):
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
            check_end(ground, running, "flaky proxy")
        check_store(ground, server.directory / server.bucket / "kv")
        return Tally(proxy.injected.total() + 3)


def _kill_one(ground: Ground, running: Engine, words: str) -> int:
    """kill -9 one of the processes whose command line holds `words`; 0 if none lives at this moment."""
    pids = sorted(pid for pid, line in running.pids().items() if words in line)
    if not pids:
        return 0
    with contextlib.suppress(ProcessLookupError):
        os.kill(ground.chance.choice(pids), signal.SIGKILL)
        return 1
    return 0


def kill_servers(ground: Ground, kills: int, victims: tuple[tuple[int, str], ...], io_kills: int) -> Tally:
    """Start an engine, kill one of its processes at a random moment, look what is left; again, `kills` times.

    victims: (TP size, words in the command line), one after another; no words: all processes at once. io_kills: so
    many I/O processes of each engine before. Two engines after each other have one store, so that the first saves and
    the second loads what is there.
    """
    done = Tally()
    for number in range(kills):
        tp, words = victims[number % len(victims)]
        root = ground.path(f"server-kills-store-{number // 2}")
        with (
            engine(engine_args(tp, f"file://{root}"), ground.path("server-kills.log")) as running,
            Traffic(ground, "kills of servers", running) as traffic,
        ):
            done.kills += kill_io_processes(ground, [running], io_kills)
            time.sleep(ground.chance.uniform(0.2, 3.0))
            traffic.doomed = True
            done.kills += _kill_one(ground, running, words) if words else _kill_all(running)
            check_remains(ground, running)  # while the clients' requests end
            running.kill()
        check_store(ground, root)
        sweep(ground, root)
    return done


def _kill_all(running: Engine) -> int:
    running.kill()
    return 1


def several_servers(ground: Ground, shapes: tuple[tuple[int, int], ...], seconds: float, io_kills: int) -> Tally:
    """Engines of these (TP size, block size) on one store at once; the first is killed half-way.

    io_kills: so many I/O processes are killed for each engine before that.
    """
    root, stage = ground.path(f"shared-by-{len(shapes)}"), f"{len(shapes)} servers"
    with contextlib.ExitStack() as stack:
        engines = [
            stack.enter_context(engine(engine_args(tp, f"file://{root}", block), ground.path(f"shared-{number}.log")))
            for number, (tp, block) in enumerate(shapes)
        ]
        traffic = [stack.enter_context(Traffic(ground, stage, running, pause_s=0.05)) for running in engines]
        begin = time.monotonic()
        killed = kill_io_processes(ground, engines, io_kills * len(engines))
        time.sleep(max(0.0, begin + seconds / 2 - time.monotonic()))
        traffic[0].doomed = True
        killed += _kill_all(engines[0])
        check_remains(ground, engines[0])
        time.sleep(seconds / 2)
        for each in traffic:
            each.stop()
        for running in engines[1:]:
            check_end(ground, running, stage)
    check_store(ground, root)
    sweep(ground, root)
    return Tally(kills=killed)


def check_end(ground: Ground, running: Engine, stage: str) -> None:
    """The engine took something from the store in its stage, and once it is shut down nothing of ours is left."""
    if not running.metrics().get("vllm:external_prefix_cache_hits_total"):
        ground.unsound.append(f"{stage}: nothing came from the store, so that the stage shows nothing")
    running.stop()
    check_remains(ground, running)


def check_remains(ground: Ground, running: Engine) -> None:
    """Without any help, nothing of ours is left of an engine that has ended: no I/O process, no shared memory.

    Ask before the engine is killed for good, which would remove what is looked for.
    """
    end = time.monotonic() + ENDED_S
    while left := [*holders(running)]:
        if time.monotonic() > end:
            ground.leaks += left
            return
        time.sleep(0.2)
    ground.leaks += [str(path) for path in Path("/dev/shm").iterdir() if "tplayout" in path.name]


def holders(running: Engine) -> Iterator[str]:
    """Living processes of an engine that hold memory of ours, or are I/O processes."""
    for pid, line in running.pids().items():
        with contextlib.suppress(OSError):
            if "memfd:tplayout" in Path(f"/proc/{pid}/maps").read_text() or IO_PROCESS in line:
                yield f"{pid} {line}"


def check_store(ground: Ground, root: Path, damaged: Set[str] = frozenset()) -> None:
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
