"""The Stager's books against random users, writers, stores and deaths, with I/O processes that the test plays.

What is checked: a ready or claimed chunk's slot holds that chunk's bytes, whatever late writers and dying
processes do; every lookup ends; and once everybody lets go, all slots come back.
"""

from contextlib import suppress
from unittest import mock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.keys import chain
from tplayout.staging import stager as stager_module
from tplayout.staging.io_client import Lost
from tplayout.staging.protocol import Load, Loaded, Probe, Probed, Saved, Sealed
from tplayout.staging.stager import Stager, StagingPlan

NAMESPACE = bytes(32)
GEOMETRY = Geometry(
    4,
    (
        Group("full", "full", (0,), 1, (Part("k", 1),), "F32"),
        Group("window", "window", (1,), 1, (Part("k", 1),), "F32", window=4),
    ),
)
WRITERS = 2
CHAINS = [chain(NAMESPACE, [seed] * 24, 4) for seed in range(2)]
BY_KEY = {chunk.key: chunk for chunks in CHAINS for chunk in chunks}
GROUP_CHOICES = [(0,), (0, 1)]


class PlayedPool:
    """Stands in for IoPool. Jobs stay open until the test plays them."""

    def __init__(self, *args):
        self.jobs = {}
        self.cancelled = set()
        self.events = []
        self.accepting = 1
        self.restarts = 0

    def submit(self, message):
        if self.accepting:
            self.jobs[message.job] = message
        return bool(self.accepting)

    def tell(self, message):
        pass

    def cancel(self, job):
        self.cancelled.add(job)

    def poll(self, timeout=0.0):
        events, self.events = self.events, []
        return events

    def close(self):
        pass


class StagerMachine(RuleBasedStateMachine):
    """`stored`: objects in the store. `filling`: saves whose writers are not all done: ref -> (key, who is)."""

    def __init__(self):
        super().__init__()
        self.now = 1000.0
        self.plan = StagingPlan(
            url="x:", namespace=NAMESPACE, geometry=GEOMETRY, slots=4, writers=(WRITERS, WRITERS), loads_in_flight=3,
            load_deadline_s=2.0, slot_wait_s=0.5, unasked_s=1.0, negative_cache_s=3.0,
        )  # fmt: skip
        with mock.patch.object(stager_module, "IoPool", PlayedPool):
            self.stager = Stager(self.plan, clock=lambda: self.now)
        self.io = self.stager._pool.io
        self.stored = {(key, group) for key in BY_KEY for group in (0, 1)} - {(CHAINS[1][4].key, 0)}
        self.damaged = {(CHAINS[1][2].key, 0)}
        self.filling = {}
        self.sealed = set()
        self.lookups = {}
        self.claims = {}
        self.names = iter(range(10**6))

    def cells(self, slot, group):
        span = self.plan.layouts[group].cell_range(0, 0)
        return self.stager.region.slot(slot, group)[span.start : span.stop]

    def holds(self, slot, group, key):
        return bytes(self.cells(slot, group)) == key[:16]

    # what the scheduler does

    @rule(which=st.integers(0, 1), count=st.integers(0, 6), groups=st.lists(st.sampled_from(GROUP_CHOICES), min_size=6))
    def start_lookup(self, which, count, groups):
        name = str(next(self.names))
        chunks = CHAINS[which][:count]
        self.stager.start_lookup(name, chunks, lambda position: groups[position])
        self.lookups[name] = (chunks, groups)

    @precondition(lambda self: self.lookups)
    @rule(data=st.data(), claim=st.booleans())
    def ask(self, data, claim):
        self.ask_about(data, data.draw(st.sampled_from(sorted(self.lookups))), claim)

    @rule(data=st.data(), which=st.integers(0, 1), count=st.integers(1, 3))
    def look_up_and_claim(self, data, which, count):
        name = str(next(self.names))
        chunks, groups = CHAINS[which][:count], [(0,)] * count
        self.stager.start_lookup(name, chunks, lambda position: (0,))
        self.lookups[name] = (chunks, groups)
        self.play_everything()
        self.ask_about(data, name, True)

    def ask_about(self, data, name, claim):
        chunks, groups = self.lookups[name]
        state = self.stager.lookup(name)
        assert state.ready <= len(chunks)
        assert state.done == bool(state.reason)
        if claim and state.done:
            first = data.draw(st.integers(0, state.ready))
            refs = self.stager.claim(name, first, state.ready)
            assert [ref.groups for ref in refs] == list(groups[first : state.ready])
            self.claims[name] = list(zip(refs, chunks[first : state.ready], strict=True))
            del self.lookups[name]

    @precondition(lambda self: self.lookups)
    @rule(data=st.data())
    def cancel(self, data):
        name = data.draw(st.sampled_from(sorted(self.lookups)))
        self.stager.cancel(name)
        del self.lookups[name]

    @precondition(lambda self: self.claims)
    @rule(data=st.data())
    def release(self, data):
        name = data.draw(st.sampled_from(sorted(self.claims)))
        self.stager.cancel(name)
        self.stager.release(name)
        del self.claims[name]

    @rule(chunk=st.sampled_from(list(BY_KEY.values())), groups=st.sampled_from(GROUP_CHOICES))
    def begin_save(self, chunk, groups):
        ref = self.stager.begin_save(chunk, groups)
        if ref is not None:
            assert set(ref.groups) <= set(groups)
            assert not any(slot == ref.slot and set(ref.groups) & set(g) for slot, _, g in map(key_of, self.filling))
            self.filling[ref] = (chunk.key, set())

    @rule(chunk=st.sampled_from(list(BY_KEY.values())), publish=st.booleans())
    def save_whole(self, chunk, publish):
        for group in (0, 1):
            self.stored.discard((chunk.key, group))
            self.stager._pool.known.forget(chunk.key, [group])
        ref = self.stager.begin_save(chunk)
        if ref is not None:
            for writer in range(WRITERS):
                self.write_as(ref, chunk.key, writer, True)
            if publish:
                self.play_everything()

    @precondition(lambda self: self.filling)
    @rule(data=st.data(), usable=st.sampled_from([True, True, True, False]))
    def write(self, data, usable):
        ref = data.draw(st.sampled_from(sorted(self.filling, key=key_of)))
        key, done = self.filling[ref]
        writer = data.draw(st.sampled_from(sorted(set(range(WRITERS)) - done)))
        self.write_as(ref, key, writer, usable)
        done.add(writer)
        if len(done) == WRITERS:
            del self.filling[ref]

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def abandon(self, data):
        ref = data.draw(st.sampled_from(sorted(self.filling, key=key_of)))
        del self.filling[ref]
        self.stager.abandon_save(ref)

    @rule(seconds=st.sampled_from([0.1, 0.6, 2.5]))
    def time_passes(self, seconds):
        self.now += seconds
        self.stager.poll()

    @rule()
    def reset(self):
        self.stager.reset()

    # what the I/O process and the store do

    @precondition(lambda self: self.io.jobs)
    @rule(data=st.data(), outcome=st.sampled_from(["do", "do", "do", "timeout", "internal"]))
    def play(self, data, outcome):
        number = data.draw(st.sampled_from(sorted(self.io.jobs)))
        job = self.io.jobs[number]
        if isinstance(job, Probe):
            self.end(Probed(number, "" if outcome == "do" else outcome, ""))
        elif isinstance(job, Load):
            self.play_load(job, outcome)
        else:
            self.play_save(job, outcome)
        if data.draw(st.booleans()):
            self.stager.poll()

    @rule()
    def play_everything(self):
        for number, job in sorted(self.io.jobs.items()):
            if isinstance(job, Probe):
                self.end(Probed(number, "", ""))
            elif isinstance(job, Load):
                self.play_load(job, "do")
            elif all(self.stager.region.marked(job.slot, group, job.generation) for group in job.groups):
                while number in self.io.jobs:
                    self.play_save(job, "do")
        self.stager.poll()

    def end(self, event):
        self.io.jobs.pop(event.job)
        self.io.events.append(event)

    def play_load(self, job, outcome):
        if job.job in self.io.cancelled and outcome == "do":
            return self.end(Loaded(job.job, "cancelled", (), "", "", 0, 0.0))
        key, good, result = bytes.fromhex(job.key), [], ("ready", "")
        for group in job.groups:
            if outcome != "do":
                result = ("error", outcome)
            elif (key, group) in self.damaged:
                result = ("damaged", "digest-mismatch")
            elif (key, group) not in self.stored:
                result = ("miss", "not-found")
            if result[0] != "ready":
                self.cells(job.slot, group)[:] = b"garbage of a load"[:16]
                break
            self.cells(job.slot, group)[:] = key[:16]
            good.append(group)
        return self.end(Loaded(job.job, result[0], tuple(good), result[1], "", 0, 0.0))

    def play_save(self, job, outcome):
        key, region = bytes.fromhex(job.key), self.stager.region
        parts = [(job.slot, group, job.generation) for group in job.groups]
        if not job.sealed and job.job not in self.sealed:
            if job.job in self.io.cancelled:
                return self.end(Saved(job.job, "cancelled", (), "", "", 0, 0.0))
            if not all(region.marked(*part) for part in parts):
                void = all(region.settled(*part) for part in parts)
                return self.end(Saved(job.job, "void" if void else "late", (), "", "", 0, 0.0))
            assert all(self.holds(job.slot, group, key) for group in job.groups)
            self.io.events.append(Sealed(job.job))
            return self.sealed.add(job.job)
        assert all(self.holds(job.slot, group, key) for group in job.groups)
        if outcome != "do":
            return self.end(Saved(job.job, "error", (), outcome, "", 0, 0.0))
        for group in job.groups:
            self.stored.add((key, group))
            if job.replace:
                self.damaged.discard((key, group))
        return self.end(Saved(job.job, "saved", job.groups, "", "", 0, 0.0))

    @precondition(lambda self: self.filling)
    @rule(data=st.data())
    def all_write(self, data):
        ref = data.draw(st.sampled_from(sorted(self.filling, key=key_of)))
        key, done = self.filling.pop(ref)
        for writer in set(range(WRITERS)) - done:
            self.write_as(ref, key, writer, True)

    def write_as(self, ref, key, writer, usable):
        for group in ref.groups:
            self.cells(ref.slot, group)[writer * 8 : writer * 8 + 8] = key[writer * 8 : writer * 8 + 8]
            self.stager.region.mark(ref.slot, group, writer, ref.generation, usable=usable)

    @rule()
    def process_dies(self):
        for job in self.io.jobs.values():
            if isinstance(job, Load):
                for group in job.groups:
                    self.cells(job.slot, group)[:] = b"half of a load .."[:16]
        self.io.events.append(Lost(tuple(sorted(self.io.jobs))))
        self.io.jobs.clear()
        self.sealed.clear()
        self.stager.poll()

    @rule(accepting=st.sampled_from([1, 1, 0]))
    def processes_come_and_go(self, accepting):
        self.io.accepting = accepting

    @precondition(lambda self: self.stored)
    @rule(data=st.data(), prune=st.booleans())
    def store_changes(self, data, prune):
        place = data.draw(st.sampled_from(sorted(self.stored)))
        if prune:
            self.stored.discard(place)
        self.damaged.discard(place) if prune else self.damaged.add(place)

    # what must always hold

    @invariant()
    def claimed_slots_hold_their_chunks(self):
        for refs in self.claims.values():
            for ref, chunk in refs:
                assert all(self.holds(ref.slot, group, chunk.key) for group in ref.groups)

    @invariant()
    def ready_slots_hold_their_chunks(self):
        for name, (chunks, groups) in self.lookups.items():
            lookup = self.stager._lookups._all[name]
            for chunk, slot, wanted in zip(chunks, lookup.staged[: lookup.ready], groups, strict=False):
                assert all(self.holds(slot, group, chunk.key) for group in wanted)

    @invariant()
    def loads_are_bounded_and_counted(self):
        loads = [job for job in self.stager._pool.in_flight.values() if isinstance(job.work, Load)]
        assert self.stager._pool.loads_in_flight == len(loads) <= self.plan.most_loads

    def teardown(self):
        """Everyone lets go: lookups end by themselves, and every slot comes back."""
        self.io.accepting = 1
        for name in list(self.lookups):
            self.stager.lookup(name)
        for _ in range(20):
            self.now += 0.5
            self.stager.poll()
            for name in list(self.lookups):
                self.stager.lookup(name)
        for name in list(self.lookups):
            assert self.stager.lookup(name).done
            self.stager.cancel(name)
        for name in self.claims:
            self.stager.release(name)
        for ref, (_, done) in self.filling.items():
            for group in ref.groups:
                for writer in set(range(WRITERS)) - done:
                    self.stager.region.mark(ref.slot, group, writer, ref.generation, usable=False)
        self.io.events.append(Lost(tuple(self.io.jobs)))
        self.stager.poll()
        self.stager.poll()
        self.stager.reset()
        assert self.stager.snapshot()["slots"]["free"] == 4
        with suppress(BufferError):
            self.stager.close()


def key_of(ref):
    """Sorts references."""
    return (ref.slot, ref.generation, ref.groups)


StagerMachine.TestCase.settings = settings(max_examples=200, stateful_step_count=50, deadline=None)
TestStagerMachine = StagerMachine.TestCase
