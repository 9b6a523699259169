"""The slot table: examples, and a state machine against the rules that every user of it relies on."""

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from tplayout.staging.slots import Part, SlotTable


def key(number):
    return bytes([number]) * 32


def loaded(table, number):
    slot = table.acquire(key(number), [0], Part.LOADING)
    table.change(slot, [0], Part.CLEAN)
    return slot


def test_a_clean_slot_is_found_until_it_is_evicted_least_recently_used_first():
    table = SlotTable(2, 1)
    first, second = loaded(table, 1), loaded(table, 2)
    table.pin(first)
    table.unpin(first)
    assert table.find(key(1)) == first
    assert loaded(table, 3) == second
    assert table.find(key(2)) is None
    assert table.find(key(1)) == first


def test_pinned_and_busy_slots_are_never_given_away():
    table = SlotTable(2, 1)
    table.pin(loaded(table, 1))
    table.acquire(key(2), [0], Part.FILLING)
    assert table.available == 0
    assert table.acquire(key(3), [0], Part.LOADING) is None


def test_groups_have_states_of_their_own():
    table = SlotTable(1, 2)
    slot = table.acquire(key(1), [0], Part.LOADING)
    assert not table.readable(slot, [0])
    table.change(slot, [0], Part.CLEAN)
    assert table.readable(slot, [0])
    assert not table.readable(slot, [0, 1])
    table.change(slot, [1], Part.FILLING)
    assert table.available == 0
    table.change(slot, [1], Part.PUBLISHING)
    assert table.readable(slot, [0, 1])
    assert table.available == 0
    table.change(slot, [1], Part.CLEAN)
    assert table.available == 1


def test_a_failed_load_that_somebody_waits_for_frees_the_slot_when_they_let_go():
    table = SlotTable(1, 1)
    slot = table.acquire(key(1), [0], Part.LOADING)
    table.pin(slot)
    table.change(slot, [0], Part.EMPTY)
    assert table.available == 0
    table.unpin(slot)
    assert table.counts()["free"] == 1
    assert table.find(key(1)) is None


def test_limbo_keeps_the_slot():
    table = SlotTable(1, 1)
    slot = table.acquire(key(1), [0], Part.FILLING)
    table.change(slot, [0], Part.LIMBO)
    assert table.acquire(key(2), [0], Part.LOADING) is None
    assert table.counts()["limbo"] == 1
    table.change(slot, [0], Part.EMPTY)
    assert table.acquire(key(2), [0], Part.LOADING) == slot


def test_forget_all_hides_what_is_in_use_and_frees_the_rest():
    table = SlotTable(3, 1)
    loaded(table, 1)
    pinned = loaded(table, 2)
    table.pin(pinned)
    busy = table.acquire(key(3), [0], Part.FILLING)
    table.forget_all()
    assert table.counts()["free"] == 1
    assert table.find(key(2)) is None
    assert table.acquire(key(2), [0], Part.LOADING) is not None
    table.unpin(pinned)
    table.change(busy, [0], Part.PUBLISHING)
    table.change(busy, [0], Part.CLEAN)
    assert table.counts()["free"] == 2


def test_a_disowned_slot_leaves_its_key_to_another_and_is_free_when_idle():
    table = SlotTable(2, 1)
    slot = table.acquire(key(1), [0], Part.LOADING)
    table.disown(slot)
    with pytest.raises(ValueError, match="no key leads"):
        table.disown(slot)
    other = table.acquire(key(1), [0], Part.FILLING)
    assert other != slot
    table.change(slot, [0], Part.CLEAN)
    assert table.available == 1
    assert table.find(key(1)) == other


def test_a_free_slot_is_not_freed_again():
    table = SlotTable(2, 1)
    slot = table.acquire(key(1), [0], Part.LOADING)
    table.forget_all()
    table.change(slot, [0], Part.CLEAN)
    table.change(slot, [], Part.EMPTY)
    assert table.available == 2


def test_a_slot_that_has_used_up_its_generations_is_retired():
    table = SlotTable(1, 1, last_generation=2)
    for number in (1, 2):
        slot = table.acquire(key(number), [0], Part.LOADING)
        table.change(slot, [0], Part.EMPTY)
    assert table.acquire(key(3), [0], Part.LOADING) is None
    assert table.usable == 0
    assert table.counts() == {
        "free": 0, "limbo": 0, "filling": 0, "loading": 0, "publishing": 0, "clean": 0, "retired": 1, "pinned": 0,
    }  # fmt: skip


def test_wrong_steps_are_refused():
    table = SlotTable(1, 1)
    with pytest.raises(ValueError, match="free"):
        table.pin(0)
    slot = table.acquire(key(1), [0], Part.LOADING)
    with pytest.raises(ValueError, match="cannot become"):
        table.change(slot, [0], Part.PUBLISHING)
    with pytest.raises(ValueError, match="not pinned"):
        table.unpin(slot)
    with pytest.raises(ValueError, match="already"):
        table.acquire(key(1), [0], Part.LOADING)


GROUPS = 2
LAST = 6
STEPS = {
    Part.EMPTY: [Part.FILLING, Part.LOADING],
    Part.FILLING: [Part.PUBLISHING, Part.EMPTY, Part.LIMBO],
    Part.PUBLISHING: [Part.CLEAN],
    Part.LOADING: [Part.CLEAN, Part.EMPTY],
    Part.CLEAN: [Part.PUBLISHING],
    Part.LIMBO: [Part.EMPTY],
}


class SlotMachine(RuleBasedStateMachine):
    """Random users of a small table. `held` are pins: (slot, key, generation, readable groups when pinned)."""

    def __init__(self):
        super().__init__()
        self.table = SlotTable(3, GROUPS, last_generation=LAST)
        self.held = []
        self.used = set()

    def in_use(self):
        return [slot for slot in range(3) if self.table.key(slot) is not None]

    @rule(number=st.integers(0, 5), group=st.integers(0, 1), what=st.sampled_from([Part.FILLING, Part.LOADING]))
    def acquire(self, number, group, what):
        if self.table.find(key(number)) is not None:
            return
        before = self.table.available
        busy = {slot for slot in range(3) if self.table.pins(slot) or self.is_busy(slot)}
        slot = self.table.acquire(key(number), [group], what)
        assert (slot is None) == (before == 0)
        if slot is not None:
            assert slot not in busy
            generation = self.table.generation(slot)
            assert (slot, generation) not in self.used
            self.used.add((slot, generation))

    @precondition(lambda self: self.in_use())
    @rule(data=st.data())
    def change(self, data):
        slot = data.draw(st.sampled_from(self.in_use()))
        group = data.draw(st.integers(0, GROUPS - 1))
        self.table.change(slot, [group], data.draw(st.sampled_from(STEPS[self.table.part(slot, group)])))
        self.table.change(slot, [], Part.EMPTY)

    @precondition(lambda self: self.in_use())
    @rule(data=st.data())
    def pin(self, data):
        slot = data.draw(st.sampled_from(self.in_use()))
        readable = [group for group in range(GROUPS) if self.table.readable(slot, [group])]
        self.table.pin(slot)
        self.held.append((slot, self.table.key(slot), self.table.generation(slot), readable))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def unpin(self, data):
        index = data.draw(st.integers(0, len(self.held) - 1))
        self.table.unpin(self.held.pop(index)[0])

    @precondition(lambda self: any(self.table.find(key(number)) is not None for number in range(6)))
    @rule(data=st.data())
    def disown(self, data):
        number = data.draw(st.sampled_from([n for n in range(6) if self.table.find(key(n)) is not None]))
        self.table.disown(self.table.find(key(number)))
        assert self.table.find(key(number)) is None

    @rule()
    def forget_all(self):
        self.table.forget_all()
        assert all(self.table.find(key(number)) is None for number in range(6))

    def is_busy(self, slot):
        parts = [self.table.part(slot, group) for group in range(GROUPS)]
        return any(part not in (Part.EMPTY, Part.CLEAN) for part in parts)

    @invariant()
    def pinned_slots_keep_key_generation_and_content(self):
        for slot, owner, generation, readable in self.held:
            assert (self.table.key(slot), self.table.generation(slot)) == (owner, generation)
            assert self.table.readable(slot, readable)

    @invariant()
    def no_slot_is_lost(self):
        counts = self.table.counts()
        counts.pop("pinned")
        assert sum(counts.values()) == len(self.table)
        idle = sum(
            self.table.key(slot) is not None and not self.table.pins(slot) and not self.is_busy(slot)
            for slot in range(3)
        )
        assert self.table.available == counts["free"] + idle

    @invariant()
    def keys_lead_to_their_slots(self):
        for number in range(6):
            slot = self.table.find(key(number))
            assert slot is None or self.table.key(slot) == key(number)

    def teardown(self):
        """Whatever happened, all slots come back once everyone lets go."""
        for slot, *_ in self.held:
            self.table.unpin(slot)
        ends = {Part.FILLING: [Part.EMPTY], Part.LOADING: [Part.EMPTY], Part.LIMBO: [Part.EMPTY],
                Part.PUBLISHING: [Part.CLEAN]}  # fmt: skip
        for slot in range(3):
            for group in range(GROUPS):
                for state in ends.get(self.table.part(slot, group), []):
                    self.table.change(slot, [group], state)
        assert self.table.available == self.table.usable


SlotMachine.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSlotMachine = SlotMachine.TestCase
