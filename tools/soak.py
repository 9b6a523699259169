"""Mixed traffic at TP=2 on a store that breaks now and then, for long: does anything of a server grow?

    tools/soak.py                   30 minutes
    tools/soak.py --minutes 5

Memory, handles and staging slots of every process are sampled; the last quarter of the run is compared with the
second one (the first is warm-up), and a table says by how much each grew. Answers are judged as in `make faults`.
Exit status 0 only if all is flat and no answer was wrong, missing or late.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

TOOLS = Path(__file__).resolve().parent
sys.path[:0] = [path for path in (str(TOOLS), str(TOOLS.parent)) if path not in sys.path]

import demo_models  # noqa: E402
from faults_engines import (  # noqa: E402
    IO_PROCESS,
    RATE,
    SLOWEST_S,
    Ground,
    Traffic,
    check_end,
    check_store,
    cold_answers,
    engine_args,
    make_prompts,
)
from faults_log import Answer, RequestLog, judge  # noqa: E402
from vllm_engine import DRIVER, Engine, EngineFailed, engine  # noqa: E402
from vllm_server import interrupt_on_sigterm  # noqa: E402

from tools.faulty_files import FaultyFiles, spread  # noqa: E402

SAMPLE_S = 5.0
FAULTY_S, SOUND_S = 20.0, 40.0  # the store breaks for so long, and then works for so long
PROMPTS = 48
HANG_UPS = 0.1  # of the clients
QUIET_S = 60.0  # a store that has failed is left alone for half a minute, and what waits for it may wait
SLACK = {"memory": 16 * 2**20, "handles": 4, "slots in use": 4}  # what is no growth: allocators and pools breathe
SHARE = 1.05
ROLES = {  # by what a command line holds; all others are helpers, as Python's resource tracker
    IO_PROCESS: "I/O process",
    "EngineCore": "scheduler",
    "Worker_TP0": "rank 0",
    "Worker_TP1": "rank 1",
    DRIVER.name: "front end",
}


@dataclass(frozen=True)
class Sample:
    """At one moment. value: bytes, or a count, by (what, of whom)."""

    at: float
    value: dict[tuple[str, str], float]


@dataclass(frozen=True)
class Growth:
    """Medians over the second and the last quarter of a run."""

    what: str
    who: str
    before: float
    after: float

    @property
    def flat(self) -> bool:
        """No growth beyond what comes and goes."""
        return self.after <= max(self.before * SHARE, self.before + SLACK[self.what])


def growths(samples: Sequence[Sample], begin: float, end: float) -> list[Growth]:
    """Of everything that was there in both quarters. begin, end: of the run."""
    quarter = (end - begin) / 4
    second = [sample for sample in samples if begin + quarter <= sample.at < begin + 2 * quarter]
    last = [sample for sample in samples if begin + 3 * quarter <= sample.at <= end]
    names = {name for sample in second for name in sample.value} & {name for sample in last for name in sample.value}
    return [Growth(*name, _median(second, name), _median(last, name)) for name in sorted(names)]


def _median(samples: Sequence[Sample], name: tuple[str, str]) -> float:
    return statistics.median(sample.value[name] for sample in samples if name in sample.value)


def sample(running: Engine) -> Sample:
    """Anonymous memory and open handles of every process of a server, and its staging slots in use.

    Processes of one role count together.
    """
    value: dict[tuple[str, str], float] = {("slots in use", "staging"): slots_in_use(running)}
    for pid, line in running.pids().items():
        with contextlib.suppress(OSError, StopIteration):  # it ends at this moment
            held = {"memory": _anonymous(pid), "handles": float(len(os.listdir(f"/proc/{pid}/fd")))}
            for what, much in held.items():
                value[what, role(line)] = value.get((what, role(line)), 0.0) + much
    return Sample(time.monotonic(), value)


def role(line: str) -> str:
    """Which process of a server a command line is of."""
    return next((name for words, name in ROLES.items() if words in line), "helper")


def _anonymous(pid: int) -> float:
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    return 1024.0 * int(next(line for line in status if line.startswith("RssAnon:")).split()[1])


def soak(ground: Ground, seconds: float) -> tuple[list[Growth], int]:
    """The run itself: growths, and how many faults there were."""
    root = ground.path("store")
    faults = FaultyFiles(ground.path("control"))
    args = engine_args(2, f"faulty+file://{root}", storage_options=faults.storage_options)
    samples = []
    with engine(args, ground.path("soak.log"), env=faults.environment()) as running:
        with Traffic(ground, "soak", running, hang_ups=HANG_UPS):
            begin = time.monotonic()
            end = begin + seconds
            for broken, until in phases(begin, end):
                faults.inject(spread(RATE) if broken else {}, ground.chance.randrange(2**31))
                print(f"{(time.monotonic() - begin) / 60:5.1f} min: {faults.injected().total()} faults", flush=True)
                while time.monotonic() < until:
                    time.sleep(SAMPLE_S)
                    samples.append(sample(running))
            faults.stop()
        if left := slots_left(running):
            ground.leaks.append(f"{left:.0f} staging slots are in use though nothing runs")
        check_end(ground, running, "soak")
    check_store(ground, root, damaged=faults.damaged(root))
    return growths(samples, begin, end), faults.injected().total()


def slots_left(running: Engine) -> float:
    """Staging slots that stay in use when nothing runs any more. The engine says so in steps, so it is given some."""
    end = time.monotonic() + QUIET_S
    while True:
        running.generate(demo_models.random_prompt(5), 1)
        used = slots_in_use(running)
        if not used or time.monotonic() > end:
            return used
        time.sleep(1)


def slots_in_use(running: Engine) -> float:
    """Staging slots in use at the last step with work."""
    return running.metrics().get("vllm:tplayout_staging_used", 0.0)


def phases(begin: float, end: float) -> Iterator[tuple[bool, float]]:
    """(whether the store breaks, until when), in turn."""
    at, broken = begin, False
    while at < end:
        at = min(end, at + (FAULTY_S if broken else SOUND_S))
        yield broken, at
        broken = not broken


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**31)
    directory = Path(tempfile.mkdtemp(prefix="tplayout-soak-"))
    print(f"seed {seed}, logs in {directory}", flush=True)
    ground = Ground(
        directory, RequestLog(directory / "requests.jsonl"), make_prompts(PROMPTS, seed), random.Random(seed)
    )
    found: list[Growth] = []
    cold: dict[str, Answer] = {}
    injected = 0
    interrupt_on_sigterm()
    try:
        cold = cold_answers(ground)
        print(f"{len(cold)} cold answers; the store breaks and works in turn from now on", flush=True)
        found, injected = soak(ground, 60 * options.minutes)
    except EngineFailed as error:
        ground.unsound.append(f"broken off: {error}")
    except KeyboardInterrupt:
        shutil.rmtree(directory, ignore_errors=True)
        print("soak: interrupted; the server is stopped", file=sys.stderr)
        return 130
    verdict = judge(ground.log.read(), cold, SLOWEST_S)
    for growth in found:
        unit, name = (2**20, "MiB") if growth.what == "memory" else (1, "")
        change = f"{growth.before / unit:9.1f} -> {growth.after / unit:9.1f} {name}"
        print(f"{growth.what:13} {growth.who:12} {change:28} {'flat' if growth.flat else 'GROWS'}")
    for problem in (*verdict.wrong, *verdict.failed, *ground.leaks, *ground.unsound):
        print(f"problem: {problem}")
    grew = sum(not growth.flat for growth in found)
    problems = len(verdict.wrong) + len(verdict.failed) + len(ground.leaks) + len(ground.unsound)
    print(
        f"soak: {options.minutes:g} minutes, requests {verdict.requests}, tokens from caches {verdict.cached_tokens}, "
        f"faults {injected}, grew {grew} of {len(found)}, problems {problems}"
    )
    if grew or problems or not found:
        return 1
    shutil.rmtree(directory, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
