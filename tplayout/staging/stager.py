"""The staging pool as the connector's scheduler side uses it: look up prefixes, save chunks, never block.

Single-threaded: all calls come from the scheduler's thread. Nothing here waits for the store, a disk or
another process, but `wait`, which is for an engine that has nothing else to do.
"""

import time
from collections.abc import Callable, Sequence
from typing import Any

from tplayout.errors import ConfigError
from tplayout.format.keys import ChunkId
from tplayout.staging.breaker import Breaker
from tplayout.staging.io_client import COMMAND, IoPool, Lost
from tplayout.staging.known import MOST_KNOWN, Damaged, KnownStored
from tplayout.staging.loads import LOST, Loads
from tplayout.staging.lookups import Lookups, LookupState
from tplayout.staging.plan import StagingPlan
from tplayout.staging.pool import Pool
from tplayout.staging.protocol import (
    NAMESPACE_DIFFERS,
    Event,
    Load,
    Loaded,
    Probe,
    Probed,
    ProtocolError,
    Save,
    Saved,
    Sealed,
    Stuck,
)
from tplayout.staging.region import Region, RegionRef
from tplayout.staging.saves import Saves
from tplayout.staging.slots import SlotRef, SlotTable

__all__ = ["LookupState", "SlotRef", "Stager", "StagingPlan"]

_SHORTEST_WAIT_S = 0.004  # at most 250 returns a second when nothing happens
_SUMS = ("loads", "load_bytes", "host_hits", "misses", "verification_failures", "saves", "save_bytes", "evictions")
_FAMILIES = ("load_errors", "save_errors", "save_skips", "lookups")  # counters by reason: family.reason
_LONG_STEP_S = 0.1
_KNOWN_S = 600.0  # how long an object that was seen is taken to be stored: others prune
_FRESH_S = 0.0005  # calls that follow each other closely poll once
_REST = 4  # and not before this many times what the last poll took: with thousands of lookups it takes longer


class Stager:
    """One staging region, its I/O processes, and the books about both."""

    def __init__(
        self,
        plan: StagingPlan,
        clock: Callable[[], float] = time.monotonic,
        command: Sequence[str] = COMMAND,
    ) -> None:
        """Make the region and start the I/O processes.

        command: what to run as an I/O process, before its three arguments. Raises RegionError, ConfigError.
        """
        self.plan = plan
        region = Region.create(plan.region_plan)
        try:
            io = IoPool(plan.config(region), region, plan.io_processes, clock, command)
        except ProtocolError as error:
            region.close()
            raise ConfigError(f"staging: storage_options must be plain JSON values ({error})") from None
        self._pool = Pool(
            plan=plan,
            region=region,
            table=SlotTable(plan.slots, len(plan.writers)),
            io=io,
            known=KnownStored(MOST_KNOWN, _KNOWN_S, clock),
            damaged=Damaged(plan.negative_cache_s, clock),
            reads=Breaker("loads", clock),
            writes=Breaker("saves", clock),
            clock=clock,
        )
        self._loads = Loads(self._pool)
        self._saves = Saves(self._pool)
        self._lookups = Lookups(self._pool, self._loads)
        self._all_groups = tuple(range(len(plan.writers)))
        self._drained_at = clock()
        self._drain_took = 0.0
        self._closed = False

    @property
    def region_ref(self) -> RegionRef:
        """Where workers find the region."""
        return self._pool.region.ref

    @property
    def region(self) -> Region:
        """The region itself, for readers and writers in this process."""
        return self._pool.region

    def start_lookup(
        self,
        lookup_id: str,
        chunks: Sequence[ChunkId],
        groups_for_chunk: Callable[[int], Sequence[int]] | None = None,
        behind: str | None = None,
    ) -> None:
        """Begin to stage these chunks, in order. groups_for_chunk: from a position in `chunks`; None: all groups.
        behind: an earlier lookup of the same request, with whose first question the deadline began.

        Raises ValueError if there is a lookup of that id: `release` comes first.
        """
        groups = [
            self._all_groups if groups_for_chunk is None else tuple(groups_for_chunk(position))
            for position in range(len(chunks))
        ]
        self._lookups.start(lookup_id, chunks, groups, behind)

    def lookup(self, lookup_id: str, worth: float | None = None) -> LookupState:
        """How much of it is staged and verified. Its deadline runs from the first call. KeyError if unknown.

        worth: how many seconds of waiting a chunk is worth, None for any number; that of the first call counts.
        Once done, `ready` chunks can be claimed for as long as it is asked about (see StagingPlan.unasked_s).
        """
        self._refresh()
        return self._lookups.state(lookup_id, worth)

    def claim(self, lookup_id: str, first: int, last: int) -> list[SlotRef]:
        """Slots of the chunks first .. last-1 of the lookup, all ready. They stay as they are until `release`.

        Once a lookup; it then holds no other slots. Raises ValueError for more than is ready, KeyError.
        """
        return self._lookups.claim(lookup_id, first, last)

    def cancel(self, lookup_id: str) -> None:
        """Drop a lookup that has claimed nothing; does nothing to one that has. Idempotent."""
        self._lookups.cancel(lookup_id)

    def release(self, lookup_id: str) -> None:
        """Drop the lookup and all it holds: nobody reads its slots any more. Idempotent."""
        self._lookups.release(lookup_id)

    def begin_save(self, chunk: ChunkId, groups: Sequence[int] | None = None) -> SlotRef | None:
        """A slot for the writers of this chunk, or None with the reason counted in `save_skips.*`.

        The slot has all but cells and digests. Each writer fills its part of `SlotRef.groups` and marks it,
        with the generation, in the region; nothing more is needed. groups: those to save; None: all.
        """
        self._refresh()  # slots may have come back since the last call
        return self._saves.begin(chunk, self._all_groups if groups is None else groups)

    def abandon_save(self, ref: SlotRef) -> None:
        """The caller's word that no writer will write to this slot any more although not all have marked it."""
        self._saves.abandon(ref)

    def give_up_part(self, slot: int, generation: int, group: int, writer: int) -> None:
        """Mark as not usable, on behalf of a writer that cannot reach the region and so has not written to it."""
        self._saves.give_up_part(slot, generation, group, writer)

    def poll(self) -> None:
        """Take note of what has happened, and hand out new work. Never blocks."""
        self._drain(0.0)

    def wait(self, timeout: float) -> bool:
        """Block until a lookup is completed or the timeout has passed; True if one is.

        Shorter timeouts than 4 ms are that long, so an idle engine that calls this spins at 250 Hz at most.
        """
        end = self._pool.clock() + max(timeout, _SHORTEST_WAIT_S)
        self._drain(0.0)
        while not self._lookups.take_completed():
            now = self._pool.clock()
            if now >= end:
                return False
            until = min(end, self._lookups.next_deadline() or end)
            self._drain(max(0.0, until - now))
        return True

    @property
    def busy(self) -> bool:
        """Jobs are unanswered: loads, or saves that are not published yet."""
        return bool(self._pool.in_flight)

    @property
    def health(self) -> dict[str, str]:
        """The state of loads, saves and I/O processes, in words; "ok" where all is well."""
        accepting, wanted = self._pool.io.accepting, self.plan.io_processes
        io = "ok" if accepting == wanted else f"{accepting} of {wanted} processes"
        return {"loads": self._pool.reads.state, "saves": self._pool.writes.state, "io": io}

    def suspend(self, kind: str, detail: str, loads: bool = True) -> None:
        """Begin with a store that is known to fail until a person changes something: saves, and loads, are only tried.

        kind, detail: as those of a failed job.
        """
        self._pool.writes.failed(kind, detail, lasting=True)
        if loads:
            self._pool.reads.failed(kind, detail, lasting=True)

    def snapshot(self) -> dict[str, Any]:
        """`counters`, and "slots": slots by state now, and those "used", not to be had. Looks at every slot."""
        table = self._pool.table
        return {**self.counters(), "slots": {**table.counts(), "used": table.usable - table.available}}

    def counters(self) -> dict[str, Any]:
        """Sums since the start, cheap enough for every step.

        loads, load_bytes, load_seconds, host_hits, misses, verification_failures, saves, save_bytes, save_seconds,
        evictions, io_restarts; by reason: load_errors, save_errors, save_skips, lookups.
        """
        sums: dict[str, Any] = {name: self._pool.counters[name] for name in _SUMS}
        sums |= {name: self._pool.seconds[name] for name in ("load_seconds", "save_seconds")}
        families: dict[str, dict[str, int]] = {name: {} for name in _FAMILIES}
        for name, count in self._pool.counters.items():
            family, dot, reason = name.partition(".")
            if dot:
                families[family][reason] = count
        return {**sums, **families, "io_restarts": self._pool.io.restarts}

    def reset(self) -> None:
        """Forget all cached chunks and what is known about the store. What is in use is dropped later."""
        self._pool.table.forget_all()
        self._pool.known.clear()
        self._pool.damaged.clear()

    def close(self) -> None:
        """Let go. The I/O processes publish what is complete, within drain_s, and end. Idempotent."""
        if not self._closed:
            self._closed = True
            self._pool.io.close()
            self._pool.region.close()

    def _refresh(self) -> None:
        if self._pool.clock() - self._drained_at > max(_FRESH_S, _REST * self._drain_took):
            self.poll()

    def _drain(self, timeout: float) -> None:
        if self._closed:
            return
        away = self._pool.clock() - self._drained_at
        events = self._pool.io.poll(timeout)
        began = self._pool.clock()
        for event in events:
            self._handle(event)
        if away > _LONG_STEP_S:
            self._lookups.excuse(away)
        self._drained_at = self._pool.clock()
        self._lookups.enforce_deadlines()
        self._saves.look_at_limbo()
        self._probe()
        self._lookups.pump()
        self._drain_took = self._pool.clock() - began

    def _handle(self, event: Event | Lost) -> None:
        if isinstance(event, Lost):
            for job in event.jobs:
                self._lost(job)
        elif isinstance(event, Sealed) and event.job in self._pool.in_flight:
            work = self._pool.in_flight[event.job].work
            if isinstance(work, Save):
                self._saves.sealed(work)
                self._lookups.slot_changed(work.slot, "")
        elif isinstance(event, Loaded | Saved | Probed):
            self._answered(event)
        elif isinstance(event, Stuck):
            self._pool.reads.failed("timeout", event.detail)
            self._pool.writes.failed("timeout", event.detail)

    def _answered(self, event: Loaded | Saved | Probed) -> None:
        job = self._pool.in_flight.pop(event.job, None)
        if job is None:
            return
        if isinstance(event, Loaded) and isinstance(job.work, Load):
            self._lookups.slot_changed(job.work.slot, self._loads.finished(job.work, job.key, event))
        elif isinstance(event, Saved) and isinstance(job.work, Save):
            self._lookups.slot_changed(job.work.slot, self._saves.finished(job.work, job.key, event))
        elif isinstance(event, Probed) and event.kind:
            self._pool.reads.failed(event.kind, event.detail, lasting=event.kind == NAMESPACE_DIFFERS)
        elif isinstance(event, Probed):
            self._pool.reads.succeeded()

    def _lost(self, number: int) -> None:
        job = self._pool.in_flight.pop(number, None)
        if job is None:
            return
        if isinstance(job.work, Load):
            self._lookups.slot_changed(job.work.slot, self._loads.lost(job.work))
        elif isinstance(job.work, Save):
            self._lookups.slot_changed(job.work.slot, self._saves.lost(job.work))
        else:
            self._pool.reads.failed(LOST, "the I/O process ended")

    def _probe(self) -> None:
        if self._pool.reads.trial() and not self._pool.submit(Probe(next(self._pool.ids))):
            self._pool.reads.undecided()
