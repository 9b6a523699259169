"""The I/O process: all store traffic and digesting, outside of the engine's processes.

`python -m tplayout.staging.io_process CONTROL REGION LIFELINE` with three inherited descriptors: a stream
socket to the scheduler, the region, and a pidfd of the scheduler (-1: none). It makes itself nobody's
child, so that who kills the engine's process tree does not kill it; it ends by itself when the scheduler is
gone, after publishing the slots that are complete. Its settings come as the first message, since they hold
credentials.

Layer: sockets, threads and time; what a job does is in `io_jobs`.
"""

import contextlib
import os
import queue
import resource
import selectors
import signal
import socket
import sys
import threading
import time
import traceback

from tplayout.cache.codec import make_codec, require
from tplayout.cache.packing import plain_store
from tplayout.errors import FormatError, TPLayoutError
from tplayout.format.digest import make_hasher
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.geometry import Geometry
from tplayout.format.keys import namespace_name
from tplayout.format.layout import layouts_of
from tplayout.staging import io_jobs
from tplayout.staging.eviction import Evictor, Opened
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
    Pong,
    Probe,
    Probed,
    ProtocolError,
    Save,
    Saved,
    Sealed,
    Stuck,
    Use,
    decode,
    encode,
)
from tplayout.staging.region import Region
from tplayout.storage.capped import CappedStore
from tplayout.storage.url import open_store

_MARKS_S = 0.003  # between looks at the marks of pending saves
_GRACE_S = 0.5  # for writers that still live when the scheduler is gone
_STUCK_S = 5.0  # beyond the store's own deadlines
_MOST_USES = 4096  # notes of uses that wait for a slow store; further ones are dropped
_CHUNK = 2**16

INTERNAL = "internal"  # kind of an error that is a bug of ours

Job = Load | Save | Probe


def detach() -> None:
    """Leave the caller's process tree, its signals and its CPUs. Only the detached process returns."""
    if os.fork():
        os._exit(0)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    os.umask(0o077)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # a core would hold the secret and the key
    with contextlib.suppress(OSError):
        os.sched_setaffinity(0, range(os.sysconf("SC_NPROCESSORS_CONF")))
    prefer()
    with contextlib.suppress(OSError), open("/proc/self/comm", "w") as name:
        name.write("tplayout-io")
    _silence(0, 1)


def _silence(*fds: int) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for fd in fds:
        os.dup2(null, fd)
    os.close(null)


class IoProcess:
    """The main thread's state. It reads the socket and looks at marks and clocks; threads do the jobs.

    Sets and dicts that threads share with it are only changed by single operations, which the GIL makes
    atomic.
    """

    def __init__(self, control: socket.socket, lifeline: int, bench: io_jobs.Bench, config: Config) -> None:
        """Threads start at once. config: timeouts and thread counts; bench: the rest of it, opened."""
        self._control = control
        self._bench = bench
        self._config = config
        self._publisher = io_jobs.Publisher(bench)
        self._namespace = io_jobs.NamespaceCheck(bench)
        self._waiting: dict[Save, float] = {}  # not marked yet -> when to give up
        self._given: set[int] = set()  # loads and probes that threads have to answer
        self._unsaved: set[int] = set()  # saves that threads have to finish
        self._overdue: dict[int, float] = {}  # running job -> when it is stuck
        self._cancelled: set[int] = set()
        self._leave_at: float | None = None
        self._gone = False  # nobody reads our events any more
        self._selector = selectors.DefaultSelector()
        self._selector.register(control, selectors.EVENT_READ)
        if lifeline >= 0:
            self._selector.register(lifeline, selectors.EVENT_READ)
        self._loads: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._saves: queue.SimpleQueue[Job] = queue.SimpleQueue()
        self._uses: queue.Queue[Use] = queue.Queue(_MOST_USES)
        # An engine that idles reads nothing: jobs must not wait until it does.
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()
        self._sender = threading.Thread(target=self._send_events, daemon=True)
        self._sender.start()
        threading.Thread(target=self._note_uses, daemon=True).start()
        for jobs, count in ((self._loads, config.load_threads), (self._saves, config.save_threads)):
            for _ in range(count):
                threading.Thread(target=self._work, args=(jobs,), daemon=True).start()

    def run(self, reader: LineReader, lines: list[bytes]) -> None:
        """Work until the scheduler is gone (or a job is stuck) and the complete slots are published.

        reader, lines: what came behind the first message.
        """
        for line in lines:
            self._take(line)
        while not self._finished():
            for key, _ in self._selector.select(self._pause()):
                if key.fileobj is not self._control:
                    self._selector.unregister(key.fileobj)
                    self._read(reader, to_the_end=True)
                    self._leave(gone=True)
                elif not self._read(reader):
                    self._selector.unregister(self._control)
                    self._leave(gone=True)
            self._look_at_marks()
            self._look_for_stuck_jobs()
        self._events.put(None)
        self._sender.join(0.0 if self._gone else _GRACE_S)

    def _pause(self) -> float | None:
        if self._waiting or self._leave_at is not None:
            return _MARKS_S
        return 1.0 if self._given or self._unsaved else None

    def _finished(self) -> bool:
        if self._leave_at is None:
            return False
        return time.monotonic() > self._leave_at or not (self._waiting or self._unsaved)

    def _leave(self, gone: bool) -> None:
        """Take no more jobs; finish the saves that can be. gone: nobody listens any more."""
        self._gone = self._gone or gone
        if self._leave_at is None:
            now = time.monotonic()
            self._leave_at = now + self._config.drain_s
            self._waiting = {save: min(late, now + _GRACE_S) for save, late in self._waiting.items()}

    def _read(self, reader: LineReader, to_the_end: bool = False) -> bool:
        """Take what is there to read: a piece, or all of it. False when the peer has hung up."""
        while True:
            try:
                data = self._control.recv(_CHUNK, socket.MSG_DONTWAIT)
            except BlockingIOError:
                return True
            except OSError:  # a reset: the peer was killed with events unread
                return False
            if not data:
                return False
            for line in reader.feed(data):
                self._take(line)
            if not to_the_end:
                return True

    def _take(self, line: bytes) -> None:
        message = decode(line)
        if isinstance(message, Ping):
            self._send(Pong())
            return
        if self._leave_at is not None:
            return
        if isinstance(message, Load | Probe):
            self._given.add(message.job)
            self._loads.put(message)
        elif isinstance(message, Use):
            self._note_use(message)
        elif isinstance(message, Save):
            self._waiting[message] = time.monotonic() + self._config.save_wait_s
        elif isinstance(message, Cancel):
            if message.job in self._given or any(save.job == message.job for save in self._waiting):
                self._cancelled.add(message.job)
        else:
            raise ProtocolError(f"unexpected {type(message).__name__}")

    def _look_at_marks(self) -> None:
        now = time.monotonic()
        region = self._bench.region
        for save, late in list(self._waiting.items()):
            parts = [(save.slot, group, save.generation) for group in save.groups]
            # First whether all writers are done, then how: asked the other way round, a writer that is done in between
            # would be taken for one that has given up.
            settled = save.sealed or all(region.settled(*part) for part in parts)
            if save.job in self._cancelled:
                self._drop(save, "cancelled")
            elif save.sealed or (settled and all(region.marked(*part) for part in parts)):
                self._unsaved.add(save.job)
                del self._waiting[save]
                self._saves.put(save)
            elif settled:
                self._drop(save, "void")
            elif now > late:
                self._drop(save, "late")

    def _drop(self, save: Save, outcome: str) -> None:
        del self._waiting[save]
        self._cancelled.discard(save.job)
        self._send(Saved(save.job, outcome, (), "", "", 0, 0.0))

    def _look_for_stuck_jobs(self) -> None:
        now = time.monotonic()
        evictor = self._bench.evictor
        if evictor is not None and now <= evictor.alive_at + self._config.timeout_s + _STUCK_S:
            return  # making room is many operations, each with a deadline: it hangs when it does not get on
        if self._leave_at is None and any(now > overdue for overdue in list(self._overdue.values())):
            self._send(Stuck(f"a store operation takes longer than {self._config.timeout_s:g} s"))
            self._leave(gone=False)

    def _work(self, jobs: "queue.SimpleQueue[Job]") -> None:
        while True:
            job = jobs.get()
            operations = 1 if isinstance(job, Probe) else 2 + 2 * len(job.groups)
            self._overdue[job.job] = time.monotonic() + operations * self._config.timeout_s + _STUCK_S
            event = self._perform(job)
            del self._overdue[job.job]
            self._send(event)
            if isinstance(job, Load) and isinstance(event, Loaded) and event.groups:
                self._note_use(Use(event.groups, job.key))
            for jobs_of in (self._given, self._unsaved, self._cancelled):
                jobs_of.discard(job.job)

    def _perform(self, job: Job) -> Event:
        """Do a job, whatever happens: its thread and the scheduler's books outlive any error."""
        try:
            if isinstance(job, Probe):
                return io_jobs.probe(self._bench, job)
            if isinstance(job, Save):
                return self._save(job)
            if job.job in self._cancelled:
                return Loaded(job.job, "cancelled", (), "", "", 0, 0.0)
            return io_jobs.load(self._bench, job, self._namespace)
        except Exception as error:
            return _failure(job, f"{type(error).__name__}: {error}")

    def _save(self, save: Save) -> Event:
        if not save.sealed:
            try:
                io_jobs.seal(self._bench, save)
            except FormatError as error:
                return Saved(save.job, "void", (), error.reason.value, str(error), 0, 0.0)
            self._send(Sealed(save.job))
        return self._publisher.publish(save)

    def _note_use(self, use: Use) -> None:
        with contextlib.suppress(queue.Full):  # nothing depends on it
            self._uses.put_nowait(use)

    def _note_uses(self) -> None:
        while True:
            use = self._uses.get()
            with contextlib.suppress(Exception):
                io_jobs.note_use(self._bench, bytes.fromhex(use.key), use.groups)

    def _send(self, event: Event) -> None:
        self._events.put(event)

    def _send_events(self) -> None:
        while (event := self._events.get()) is not None:
            if not self._gone:
                with contextlib.suppress(OSError):  # a scheduler that is gone shows as end of file
                    self._control.sendall(encode(event))


def _failure(job: Job, detail: str) -> Event:
    if isinstance(job, Load):
        return Loaded(job.job, "error", (), INTERNAL, detail, 0, 0.0)
    if isinstance(job, Save):
        return Saved(job.job, "error", (), INTERNAL, detail, 0, 0.0)
    return Probed(job.job, INTERNAL, detail)


def open_bench(config: Config, region_fd: int) -> io_jobs.Bench:
    """Open the store and map the region. Raises TPLayoutError subclasses."""
    secret = None if config.secret is None else bytes.fromhex(config.secret)
    hasher = make_hasher(config.digest, secret)
    key = None if config.encryption_key is None else EncryptionKey(bytes.fromhex(config.encryption_key))
    geometry = Geometry.from_json(config.geometry)
    layouts = layouts_of(geometry, hasher.name, hasher.key_id)
    require(config.codec)
    store = open_store(config.url, config.storage_options, config.timeout_s, config.max_bytes)
    digest = bytes.fromhex(config.namespace)
    namespace = namespace_name(digest)
    codec = make_codec(config.codec, hasher, None if key is None else key.id, key)
    plain = plain_store(store, namespace, layouts, codec)
    own = Opened(namespace, plain, layouts, digest)
    return io_jobs.Bench(
        store=plain,
        region=Region.adopt(region_fd, config.region_bytes, config.region_token),
        layouts=layouts,
        hasher=hasher,
        namespace=digest,
        document=config.document.encode(),
        agreed=config.agreed,
        evictor=Evictor(store, own) if isinstance(store, CappedStore) else None,
    )


def _first_message(control: socket.socket, reader: LineReader) -> tuple[Config, list[bytes]]:
    """The settings, and the lines that came with them. Raises ProtocolError if something else comes."""
    lines: list[bytes] = []
    while not lines:
        data = control.recv(_CHUNK)
        if not data:
            raise ProtocolError("the scheduler hung up before it sent a configuration")
        lines = reader.feed(data)
    message = decode(lines[0])
    if not isinstance(message, Config):
        raise ProtocolError("the first message is no configuration")
    return message, lines[1:]


def serve(control_fd: int, region_fd: int, lifeline: int) -> None:
    """Be an I/O process on these descriptors until there is nothing left to do."""
    control = socket.socket(fileno=control_fd)
    reader = LineReader()
    try:
        control.sendall(encode(Hello(os.getpid())))
        config, lines = _first_message(control, reader)
        bench = open_bench(config, region_fd)
        _silence(2)
        IoProcess(control, lifeline, bench, config).run(reader, lines)
    except (TPLayoutError, OSError) as error:
        with contextlib.suppress(OSError):
            control.sendall(encode(Note("error", f"an I/O process ends: {error}")))
        raise


def main() -> None:
    """Entry point. Never returns: threads that hang in a store operation must not keep the process."""
    status = 1
    try:
        detach()
        serve(*map(int, sys.argv[1:4]))
        status = 0
    except (TPLayoutError, ConnectionError):
        pass  # said in the scheduler's log, or it is gone
    except Exception:
        traceback.print_exc()
    finally:
        os._exit(status)


if __name__ == "__main__":
    main()
