"""Lookups: how much of a prefix is in memory, verified, and kept there for whoever asked.

A lookup stages its chunks in order and ends at the first that cannot be had. Each pins what it has got, so
that what it reported stays true until it is claimed or let go. Lookups take turns in handing out loads, and
one that cannot get a slot ends with what it has, so that two of them never wait for each other.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice

from tplayout.format.keys import ChunkId
from tplayout.staging.loads import Loads, Staged
from tplayout.staging.pool import Pool
from tplayout.staging.slots import Part, SlotRef

TOO_SLOW = "too-slow"
_TURN = 64  # lookups that nobody has asked about, looked at in one turn


@dataclass(frozen=True)
class LookupState:
    """ready: verified chunks in a row, from the first. done: it will not become more. reason: why it ended there.

    Reasons: complete, miss, damaged, deadline, too-slow, no-slot, store-suspended, io-down, io-lost, "error: <kind>",
    "save <outcome>", in-limbo; empty while it goes on.
    """

    ready: int
    done: bool
    reason: str


@dataclass
class _Lookup:
    """staged: slots of the first chunks, all pinned. limit: chunks that can still be had."""

    name: str
    chunks: Sequence[ChunkId]
    groups: Sequence[tuple[int, ...]]
    limit: int
    asked: float
    behind: str | None = None  # another lookup of the same request: what was waited for it counts
    why: str = "complete"
    staged: list[int] = field(default_factory=list)
    ready: int = 0
    began: float = 0.0
    deadline: float | None = None
    patience: float | None = None  # until when it is worth waiting for; None: for longer than the deadline
    starved_since: float | None = None
    done: bool = False
    claimed: list[int] | None = None
    excused: int = 0  # `ready` when the deadline was last put off


class Lookups:
    """All lookups that have not been released."""

    def __init__(self, pool: Pool, loads: Loads) -> None:
        """No lookups."""
        self._pool = pool
        self._loads = loads
        self._all: dict[str, _Lookup] = {}
        # Those that have chunks to stage, the next one first. A queue may hold thousands that nobody has asked about
        # yet, and nothing that is done every step may look at all of them.
        self._asked: OrderedDict[str, _Lookup] = OrderedDict()
        self._unasked: OrderedDict[str, _Lookup] = OrderedDict()
        self._open: dict[str, _Lookup] = {}  # asked about and not done
        self._holders: dict[str, _Lookup] = {}  # have staged something
        self._spare: list[_Lookup] | None = None  # see _make_room; None: not looked up since something changed
        self._watchers: defaultdict[int, dict[str, int]] = defaultdict(dict)  # slot -> lookup -> position
        self._unseen: set[str] = set()

    def start(
        self, name: str, chunks: Sequence[ChunkId], groups: Sequence[tuple[int, ...]], behind: str | None = None
    ) -> None:
        """Begin to stage. Raises ValueError if there is a lookup of that name."""
        if name in self._all:
            raise ValueError(f"lookup {name!r} exists already")
        now = self._pool.clock()
        lookup = _Lookup(name, chunks, groups, len(chunks), asked=now, behind=behind, began=now)
        self._all[name] = lookup
        self._want(lookup)
        self._stage_all(lookup)

    def state(self, name: str, worth: float | None = None) -> LookupState:
        """How far it is. The first question starts its deadline.

        worth: seconds of waiting that a chunk is worth. A lookup that will take longer ends at once with what it has,
        and one that turns out to be slower ends then.
        """
        lookup = self._all[name]
        lookup.asked = self._pool.clock()
        if lookup.deadline is None:
            lookup.deadline = self._asked_first(lookup) + self._pool.plan.load_deadline_s
            if not lookup.staged:  # it has been parked, or there was no room: nothing was loaded for it meanwhile
                lookup.began = lookup.asked
            if not lookup.done:  # it may have been waiting for slots, or been parked
                self._open[name] = lookup
                self._want(lookup)
                self._stage_all(lookup)
            if not lookup.done and worth is not None:
                self._limit_wait(lookup, worth)
        if lookup.done:
            self._unseen.discard(name)
        return LookupState(lookup.ready, lookup.done, lookup.why if lookup.done else "")

    def _limit_wait(self, lookup: _Lookup, worth: float) -> None:
        """See to it that nobody waits longer for chunks than they are worth."""
        missing = lookup.limit - lookup.ready
        whole = self._loads.speed.seconds(missing)
        if whole is not None and whole - (lookup.asked - lookup.began) > missing * worth:
            self._finish(lookup, TOO_SLOW)
        else:
            lookup.patience = self._asked_first(lookup) + missing * worth

    def _asked_first(self, lookup: _Lookup) -> float:
        """When the request began to wait: now, or with the lookup that this one is behind."""
        before = None if lookup.behind is None else self._all[lookup.behind].deadline
        return lookup.asked if before is None else before - self._pool.plan.load_deadline_s

    def claim(self, name: str, first: int, last: int) -> list[SlotRef]:
        """The slots of the ready chunks first .. last-1, pinned until `release`; the lookup lets go of the rest."""
        lookup = self._all[name]
        if lookup.claimed is not None or not 0 <= first <= last <= lookup.ready:
            raise ValueError(f"lookup {name!r}: cannot claim {first} to {last} of {lookup.ready} ready chunks")
        claimed = lookup.staged[first:last]
        for slot in claimed:
            self._pool.table.pin(slot)
        lookup.claimed = claimed
        self._finish(lookup, "claimed")
        refs = [
            SlotRef(slot, self._pool.table.generation(slot), lookup.groups[index])
            for index, slot in enumerate(claimed, first)
        ]
        self._unstage(lookup, 0)
        return refs

    def cancel(self, name: str) -> None:
        """Nobody waits for the lookup any more. What it has claimed stays until `release`."""
        if name in self._all and self._all[name].claimed is None:
            self.release(name)

    def release(self, name: str) -> None:
        """Drop the lookup and all its pins. Idempotent."""
        lookup = self._all.pop(name, None)
        if lookup is None:
            return
        self._want_no_more(lookup)
        self._open.pop(name, None)
        self._unseen.discard(name)
        self._unstage(lookup, 0)
        # From the tail, so that the least recently used of these is evicted before what it depends on.
        for slot in reversed(lookup.claimed or ()):
            self._pool.table.unpin(slot)

    def slot_changed(self, slot: int, why: str) -> None:
        """A job on the slot has ended, or sealed it. why: the reason if something is not readable now."""
        for name, index in list(self._watchers[slot].items()):
            lookup = self._all[name]
            parts = [self._pool.table.part(slot, group) for group in lookup.groups[index]]
            if Part.EMPTY not in parts and Part.LIMBO not in parts:
                self._advance(lookup)
            elif why == "cancelled":  # for another lookup's sake, before this one wanted the chunk
                self._unstage(lookup, index)
                self._want(lookup)
            else:
                self._stop(lookup, index, why)
        if not self._watchers[slot]:
            del self._watchers[slot]

    def pump(self) -> None:
        """Hand out loads, one a lookup in turn, while there are slots and credits: first where somebody waits."""
        self._spare = None
        again = True
        while again:
            again = False
            for lookup in list(self._asked.values()):
                if not self._credit:
                    return
                if lookup.name in self._asked:  # not parked by now, to make room for one before it
                    again |= self._stage(lookup)
                    self._advance(lookup)
            for lookup in list(islice(self._unasked.values(), _TURN)):
                if not self._credit:
                    return
                begun = self._stage(lookup)
                self._advance(lookup)
                if not begun and lookup.name in self._unasked:
                    break  # no slot for it, so none for those behind it
                again = True

    @property
    def _credit(self) -> bool:
        return self._pool.loads_in_flight < self._pool.plan.most_loads

    def _stage_all(self, lookup: _Lookup) -> None:
        """Hand out the loads of one lookup, while there are slots and credits."""
        self._spare = None
        while self._stage(lookup) and self._credit:
            pass
        self._advance(lookup)

    def _want(self, lookup: _Lookup) -> None:
        """It has chunks to stage."""
        self._want_no_more(lookup)
        (self._unasked if lookup.deadline is None else self._asked)[lookup.name] = lookup

    def _want_no_more(self, lookup: _Lookup) -> None:
        self._asked.pop(lookup.name, None)
        self._unasked.pop(lookup.name, None)

    def excuse(self, seconds: float) -> None:
        """Nobody called us for so long (a step of the engine), so that no new loads could be handed out.

        That is not counted against lookups that got all they were waiting for meanwhile.
        """
        for lookup in self._asked.values():
            if lookup.deadline is not None and lookup.excused < lookup.ready == len(lookup.staged):
                lookup.excused = lookup.ready
                lookup.deadline += seconds
                lookup.patience = None if lookup.patience is None else lookup.patience + seconds

    def enforce_deadlines(self) -> None:
        """End the lookups that have waited long enough, for their chunks or for a slot."""
        now = self._pool.clock()
        hungry = now - self._pool.plan.slot_wait_s
        for lookup in list(self._open.values()):
            if lookup.deadline is not None and now >= lookup.deadline:
                self._finish(lookup, "deadline")
            elif lookup.patience is not None and now >= lookup.patience:
                self._loads.late()
                self._finish(lookup, TOO_SLOW)
            elif lookup.starved_since is not None and lookup.starved_since <= hungry:
                self._stop(lookup, len(lookup.staged), Staged.NO_SLOT)

    def next_deadline(self) -> float | None:
        """When `enforce_deadlines` has something to do next, as far as it is known."""
        wait = self._pool.plan.slot_wait_s
        waiting = self._open.values()
        times = [time for lookup in waiting for time in (lookup.deadline, lookup.patience) if time is not None]
        times += [lookup.starved_since + wait for lookup in waiting if lookup.starved_since is not None]
        return min(times, default=None)

    def take_completed(self) -> bool:
        """Whether lookups were completed of which nobody knows. Reported once."""
        completed = bool(self._unseen)
        self._unseen.clear()
        return completed

    def _stage(self, lookup: _Lookup) -> bool:
        """Stage chunks up to and including one load. True if there is more to do when its turn comes again."""
        while len(lookup.staged) < lookup.limit:
            if lookup.deadline is None and self._pool.table.available <= self._pool.plan.reserve:
                return False  # a long queue must not keep what is computed meanwhile from being saved
            index = len(lookup.staged)
            slot, what = self._loads.stage(lookup.chunks[index], lookup.groups[index])
            if slot is None:
                if what is Staged.NO_SLOT:
                    if self._make_room(lookup):
                        continue
                    self._starve(lookup)
                elif what is not Staged.NO_CREDIT:
                    self._stop(lookup, index, what)
                return False
            self._pool.table.pin(slot)
            lookup.staged.append(slot)
            self._holders[lookup.name] = lookup
            lookup.starved_since = None
            self._watchers[slot][lookup.name] = index
            if what is Staged.BEGUN:
                self._want(lookup)  # at the end
                return True
        self._want_no_more(lookup)
        return False

    def _advance(self, lookup: _Lookup) -> None:
        """Count what has become readable, and end if that is all."""
        reach = min(lookup.limit, len(lookup.staged))
        while lookup.ready < reach:
            if not self._pool.table.readable(lookup.staged[lookup.ready], lookup.groups[lookup.ready]):
                break
            lookup.ready += 1
        if lookup.ready == lookup.limit and not lookup.done:
            self._finish(lookup, lookup.why)

    def _stop(self, lookup: _Lookup, index: int, why: str) -> None:
        """The chunk at `index` cannot be had, so nothing from there on can."""
        if why == "miss":
            for chunk, groups in zip(lookup.chunks[index:], lookup.groups[index:], strict=True):
                self._pool.known.forget(chunk.key, groups)
        if index < lookup.limit:
            lookup.limit, lookup.why = index, str(why)
            lookup.starved_since = None
            self._want_no_more(lookup)
            self._unstage(lookup, index)
        self._advance(lookup)

    def _finish(self, lookup: _Lookup, why: str) -> None:
        if lookup.done:
            return
        lookup.done, lookup.why, lookup.limit = True, why, lookup.ready
        lookup.starved_since = None
        self._pool.counters[f"lookups.{why}"] += 1
        if why == "deadline" and lookup.ready < len(lookup.staged) and lookup.deadline is not None:
            self._loads.unanswered(lookup.deadline - self._pool.plan.load_deadline_s)
        self._want_no_more(lookup)
        self._open.pop(lookup.name, None)
        self._unstage(lookup, lookup.ready, keep=1 if why == TOO_SLOW else 0)
        self._unseen.add(lookup.name)

    def _unstage(self, lookup: _Lookup, index: int, keep: int = 0) -> None:
        """Let go of the chunks from `index` on. keep: of their loads, the first so many go on though nobody waits.

        A store that is too slow is asked for one chunk all the same: else nobody would know when it is faster again.
        """
        for position in range(len(lookup.staged) - 1, index - 1, -1):
            slot = lookup.staged[position]
            self._watchers[slot].pop(lookup.name, None)
            self._pool.table.unpin(slot)
            if position >= index + keep:
                self._loads.drop_if_unwanted(slot)
        del lookup.staged[index:]
        if not lookup.staged:
            self._holders.pop(lookup.name, None)

    def _starve(self, lookup: _Lookup) -> None:
        """There is no slot. End if all are its own; else wait: for a little if somebody asks about it."""
        if len(lookup.staged) >= self._pool.table.usable:
            self._stop(lookup, len(lookup.staged), Staged.NO_SLOT)
        elif lookup.deadline is None or lookup.ready < len(lookup.staged):
            lookup.starved_since = None
        elif lookup.starved_since is None:
            lookup.starved_since = self._pool.clock()

    def _make_room(self, needy: _Lookup) -> bool:
        """Park a lookup that nobody waits for, if somebody waits for this one.

        That is one that was never asked about, the last of them first, since it will be asked about last; or one
        that has not been asked about for long.
        """
        if needy.deadline is None:
            return False
        if self._spare is None:
            unasked = [lookup for lookup in self._holders.values() if lookup.deadline is None]
            asked = [lookup for lookup in self._holders.values() if lookup.deadline is not None]
            self._spare = sorted(asked, key=lambda lookup: -lookup.asked) + unasked  # the one to go first is the last
        while self._spare and (self._spare[-1] is needy or not self._spare[-1].staged):
            self._spare.pop()
        long_ago = needy.asked - self._pool.plan.unasked_s  # not before now: a step of the engine can take longer
        if not self._spare or (self._spare[-1].deadline is not None and self._spare[-1].asked >= long_ago):
            return False
        self._park(self._spare.pop())
        return True

    def _park(self, lookup: _Lookup) -> None:
        """Lend out what it has. It starts anew, deadline included, when it is asked about."""
        self._want_no_more(lookup)
        self._open.pop(lookup.name, None)
        self._unseen.discard(lookup.name)
        self._unstage(lookup, 0)
        lookup.ready, lookup.limit, lookup.why = 0, len(lookup.chunks), "complete"
        lookup.done, lookup.deadline, lookup.patience, lookup.starved_since = False, None, None, None
