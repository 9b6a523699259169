"""What is remembered about the store: bounded, and forgotten when told."""

from tplayout.staging.known import Damaged, KnownStored, UsesTold


def test_the_least_recently_seen_objects_are_forgotten():
    known = KnownStored(3, 600.0, lambda: 0.0)
    known.add(b"a", [0, 1])
    known.add(b"b", [0])
    known.add(b"a", [0])
    known.add(b"c", [0])
    assert not known.has(b"a", 1)
    assert [known.has(key, 0) for key in (b"a", b"b", b"c")] == [True] * 3


def test_an_object_is_believed_to_be_there_for_a_while_since_it_was_seen_last():
    now = [0.0]
    known = KnownStored(10, 600.0, lambda: now[0])
    known.add(b"a", [0, 1])
    now[0] = 599.0
    known.add(b"a", [1])
    assert known.has(b"a", 0)
    now[0] = 601.0
    assert not known.has(b"a", 0)
    assert known.has(b"a", 1)


def test_objects_are_forgotten_one_by_one_or_all():
    known = KnownStored(10, 600.0, lambda: 0.0)
    known.add(b"a", [0, 1])
    known.forget(b"a", [1, 2])
    assert known.has(b"a", 0)
    assert not known.has(b"a", 1)
    known.clear()
    assert not known.has(b"a", 0)


def test_damage_is_new_once_and_skipped_for_a_while():
    now = [0.0]
    damaged = Damaged(10.0, lambda: now[0])
    assert damaged.add(b"a")
    assert not damaged.add(b"a")
    assert damaged.skip(b"a")
    now[0] = 10.0
    assert not damaged.skip(b"a")
    assert damaged.has(b"a")
    damaged.remove(b"a")
    assert not damaged.has(b"a")


def test_damage_is_bounded():
    damaged = Damaged(10.0, lambda: 0.0)
    for number in range(5000):
        damaged.add(number.to_bytes(4, "little"))
    assert damaged.has((4999).to_bytes(4, "little"))
    assert not damaged.has(bytes(4))


def test_of_a_use_the_store_is_told_once_in_a_while():
    now = [0.0]
    uses = UsesTold(2, 10.0, lambda: now[0])
    assert uses.due(b"a")
    uses.told(b"a")
    now[0] = 9.0
    assert not uses.due(b"a")
    now[0] = 10.0
    assert uses.due(b"a")
    for key in (b"a", b"b", b"c"):
        uses.told(key)
    assert [uses.due(key) for key in (b"a", b"b", b"c")] == [True, False, False]
