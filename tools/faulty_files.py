"""Local files that break on purpose, as an fsspec file system: `faulty+file:///directory`, for servers that run.

    faults = FaultyFiles(directory)                    # an empty directory of its own
    environ |= faults.environment()                    # whoever starts with it knows faulty+file://
    url, storage_options = f"faulty+file://{store}", faults.storage_options
    faults.inject(spread(0.1), seed=1)                 # a tenth of the calls break from now on, in all processes
    faults.stop()                                      # all is well again
    faults.injected()[("pipe_file", Fault.HANG)]       # how often that happened
    faults.damaged()                                   # the objects that are in the store with other bytes than put

Processes read the rates anew for every call, and append what they have done to one log. A fault depends on the seed,
the method, the file's name and how often this process has called it, and on no thread's timing; whoever starts anew
meets the same ones again, unless the seed is another by then. What is written appears complete, as on an object store,
unless the fault is that it does not. `file:///directory` is the same store, sound.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import json
import os
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fsspec
from fsspec.asyn import AsyncFileSystem

from tools.fault_store import Fault
from tplayout.storage.base import temporary_name

PROTOCOL = "faulty+file"
PROJECT = Path(__file__).resolve().parent.parent

_EVERYWHERE = (Fault.ERROR, Fault.DELAY, Fault.HANG, Fault.REPORTED_FAILURE)
APPLICABLE: dict[str, tuple[Fault, ...]] = {
    "cat_file": (*_EVERYWHERE, Fault.SHORT_READ, Fault.FLIPPED_BIT),
    "pipe_file": (*_EVERYWHERE, Fault.FLIPPED_BIT, Fault.FAILURE_AFTER_WRITE),
    "info": (*_EVERYWHERE, Fault.STALE_LIST),
    "find": (*_EVERYWHERE, Fault.STALE_LIST),
    "rm_file": _EVERYWHERE,
}
DAMAGING = (Fault.FLIPPED_BIT, Fault.FAILURE_AFTER_WRITE)

Rates = dict[str, dict[str, float]]


def spread(
    rate: float, methods: Collection[str] = tuple(APPLICABLE), faults: Collection[Fault] = tuple(Fault)
) -> Rates:
    """Rates for `FaultyFiles.inject`: a call of each method breaks with probability `rate`, in one of the faults."""
    chosen = {method: [fault for fault in APPLICABLE[method] if fault in faults] for method in methods}
    return {method: {fault.value: rate / len(some) for fault in some} for method, some in chosen.items() if some}


class FaultyFiles:
    """The harness's side: a directory with the control file, the log and what makes children know the protocol."""

    def __init__(self, directory: Path) -> None:
        """Nothing breaks yet. This process knows the protocol too from now on."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._control = directory / "control.json"
        about = directory / "faulty_files-0.dist-info"
        about.mkdir(exist_ok=True)
        (about / "METADATA").write_text("Metadata-Version: 2.1\nName: faulty-files\nVersion: 0\n")
        (about / "entry_points.txt").write_text(f"[fsspec.specs]\n{PROTOCOL} = tools.faulty_files:FaultyFileSystem\n")
        fsspec.register_implementation(PROTOCOL, FaultyFileSystem, clobber=True)
        self.stop()

    @property
    def storage_options(self) -> dict[str, str]:
        """What a store at a `faulty+file://` URL needs."""
        return {"control": str(self._control)}

    def environment(self) -> dict[str, str]:
        """What a process must have in its environment, and hand down, to know the protocol."""
        paths = [str(self._directory), str(PROJECT), *filter(None, [os.environ.get("PYTHONPATH")])]
        return {"PYTHONPATH": os.pathsep.join(paths)}

    def inject(self, rates: Mapping[str, Mapping[str, float]], seed: int = 0, delay_s: float = 0.05) -> None:
        """What breaks from now on. rates: for each method of `APPLICABLE`, the chance of each fault.

        Raises ValueError for what does not exist, or chances of more than 1 together.
        """
        for method, some in rates.items():
            unknown = set(some) - {fault.value for fault in APPLICABLE.get(method, ())}
            if unknown or method not in APPLICABLE:
                raise ValueError(f"{method} has no {sorted(unknown) or 'faults'}; known: {APPLICABLE}")
            if not 0 <= sum(some.values()) <= 1 + 1e-9 or min(some.values(), default=0) < 0:
                raise ValueError(f"the chances of {method} are {dict(some)}, which is no distribution")
        temporary = self._control.with_suffix(".new")
        temporary.write_text(json.dumps({"seed": seed, "rates": rates, "delay_s": delay_s}))
        temporary.rename(self._control)

    def stop(self) -> None:
        """Nothing breaks any more."""
        self.inject({})

    def injected(self) -> Counter[tuple[str, Fault]]:
        """How often each fault has happened so far, in all processes."""
        return Counter((method, fault) for method, fault, _ in self.broken())

    def broken(self) -> list[tuple[str, Fault, str]]:
        """Method, fault and path of every call that broke, in order."""
        return [(entry["method"], Fault(entry["fault"]), entry["path"]) for entry in self._log() if entry["fault"]]

    def damaged(self, root: Path) -> set[str]:
        """Names of the files below `root` whose last write was damaged, and which are still there."""
        last: dict[str, bool] = {}
        for entry in self._log():
            if "damaged" in entry:
                last[entry["path"]] = entry["damaged"]
        found = {Path(path) for path, damaged in last.items() if damaged}
        return {str(path.relative_to(root)) for path in found if path.is_relative_to(root) and path.exists()}

    def _log(self) -> list[dict[str, Any]]:
        with contextlib.suppress(FileNotFoundError):
            return [json.loads(line) for line in _log_of(self._control).read_text().splitlines()]
        return []


@dataclass(frozen=True)
class _Drawn:
    """The fault of one call, the chance for all else that it draws, and how long a delay is."""

    fault: Fault | None
    random: random.Random
    delay_s: float

    def error(self, writes: bool) -> OSError:
        kinds = [errno.EACCES, errno.ECONNRESET] + [errno.ENOSPC] * writes
        number = self.random.choice(kinds)
        return OSError(number, f"made up: {os.strerror(number)}")

    def flipped(self, data: bytes) -> bytes:
        out = bytearray(data)
        if out:
            bit = self.random.randrange(8 * len(out))
            out[bit // 8] ^= 1 << bit % 8
        return bytes(out)


class FaultyFileSystem(AsyncFileSystem):
    """fsspec's side. control: path of the control file, which `FaultyFiles` writes.

    A stale answer is the first one that this process has got to the same question.
    """

    protocol = PROTOCOL
    cachable = False

    def __init__(self, control: str, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._control = Path(control)
        self._calls: Counter[tuple[str, str]] = Counter()
        self._first: dict[tuple[str, str], Any] = {}

    async def _info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        async with self._broken("info", path) as drawn:
            found = self._answer("info", path, _about(path), drawn)
            if found is None:
                raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
            return dict(found)

    async def _cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        async with self._broken("cat_file", path) as drawn:
            data = (await asyncio.to_thread(Path(path).read_bytes))[start:end]
            if drawn.fault is Fault.SHORT_READ:
                return data[: drawn.random.randrange(max(1, len(data)))]
            return drawn.flipped(data) if drawn.fault is Fault.FLIPPED_BIT else data

    async def _pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        async with self._broken("pipe_file", path) as drawn:
            if drawn.fault is Fault.FLIPPED_BIT:
                value = drawn.flipped(value)
            elif drawn.fault is Fault.FAILURE_AFTER_WRITE:
                value = value[: len(value) // 2]
            await asyncio.to_thread(self._publish, path, value, drawn.fault in DAMAGING)

    async def _rm_file(self, path: str, **kwargs: Any) -> None:
        async with self._broken("rm_file", path):
            await asyncio.to_thread(self._change, path, False, lambda: os.unlink(path))

    async def _find(self, path: str, maxdepth: Any = None, withdirs: bool = False, **kwargs: Any) -> Any:
        async with self._broken("find", path) as drawn:
            found = self._answer("find", path, await asyncio.to_thread(_files, path), drawn)
            return dict(found) if kwargs.get("detail") else list(found)

    async def _makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Directories come with their files, as on an object store."""

    @contextlib.asynccontextmanager
    async def _broken(self, method: str, path: str) -> AsyncIterator[_Drawn]:
        """Draws the fault of a call and logs it; what comes before and behind the call itself happens here."""
        drawn = self._draw(method, path)
        if drawn.fault is not None:
            self._note({"method": method, "fault": drawn.fault.value, "path": path})
        if drawn.fault is Fault.ERROR:
            raise drawn.error(writes=method == "pipe_file")
        if drawn.fault is Fault.HANG:
            await asyncio.Event().wait()
        if drawn.fault is Fault.DELAY:
            await asyncio.sleep(drawn.delay_s)
        yield drawn
        if drawn.fault in (Fault.REPORTED_FAILURE, Fault.FAILURE_AFTER_WRITE):
            raise ConnectionResetError(errno.ECONNRESET, f"made up: {drawn.fault}")

    def _draw(self, method: str, path: str) -> _Drawn:
        control = json.loads(self._control.read_text())
        self._calls[method, path] += 1
        name = path.rpartition("/")[2]  # not where all of it lies
        chance = random.Random(f"{control['seed']} {method} {name} {self._calls[method, path]}")
        left = chance.random()
        for fault, rate in control["rates"].get(method, {}).items():
            left -= rate
            if left < 0:
                return _Drawn(Fault(fault), chance, control["delay_s"])
        return _Drawn(None, chance, control["delay_s"])

    def _answer(self, method: str, path: str, now: Any, drawn: _Drawn) -> Any:
        first = self._first.setdefault((method, path), now)
        return first if drawn.fault is Fault.STALE_LIST else now

    def _publish(self, path: str, value: bytes, damaged: bool) -> None:
        parent, _, name = path.rpartition("/")
        os.makedirs(parent, mode=0o700, exist_ok=True)
        temporary = f"{parent}/{temporary_name(name)}"
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(value)
        self._change(path, damaged, lambda: os.rename(temporary, path))

    def _change(self, path: str, damaged: bool, change: Callable[[], None]) -> None:
        """Make a change that others see, and log it, in one order for all processes."""
        with _log_of(self._control).open("ab", buffering=0) as log:
            fcntl.flock(log, fcntl.LOCK_EX)
            change()
            log.write(_line({"fault": None, "path": path, "damaged": damaged}))

    def _note(self, entry: Mapping[str, Any]) -> None:
        with _log_of(self._control).open("ab", buffering=0) as log:
            log.write(_line(entry))


def _about(path: str) -> dict[str, Any] | None:
    """fsspec's description of a file or directory, None if there is none."""
    try:
        found = os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    kind = "directory" if os.path.isdir(path) else "file"
    return {"name": path, "size": found.st_size, "type": kind, "mtime": found.st_mtime}


def _files(root: str) -> dict[str, dict[str, Any]]:
    """The files below a directory by path."""
    paths = [f"{folder}/{name}" for folder, _, names in os.walk(root) for name in names]
    return {path: about for path in paths if (about := _about(path)) is not None}


def _log_of(control: Path) -> Path:
    return control.with_suffix(".log")


def _line(entry: Mapping[str, Any]) -> bytes:
    """One write of it is whole, whoever else appends."""
    return json.dumps(entry).encode() + b"\n"
