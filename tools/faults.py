"""Breaks everything around the cache, at random, and judges every answer that was given meanwhile.

    tools/faults.py                 all of it, under 40 minutes
    tools/faults.py --quick         a little of everything, for `make test`
    tools/faults.py --seed 7        the same choices again (moments in time are never the same)

Stages write each request to a log; afterwards the log is replayed against the answers of an engine that has no
connector. The last line says what happened, and the exit status is 0 only if no answer was wrong, no request failed
and nothing was left behind, and if the same verdict over an engine with a bug on purpose was red.
"""

from __future__ import annotations

import argparse
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(TOOLS), str(TOOLS.parent)) if path not in sys.path]

import faults_cache  # noqa: E402
import faults_engines as engines  # noqa: E402
import fuzz  # noqa: E402
from faults_engines import Ground, Tally  # noqa: E402
from faults_log import RequestLog, Verdict, judge  # noqa: E402
from vllm_engine import EngineFailed  # noqa: E402
from vllm_server import interrupt_on_sigterm  # noqa: E402

from tplayout.errors import TPLayoutError  # noqa: E402

CORE, WORKER, ALL = "EngineCore", "Worker_TP1", ""  # as in a command line; no words: all of a server's processes
VICTIMS = ((1, CORE), (2, WORKER), (1, ALL), (2, CORE))  # TP size, which process
SHARED_S = 100.0  # for as long several servers use one store


@dataclass(frozen=True)
class Amounts:
    """How much of each stage.

    at_cache, on_files, behind_proxy: faults at least; seconds: to wait for those under vLLM, at most. away_s: how long
    an S3 server is gone. io_kills: of one server, which goes on. server_kills: servers of which a process is killed,
    after io_kills_each of its I/O processes. fuzz_bytes: a reader. shapes: (TP size, block size) of servers at once.
    """

    prompts: int
    at_cache: int
    on_files: int
    behind_proxy: int
    seconds: float
    away_s: float
    io_kills: int
    server_kills: int
    io_kills_each: int
    fuzz_bytes: int
    shapes: tuple[tuple[tuple[int, int], ...], ...]


ALL_OF_IT = Amounts(
    prompts=48,
    at_cache=10_000,
    on_files=300,
    behind_proxy=250,
    seconds=400,
    away_s=60,
    io_kills=20,
    server_kills=12,
    io_kills_each=4,
    fuzz_bytes=2_000_000,
    shapes=(((1, 32), (2, 64)), ((1, 32), (2, 64), (1, 128), (2, 32))),
)
QUICK = Amounts(
    prompts=36,
    at_cache=300,
    on_files=30,
    behind_proxy=0,
    seconds=30,
    away_s=0,
    io_kills=3,
    server_kills=0,
    io_kills_each=0,
    fuzz_bytes=20_000,
    shapes=(),
)


@dataclass(frozen=True)
class Outcome:
    """tally and verdict; leaks, unsound: in words; red: whether the control run was caught."""

    tally: Tally
    verdict: Verdict
    leaks: Sequence[str]
    unsound: Sequence[str]
    red: bool

    @property
    def wrong(self) -> int:
        """Wrong answers, stores that hold what no fault explains, and stages that went wrong themselves."""
        return len(self.verdict.wrong) + len(self.unsound)

    @property
    def passed(self) -> bool:
        """Nothing is wrong, failed or leaked, and that means something: caches were used, the control is red."""
        clean = not (self.wrong or self.verdict.failed or self.leaks)
        return clean and self.verdict.cached_tokens > 0 and self.red

    def line(self) -> str:
        """The last line of a run."""
        tally = self.tally
        return (
            f"faults: injected {tally.injected}, kills {tally.kills}, fuzzed {tally.fuzzed} bytes, requests "
            f"{self.verdict.requests}, wrong {self.wrong}, failed {len(self.verdict.failed)}, leaked {len(self.leaks)}"
        )


def run(amounts: Amounts, seed: int, directory: Path, say: Callable[[str], None]) -> Outcome:
    """All stages, in `directory`, and the verdict over them. say: is told what was done, line by line."""
    prompts = engines.make_prompts(amounts.prompts, seed)
    ground = Ground(directory, RequestLog(directory / "requests.jsonl"), prompts, random.Random(seed))
    cold = {**faults_cache.cold_answers(), **engines.cold_answers(ground)}
    say(f"cold answers: {len(prompts)} prompts, by an engine without the connector")
    tally = Tally()
    for what, stage in stages(amounts, ground, seed):
        begin = time.monotonic()
        try:
            done = stage()
        except (EngineFailed, TPLayoutError, OSError, RuntimeError) as error:
            ground.unsound.append(f"{what}: broken off, {type(error).__name__}: {error}")
            continue
        tally.add(done)
        say(
            f"{what}: {done.injected} faults injected, {done.kills} processes killed, {done.fuzzed} bytes fuzzed in "
            f"{time.monotonic() - begin:.0f} s"
        )
    verdict = judge(ground.log.read(), cold, engines.SLOWEST_S)
    planted = Ground(directory, RequestLog(directory / "control.jsonl"), prompts, random.Random(seed))
    try:
        engines.planted_bug(planted)
    except EngineFailed as error:
        say(f"control: broken off: {error}")
    red = bool(judge(planted.log.read(), cold, engines.SLOWEST_S).wrong)
    say(f"control: with a bug on purpose the verdict is {'red, as it must be' if red else 'NOT RED: it shows nothing'}")
    return Outcome(tally, verdict, ground.leaks, ground.unsound, red)


def stages(amounts: Amounts, ground: Ground, seed: int) -> Iterator[tuple[str, Callable[[], Tally]]]:
    """What is done, one after another, each in words."""
    yield (
        "the Python API on a store that breaks",
        lambda: Tally(injected=faults_cache.run(ground.log, amounts.at_cache, seed)),
    )
    yield "readers of foreign files", lambda: Tally(fuzzed=fuzzed(amounts.fuzz_bytes, seed, ground))
    yield (
        "vLLM at TP=2 on files that break",
        lambda: engines.on_faulty_files(ground, 2, amounts.on_files, amounts.seconds, amounts.io_kills),
    )
    if amounts.behind_proxy:
        yield (
            "vLLM at TP=1 on S3 behind a proxy that breaks",
            lambda: engines.behind_a_flaky_proxy(ground, 1, amounts.behind_proxy, amounts.seconds, amounts.away_s),
        )
    if amounts.server_kills:
        yield (
            "vLLM servers that are killed",
            lambda: engines.kill_servers(ground, amounts.server_kills, VICTIMS, amounts.io_kills_each),
        )
    for shapes in amounts.shapes:
        yield (
            f"{len(shapes)} vLLM servers at once",
            partial(engines.several_servers, ground, shapes, SHARED_S, amounts.io_kills_each),
        )


def fuzzed(nbytes: int, seed: int, ground: Ground) -> int:
    """Mutated bytes read by every reader of foreign files. A finding counts as wrong."""
    total = 0
    for reader in fuzz.readers():
        _, found = fuzz.run(reader, nbytes, seed)
        total += nbytes
        if found is not None:
            ground.unsound.append(f"reader {reader.name}: {found}")
    return total


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a little of everything")
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**31) if options.seed is None else options.seed
    directory = Path(tempfile.mkdtemp(prefix="tplayout-faults-"))
    print(f"seed {seed}, logs in {directory}", flush=True)
    amounts = QUICK if options.quick else ALL_OF_IT
    interrupt_on_sigterm()
    try:
        outcome = run(amounts, seed, directory, lambda line: print(line, flush=True))
    except KeyboardInterrupt:
        shutil.rmtree(directory, ignore_errors=True)
        print("faults: interrupted; all servers are stopped", file=sys.stderr)
        return 130
    print(f"answered: {outcome.verdict.requests} requests; {outcome.verdict.cached_tokens} tokens came from caches")
    for problem in problems(outcome):
        print(problem)
    if outcome.passed:
        shutil.rmtree(directory, ignore_errors=True)
    print(outcome.line())
    return 0 if outcome.passed else 1


def problems(outcome: Outcome) -> Iterator[str]:
    """What makes a run red, a line each."""
    yield from (f"wrong: {entry}" for entry in outcome.verdict.wrong)
    yield from (f"wrong: {text}" for text in outcome.unsound)
    yield from (f"failed: {entry}" for entry in outcome.verdict.failed)
    yield from (f"leaked: {text}" for text in outcome.leaks)


if __name__ == "__main__":
    sys.exit(main())
