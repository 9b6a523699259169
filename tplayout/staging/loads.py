"""Bringing one chunk into a slot: from memory if it is there, else by a load that all who want it share."""

from collections.abc import Sequence
from enum import StrEnum

from tplayout.format.keys import ChunkId
from tplayout.staging.pool import STORE_FAULTS, Pool, log
from tplayout.staging.protocol import NAMESPACE_DIFFERS, Load, Loaded
from tplayout.staging.slots import Part
from tplayout.staging.speed import LoadSpeed

LOST = "io-lost"  # the I/O process died with the job


class Staged(StrEnum):
    """What `Loads.stage` did; with the first three the chunk has a slot."""

    READY = "ready"
    COMING = "coming"  # being loaded or saved already
    BEGUN = "begun"  # a load was handed out
    NO_CREDIT = "no-credit"  # enough loads are in flight
    NO_SLOT = "no-slot"
    IN_LIMBO = "in-limbo"  # a failed save still holds its slot
    DAMAGED = "damaged"
    SUSPENDED = "store-suspended"
    IO_DOWN = "io-down"


class Loads:
    """Load jobs. Pins nothing: that is for the caller, right after a chunk has got its slot."""

    def __init__(self, pool: Pool) -> None:
        """No loads."""
        self._pool = pool
        self.speed = LoadSpeed(pool.plan.io_processes * pool.plan.load_threads)
        # job -> when it was handed out, and loads in flight then; the oldest is the first
        self._handed_out: dict[int, tuple[float, int]] = {}

    def stage(self, chunk: ChunkId, groups: Sequence[int]) -> tuple[int | None, Staged]:
        """See to it that the chunk's groups are in a slot: (its slot, how far that is), or (None, why not)."""
        table = self._pool.table
        slot = table.find(chunk.key)
        missing = tuple(groups)
        if slot is not None:
            parts = {group: table.part(slot, group) for group in groups}
            if Part.LIMBO in parts.values():
                return None, Staged.IN_LIMBO
            if Part.LOADING in parts.values() and not self._pool.reads.closed:
                return None, Staged.SUSPENDED
            missing = tuple(group for group in groups if parts[group] is Part.EMPTY)
            if not missing and not table.readable(slot, groups):
                return slot, Staged.COMING
            if not missing:
                self._pool.counters["host_hits"] += 1
                self._pool.note_use(chunk.key, groups)
                return slot, Staged.READY
        refusal = self._refusal(chunk.key)
        if refusal is not None:
            return None, refusal
        return self._begin(chunk.key, slot, missing)

    def _refusal(self, key: bytes) -> Staged | None:
        pool = self._pool
        if pool.damaged.skip(key):
            return Staged.DAMAGED
        if not pool.reads.closed:
            return Staged.SUSPENDED
        return Staged.NO_CREDIT if pool.loads_in_flight >= pool.plan.most_loads else None

    def _begin(self, key: bytes, slot: int | None, groups: tuple[int, ...]) -> tuple[int | None, Staged]:
        pool = self._pool
        if slot is None:
            slot = pool.table.acquire(key, groups, Part.LOADING)
            if slot is None:
                return None, Staged.NO_SLOT
        else:
            pool.table.change(slot, groups, Part.LOADING)
        job = next(pool.ids)
        if not pool.submit(Load(job, slot, groups, key.hex()), key):
            pool.table.change(slot, groups, Part.EMPTY)
            return None, Staged.IO_DOWN
        pool.loads_in_flight += 1
        self._handed_out[job] = (pool.clock(), pool.loads_in_flight)
        return slot, Staged.BEGUN

    def drop_if_unwanted(self, slot: int) -> None:
        """Cancel the loads into a slot that nobody has pinned any more."""
        pool = self._pool
        if pool.table.pins(slot) == 0 and self._is_loading(slot):
            for job in list(pool.in_flight.values()):
                if isinstance(job.work, Load) and job.work.slot == slot:
                    pool.io.cancel(job.work.job)

    def finished(self, work: Load, key: bytes, event: Loaded) -> str:
        """A load was answered: update slot and books. Returns why not all of it is there, "" if it is."""
        pool = self._pool
        pool.loads_in_flight -= 1
        _, together = self._handed_out.pop(work.job)
        if event.outcome == "ready":
            pool.uses.told(key)
            self.speed.add(event.seconds, together)
        if event.outcome != "cancelled":
            pool.answered_at = pool.clock()
        self._settle(work, event.groups)
        pool.known.add(key, event.groups)
        pool.counters["load_bytes"] += event.nbytes
        if event.outcome in ("ready", "miss"):
            pool.reads.succeeded()
            pool.counters["loads" if event.outcome == "ready" else "misses"] += 1
            pool.seconds["load_seconds"] += event.seconds if event.outcome == "ready" else 0.0
            return "" if event.outcome == "ready" else "miss"
        if event.outcome == "damaged":
            self._damaged(key, event)
        elif event.outcome == "error":
            self._failed(event)
        return event.outcome if event.outcome != "error" else f"error: {event.kind}"

    def unanswered(self, since: float) -> None:
        """A lookup has given up on loads that it has waited for since then.

        If the store has answered nobody else either, that is a failure of it: its own deadline may be far longer.
        """
        pool = self._pool
        self.late()
        if pool.answered_at < since:
            pool.reads.failed("timeout", f"no load was answered for {pool.clock() - since:.1f} s")

    def late(self) -> None:
        """Somebody has given up on loads. Those that have not ended tell how slow the store is, if none ends."""
        began, _ = next(iter(self._handed_out.values()), (None, 0))
        if began is not None:
            silent = self._pool.clock() - max(began, self._pool.answered_at)
            self.speed.late(silent, self._pool.loads_in_flight)

    def lost(self, work: Load) -> str:
        """A load died with its process, which can write into the slot no more."""
        self._pool.loads_in_flight -= 1
        del self._handed_out[work.job]
        self._pool.counters[f"load_errors.{LOST}"] += 1
        self._settle(work, ())
        return LOST

    def _is_loading(self, slot: int) -> bool:
        table = self._pool.table
        return any(table.part(slot, group) is Part.LOADING for group in range(len(self._pool.plan.writers)))

    def _settle(self, work: Load, good: Sequence[int]) -> None:
        table = self._pool.table
        table.change(work.slot, good, Part.CLEAN)
        table.change(work.slot, [group for group in work.groups if group not in good], Part.EMPTY)

    def _damaged(self, key: bytes, event: Loaded) -> None:
        pool = self._pool
        pool.reads.succeeded()
        pool.counters["verification_failures"] += 1
        if pool.damaged.add(key):
            log.error(
                "tplayout: damaged object, counted as a miss and left where it is (`tplayout verify` names the fix):"
                " %s",
                event.detail,
            )

    def _failed(self, event: Loaded) -> None:
        pool = self._pool
        pool.counters[f"load_errors.{event.kind}"] += 1
        if event.kind in STORE_FAULTS or event.kind == NAMESPACE_DIFFERS:
            pool.reads.failed(event.kind, event.detail, lasting=event.kind == NAMESPACE_DIFFERS)
        else:
            self._pool.warn("a load failed", event.kind, event.detail)
