"""Saving one chunk: a slot for the writers, and a job that publishes it once they have marked it."""

from collections.abc import Sequence

from tplayout.format.chunk import write_info
from tplayout.format.keys import ChunkId
from tplayout.staging.loads import LOST
from tplayout.staging.pool import STORE_FAULTS, Pool
from tplayout.staging.protocol import NAMESPACE_DIFFERS, Save, Saved
from tplayout.staging.slots import Part, SlotRef


class Saves:
    """Save jobs, and the slots of failed ones that writers may still write to."""

    def __init__(self, pool: Pool) -> None:
        """No saves."""
        self._pool = pool
        self._quiet: set[SlotRef] = set()  # saves whose writers have all stopped, by the caller's word
        self._limbo: dict[tuple[int, int], int] = {}  # (slot, group) -> generation

    def begin(self, chunk: ChunkId, groups: Sequence[int]) -> SlotRef | None:
        """A slot that writers may fill and mark from now on; None, with the reason counted, if there is none.

        The reference names the groups to write, which may be fewer than asked for.
        """
        pool = self._pool
        slot = pool.table.find(chunk.key)
        replace = pool.damaged.has(chunk.key)
        unknown = [group for group in groups if replace or not pool.known.has(chunk.key, group)]
        if unknown and slot is not None and self._only_loading(slot):
            # Computed, so its lookup has ended without it: at a miss before it, or at its deadline. Waiting for the
            # load's answer would lose the chunk.
            pool.table.disown(slot)
            slot = None
        todo = tuple(group for group in unknown if slot is None or pool.table.part(slot, group) is Part.EMPTY)
        if not todo:
            return self._skip(self._nothing_to_write(chunk.key, slot, groups, unknown, replace))
        if not (pool.writes.closed or pool.writes.trial()):
            return self._skip(f"store-{pool.writes.kind}")
        if slot is None:
            room = pool.saves_in_flight < pool.plan.most_saves
            slot = pool.table.acquire(chunk.key, todo, Part.FILLING) if room else None
            if slot is None:
                pool.writes.undecided()
                return self._skip("no-slot" if room else "backlog")
        else:
            pool.table.change(slot, todo, Part.FILLING)
        return self._hand_out(chunk, slot, todo, replace)

    def abandon(self, ref: SlotRef) -> None:
        """No writer will write to this slot any more, and the chunk will not be complete."""
        table = self._pool.table
        self._quiet.add(ref)
        for job in self._pool.in_flight.values():
            if isinstance(job.work, Save) and _ref(job.work) == ref:
                self._pool.io.cancel(job.work.job)
                return
        self._quiet.discard(ref)
        limbo = [group for group in ref.groups if self._limbo.get((ref.slot, group)) == ref.generation]
        for group in limbo:
            del self._limbo[ref.slot, group]
        table.change(ref.slot, limbo, Part.EMPTY)

    def give_up_part(self, slot: int, generation: int, group: int, writer: int) -> None:
        """A writer is done without having written. Its slot is still the one it means, unless it was abandoned."""
        if self._pool.table.generation(slot) == generation:
            self._pool.region.mark(slot, group, writer, generation, usable=False)

    def sealed(self, work: Save) -> None:
        """The slot is complete and can be read."""
        self._pool.table.change(work.slot, work.groups, Part.PUBLISHING)

    def finished(self, work: Save, key: bytes, event: Saved) -> str:
        """A save was answered. Returns why the slot is not readable, "" if it is."""
        pool = self._pool
        pool.saves_in_flight -= 1
        pool.known.add(key, event.stored)
        pool.counters["save_bytes"] += event.written
        pool.counters["evictions"] += event.evicted
        if event.outcome == "saved":
            pool.counters["saves"] += 1
            pool.seconds["save_seconds"] += event.seconds
            pool.writes.succeeded()
            pool.damaged.remove(key)
        elif event.outcome == "error":
            self._failed(event)
        else:
            pool.counters[f"save_errors.{event.outcome}"] += 1
            pool.writes.undecided()
            if event.detail:
                pool.warn("a save was given up", event.kind, event.detail)
        return self._settle(work, event.outcome)

    def lost(self, work: Save) -> str:
        """A save died with its process. The slot stays readable if it had been sealed."""
        self._pool.saves_in_flight -= 1
        self._pool.counters[f"save_errors.{LOST}"] += 1
        self._pool.writes.undecided()
        return self._settle(work, LOST)

    def look_at_limbo(self) -> None:
        """Give back the slots whose writers have finished after all."""
        for (slot, group), generation in list(self._limbo.items()):
            if self._pool.region.settled(slot, group, generation):
                del self._limbo[slot, group]
                self._pool.table.change(slot, [group], Part.EMPTY)

    def _only_loading(self, slot: int) -> bool:
        parts = {self._pool.table.part(slot, group) for group in range(len(self._pool.plan.writers))}
        return Part.LOADING in parts and parts <= {Part.LOADING, Part.EMPTY}

    def _nothing_to_write(
        self, key: bytes, slot: int | None, groups: Sequence[int], unknown: Sequence[int], replace: bool
    ) -> str:
        """Why: everything is stored, or on its way. What is in memory only is published now."""
        table = self._pool.table
        if not unknown or slot is None:
            self._pool.note_use(key, groups)
            return "already-stored"
        clean = tuple(group for group in unknown if table.part(slot, group) is Part.CLEAN)
        if not clean:
            return "in-flight"
        if self._pool.writes.closed or self._pool.writes.trial():
            self._publish_again(key, slot, clean, replace)
            return "published-again"
        return f"store-{self._pool.writes.kind}"

    def _publish_again(self, key: bytes, slot: int, groups: tuple[int, ...], replace: bool) -> None:
        pool = self._pool
        pool.table.change(slot, groups, Part.PUBLISHING)
        generation = pool.table.generation(slot)
        work = Save(next(pool.ids), slot, generation, groups, key.hex(), replace, sealed=True)
        if not self._submit(work, key):
            pool.writes.undecided()
            pool.table.change(slot, groups, Part.CLEAN)

    def _hand_out(self, chunk: ChunkId, slot: int, groups: tuple[int, ...], replace: bool) -> SlotRef | None:
        pool = self._pool
        generation = pool.table.generation(slot)
        work = Save(next(pool.ids), slot, generation, groups, chunk.key.hex(), replace, sealed=False)
        handed_out = False
        try:
            for group in groups:
                pool.region.clear_marks(slot, group)
                write_info(pool.region.slot(slot, group), pool.plan.layouts[group], chunk)
            handed_out = self._submit(work, chunk.key)
        finally:
            if not handed_out:
                pool.writes.undecided()
                pool.table.change(slot, groups, Part.EMPTY)
        return SlotRef(slot, generation, groups) if handed_out else self._skip("io-down")

    def _submit(self, work: Save, key: bytes) -> bool:
        taken = self._pool.submit(work, key)
        self._pool.saves_in_flight += taken
        return taken

    def _skip(self, reason: str) -> SlotRef | None:
        self._pool.counters[f"save_skips.{reason}"] += 1
        return None

    def _failed(self, event: Saved) -> None:
        pool = self._pool
        pool.counters[f"save_errors.{event.kind}"] += 1
        if event.kind in STORE_FAULTS or event.kind == NAMESPACE_DIFFERS:
            pool.writes.failed(event.kind, event.detail, lasting=event.kind == NAMESPACE_DIFFERS)
        else:
            pool.writes.undecided()
            pool.warn("a save failed", event.kind, event.detail)

    def _settle(self, work: Save, outcome: str) -> str:
        """Bring the slot's parts to rest: readable if they were sealed, else empty or, for a while, in limbo."""
        table = self._pool.table
        published = [group for group in work.groups if table.part(work.slot, group) is Part.PUBLISHING]
        table.change(work.slot, published, Part.CLEAN)
        unsealed = tuple(group for group in work.groups if group not in published)
        ref = _ref(work)
        quiet = ref in self._quiet
        self._quiet.discard(ref)
        for group in unsealed:
            if quiet or self._pool.region.settled(work.slot, group, work.generation):
                table.change(work.slot, [group], Part.EMPTY)
            else:
                table.change(work.slot, [group], Part.LIMBO)
                self._limbo[work.slot, group] = work.generation
        return f"save {outcome}" if unsealed else ""


def _ref(work: Save) -> SlotRef:
    return SlotRef(work.slot, work.generation, work.groups)
