"""The scheduler's side of the I/O processes: start, talk to and replace them.

Nothing here blocks: what a socket does not take is kept, and a process that ends is noticed by its end of
file. Only that end proves that none of its threads touches the region any more, so its jobs stay open until
then.
"""

import contextlib
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import tplayout
from tplayout.key_files import ENCRYPTION_KEY_ENV, SECRET_ENV
from tplayout.staging.log_limit import LogLimit
from tplayout.staging.priority import prefer
from tplayout.staging.protocol import (
    Cancel,
    Config,
    Event,
    Hello,
    LineReader,
    Load,
    Loaded,
    Note,
    Ping,
    Probe,
    Probed,
    ProtocolError,
    Request,
    Save,
    Saved,
    Stuck,
    Use,
    decode,
    encode,
)
from tplayout.staging.region import Region
from tplayout.staging.watchdog import Verdict, Watch

log = logging.getLogger("tplayout")

COMMAND = (sys.executable, "-P", "-m", "tplayout.staging.io_process")

_RESTARTS = 5  # that many in _RESTART_WINDOW_S, more come at the pace of the window
_RESTART_WINDOW_S = 30.0
_CHUNK = 2**16
_KEYS = {SECRET_ENV, ENCRYPTION_KEY_ENV}
_LEVELS = {"error": logging.ERROR, "warning": logging.WARNING}


@dataclass(frozen=True)
class Lost:
    """An I/O process is gone, and these jobs with it: none of them touches its slot any more."""

    jobs: tuple[int, ...]


class IoChannel:
    """One I/O process: its socket, what is still to be sent, and its unanswered jobs."""

    def __init__(self, command: Sequence[str], config: bytes, region: Region, clock: Callable[[], float]) -> None:
        """Start the process. config: the encoded first message."""
        self._watch = Watch(clock)
        self.jobs: set[int] = set()
        self.accepts = True
        self.pid = 0  # until it has said hello
        self._killed = False
        self._broken = False
        self._reader = LineReader()
        self._outgoing = bytearray(config)
        self._pidfd = -1
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        self._socket = ours
        lifeline = _pidfd(os.getpid())
        fds = [theirs.fileno(), region.fileno(), *([lifeline] if lifeline >= 0 else [])]
        try:
            self._launcher = subprocess.Popen(
                [*command, str(theirs.fileno()), str(region.fileno()), str(lifeline)],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=fds,
                env=_environment(),
                start_new_session=True,
            )
        except OSError:
            ours.close()
            raise
        finally:
            theirs.close()
            if lifeline >= 0:
                os.close(lifeline)
        prefer(self._launcher.pid)
        self.flush()

    def fileno(self) -> int:
        """The socket's descriptor."""
        return self._socket.fileno()

    def send(self, message: Request) -> None:
        """Send a message, now or as soon as the socket takes it."""
        self._outgoing += encode(message)
        self.flush()

    def flush(self) -> None:
        """Send what the socket takes."""
        try:
            while self._outgoing:
                del self._outgoing[: self._socket.send(self._outgoing)]
        except BlockingIOError:
            pass
        except OSError:  # the process is gone, which its end of file will say
            self._outgoing.clear()

    def receive(self) -> tuple[list[Event], bool]:
        """What has arrived, and whether the process is gone. A process that sends garbage is killed."""
        self._launcher.poll()  # reap it: it ends once the real process is detached
        events: list[Event] = []
        while True:
            try:
                data = self._socket.recv(_CHUNK)
            except BlockingIOError:
                return events, False
            except OSError:
                return events, True
            if not data:
                return events, True
            self._watch.heard()
            try:
                lines = [] if self._broken else self._reader.feed(data)
                events += [self._event(line) for line in lines]
            except ProtocolError as error:
                log.error("tplayout: an I/O process sent garbage and is killed: %s", error)
                self._broken = True
                self.kill()

    def hangs(self) -> str:
        """Ask the process now and then whether it runs, while it has jobs. "" unless it hangs: then how that looks."""
        if not self.pid or self._killed:
            return ""
        verdict = self._watch.check(self.pid, bool(self.jobs))
        if verdict is Verdict.ASK:
            self.send(Ping())
        return f"its threads are in state {self._watch.seen}" if verdict is Verdict.HUNG else ""

    def hang_up(self) -> None:
        """Tell the process that there will be no more jobs; it finishes what it has and ends."""
        self.accepts = False
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_WR)

    def kill(self) -> None:
        """Kill the process, without a chance to hit another one that has its pid by now."""
        self.hang_up()
        self._killed = True
        if self._pidfd >= 0:
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)

    def close(self) -> None:
        """Let go of our side: for the process, the scheduler is gone."""
        self._socket.close()
        self._launcher.poll()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def _event(self, line: bytes) -> Event:
        message = decode(line)
        if not isinstance(message, Event):
            raise ProtocolError(f"{type(message).__name__} is not for us")
        if isinstance(message, Hello) and self._pidfd < 0:
            self.pid = message.pid
            self._pidfd = _pidfd(message.pid)
        return message


class IoPool:
    """Several I/O processes as one: jobs go to the one with the least to do, and the dead are replaced."""

    def __init__(
        self,
        config: Config,
        region: Region,
        count: int,
        clock: Callable[[], float],
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Start `count` processes. Raises ProtocolError if config cannot be written as JSON."""
        self._config = encode(config)
        self._region = region
        self._count = count
        self._clock = clock
        self._command = command
        self._channels: list[IoChannel] = []
        self._selector = selectors.DefaultSelector()
        self._starts: deque[float] = deque()
        self._limit = LogLimit(clock)
        self.restarts = 0
        for _ in range(count):
            self._start()

    @property
    def accepting(self) -> int:
        """Processes that take jobs."""
        return sum(channel.accepts for channel in self._channels)

    @property
    def pids(self) -> list[int]:
        """The processes that have said hello and are not gone."""
        return [channel.pid for channel in self._channels if channel.pid]

    def submit(self, message: Load | Save | Probe) -> bool:
        """Hand out a job; it will be answered by an event or `Lost`. False if there is no process to take it."""
        takers = [channel for channel in self._channels if channel.accepts]
        if not takers:
            return False
        channel = min(takers, key=lambda channel: len(channel.jobs))
        channel.jobs.add(message.job)
        channel.send(message)
        return True

    def tell(self, message: Use) -> None:
        """Say something that is not answered, if there is a process to hear it."""
        takers = [channel for channel in self._channels if channel.accepts]
        if takers:
            min(takers, key=lambda channel: len(channel.jobs)).send(message)

    def cancel(self, job: int) -> None:
        """Ask the process that has the job to skip it."""
        for channel in self._channels:
            if job in channel.jobs:
                channel.send(Cancel(job))

    def poll(self, timeout: float = 0.0) -> list[Event | Lost]:
        """What has happened, waiting up to `timeout` seconds for something."""
        for channel in self._channels:
            channel.flush()
        events: list[Event | Lost] = []
        for key, _ in self._selector.select(timeout):
            events += self._receive(key.data)
        self._kill_hung()
        self._replace()
        return events

    def close(self) -> None:
        """Let go: the processes publish what is complete, and end."""
        for channel in self._channels:
            channel.flush()
            channel.close()
        self._channels.clear()
        self._selector.close()

    def _receive(self, channel: IoChannel) -> list[Event | Lost]:
        received, gone = channel.receive()
        events: list[Event | Lost] = []
        for event in received:
            if isinstance(event, Note):
                self._say(_LEVELS.get(event.level, logging.INFO), "I/O process", event.text)
            elif isinstance(event, Stuck):
                self._say(logging.WARNING, "an I/O process is replaced", event.detail)
                channel.accepts = False
            elif isinstance(event, Loaded | Saved | Probed):
                channel.jobs.discard(event.job)
            events.append(event)
        if gone:
            self._selector.unregister(channel)
            self._channels.remove(channel)
            channel.close()
            events.append(Lost(tuple(sorted(channel.jobs))))
        return events

    def _kill_hung(self) -> None:
        for channel in self._channels:
            if state := channel.hangs():
                self._say(
                    logging.WARNING, "an I/O process does not answer and is killed", f"pid {channel.pid}, {state}"
                )
                channel.kill()

    def _replace(self) -> None:
        while self.accepting < self._count and self._may_start():
            self.restarts += 1
            self._say(logging.WARNING, "an I/O process is gone or hangs", "starting another one")
            self._start()

    def _say(self, level: int, what: str, detail: object) -> None:
        """One line a minute for each `what`: a process that cannot run is started again and again."""
        more = self._limit.allow(what)
        if more is not None:
            log.log(level, "tplayout: %s: %s%s", what, detail, more)

    def _may_start(self) -> bool:
        while self._starts and self._starts[0] < self._clock() - _RESTART_WINDOW_S:
            self._starts.popleft()
        return len(self._starts) < self._count + _RESTARTS

    def _start(self) -> None:
        self._starts.append(self._clock())
        try:
            channel = IoChannel(self._command, self._config, self._region, self._clock)
        except OSError as error:
            self._say(logging.ERROR, "an I/O process cannot be started", error)
            return
        self._channels.append(channel)
        self._selector.register(channel, selectors.EVENT_READ, channel)


def _pidfd(pid: int) -> int:
    """A descriptor that means this very process, -1 where the kernel has none."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1


def _environment() -> dict[str, str]:
    """Ours without keys, which come through the socket; and this very package importable: the current directory may be
    all that made it so here."""
    ours = {name: value for name, value in os.environ.items() if name not in _KEYS}
    root = str(Path(tplayout.__file__).resolve().parent.parent)
    if root in sysconfig.get_paths().values():  # installed; in PYTHONPATH it would come before the standard library
        return ours
    paths = [root, *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**ours, "PYTHONPATH": os.pathsep.join(paths)}
