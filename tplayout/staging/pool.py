"""The things that loading, saving and lookups share on the scheduler's side: slots, processes, books, counters."""

import itertools
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from tplayout.errors import StorageErrorKind
from tplayout.staging.breaker import Breaker
from tplayout.staging.io_client import IoPool
from tplayout.staging.known import MOST_KNOWN, Damaged, KnownStored, UsesTold
from tplayout.staging.log_limit import LogLimit
from tplayout.staging.plan import StagingPlan
from tplayout.staging.protocol import Load, Probe, Save, Use
from tplayout.staging.region import Region
from tplayout.staging.slots import SlotTable

log = logging.getLogger("tplayout")

_USED_S = 600.0  # between two notes of one chunk's use

# What says something about the store as a whole; other errors are about one object.
STORE_FAULTS = frozenset(
    kind.value
    for kind in (
        StorageErrorKind.TIMEOUT,
        StorageErrorKind.UNAVAILABLE,
        StorageErrorKind.FORBIDDEN,
        StorageErrorKind.FULL,
        StorageErrorKind.LIMIT,
    )
)


@dataclass(frozen=True)
class Job:
    """Work handed to an I/O process and not answered yet. key: of the chunk, empty for a probe."""

    work: Load | Save | Probe
    key: bytes


@dataclass
class Pool:
    """Shared state. `counters` and `seconds` are sums since the start; `in_flight`: unanswered jobs by id."""

    plan: StagingPlan
    region: Region
    table: SlotTable
    io: IoPool
    known: KnownStored
    damaged: Damaged
    reads: Breaker
    writes: Breaker
    clock: Callable[[], float]
    counters: Counter[str] = field(default_factory=Counter)
    seconds: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    in_flight: dict[int, Job] = field(default_factory=dict)
    loads_in_flight: int = 0
    saves_in_flight: int = 0
    answered_at: float = 0.0  # when the store last answered a load, whatever it said
    ids: "itertools.count[int]" = field(default_factory=lambda: itertools.count(1))
    limit: LogLimit = field(init=False)
    uses: UsesTold = field(init=False)

    def __post_init__(self) -> None:
        self.limit = LogLimit(self.clock)
        self.uses = UsesTold(MOST_KNOWN, _USED_S, self.clock)

    def warn(self, what: str, kind: str, detail: str) -> None:
        """A line in the log about a job that failed: one a minute for each `what` and kind, since chunks are many."""
        more = self.limit.allow(f"{what}\0{kind}")
        if more is not None:
            log.warning("tplayout: %s: %s%s", what, detail or kind, more)

    def note_use(self, key: bytes, groups: Sequence[int]) -> None:
        """Tell the store now and then that a chunk is used which it is not asked for, unless it is in trouble."""
        if self.reads.closed and self.uses.due(key):
            self.uses.told(key)
            self.io.tell(Use(tuple(groups), key.hex()))

    def submit(self, work: Load | Save | Probe, key: bytes = b"") -> bool:
        """Hand out a job. False if no I/O process takes it."""
        if not self.io.submit(work):
            return False
        self.in_flight[work.job] = Job(work, key)
        return True
