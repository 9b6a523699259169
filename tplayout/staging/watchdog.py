"""Whether an I/O process still answers, and whether it could have.

Its main thread does nothing that takes long, whatever the store does: it answers a question at once, if it runs. On a
busy machine it may not run for a long time. So a second of silence counts only where no thread of the process was
ready to run and kept from it, or as far as the process was on a CPU; and only while we ourselves were there to listen.
"""

import contextlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path

HUNG_S = 20.0
_LOOK_S = 1.0
_TICKS = os.sysconf("SC_CLK_TCK")


class Verdict(Enum):
    """What is to be done."""

    NOTHING = "nothing"
    ASK = "ask"
    HUNG = "hung"


@dataclass(frozen=True)
class Sight:
    """A process at one moment. states: of its threads, one letter each as in /proc; cpu: seconds used so far."""

    states: str
    cpu: float

    @property
    def excused(self) -> bool:
        """A thread is ready to run, or a debugger has stopped one."""
        return "R" in self.states or "t" in self.states


def look_at(pid: int) -> Sight | None:
    """None where nothing can be seen."""
    states, ticks = "", 0
    with contextlib.suppress(OSError):
        for thread in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(OSError):
                fields = (thread / "stat").read_text().rpartition(")")[2].split()
                states += fields[0]
                ticks += int(fields[11]) + int(fields[12])
    return Sight(states, ticks / _TICKS) if states else None


class Watch:
    """Of one process. It looks once a second at most, and into /proc only when an answer is missing."""

    def __init__(self, clock: Callable[[], float], look: Callable[[int], Sight | None] = look_at) -> None:
        """Nothing was asked yet."""
        self._clock = clock
        self._look = look
        self._looked_at = clock()
        self._asked = False
        self._silence = 0.0
        self._cpu: float | None = None
        self.seen = ""  # the states of its threads when it was last looked at

    def heard(self) -> None:
        """It has said something."""
        self._asked, self._silence, self._cpu = False, 0.0, None

    def check(self, pid: int, busy: bool) -> Verdict:
        """To be called often. busy: it has work; without, nobody waits for it."""
        passed = self._clock() - self._looked_at
        if passed < _LOOK_S:
            return Verdict.NOTHING
        self._looked_at = self._clock()
        if not busy:
            self.heard()
            return Verdict.NOTHING
        if not self._asked:
            self._asked = True
            return Verdict.ASK
        self._count(pid)
        return Verdict.HUNG if self._silence >= HUNG_S else Verdict.NOTHING

    def _count(self, pid: int) -> None:
        """Add what counts of the time since the last look: of a longer one, when we were not there, no more."""
        sight = self._look(pid)
        if sight is None:
            return
        used = 0.0 if self._cpu is None else sight.cpu - self._cpu
        self._cpu, self.seen = sight.cpu, sight.states
        self._silence += min(used, _LOOK_S) if sight.excused else _LOOK_S
