"""The fault-injecting store does what it says, and the same for the same seed."""

from __future__ import annotations

import time
import uuid
from collections import Counter

import pytest

from tools.fault_store import APPLICABLE, Fault, FaultStore
from tplayout.errors import StorageError, StorageErrorKind, StorageTimeout, Unavailable
from tplayout.storage import Store, open_store


@pytest.fixture
def inner() -> Store:
    store = open_store(f"memory://faults/{uuid.uuid4().hex}")
    store.put("k", bytes(range(100)))
    return store


@pytest.fixture
def store(inner: Store) -> FaultStore:
    return FaultStore(inner)


def call(store: Store, verb: str, deadline: float = 5.0) -> object:
    """One call of the verb, on the object `k` of 100 bytes."""
    if verb == "get":
        return store.get("k", deadline=deadline)
    if verb == "get_into":
        buf = bytearray(100)
        return bytes(buf[: store.get_into("k", buf, deadline=deadline)])
    if verb == "get_range":
        return store.get_range("k", 0, 50, deadline=deadline)
    if verb == "put":
        return store.put("k", bytes(range(100)), deadline=deadline)
    if verb == "exists":
        return store.exists(["k"], deadline=deadline)
    if verb == "list":
        return list(store.list(deadline=deadline))
    return store.delete(["k"], deadline=deadline)


@pytest.mark.parametrize("verb", APPLICABLE)
def test_errors_before_anything_is_done(store: FaultStore, inner: Store, verb: str) -> None:
    store.inject(Fault.ERROR, verb)
    with pytest.raises(StorageError, match="injected error"):
        call(store, verb)
    assert inner.get("k") == bytes(range(100))
    call(store, verb)
    assert store.injected == Counter({(verb, Fault.ERROR): 1})


@pytest.mark.parametrize("verb", APPLICABLE)
def test_hangs_last_until_the_deadline(store: FaultStore, verb: str) -> None:
    store.inject(Fault.HANG, verb)
    start = time.monotonic()
    with pytest.raises(StorageTimeout):
        call(store, verb, deadline=0.1)
    assert 0.1 <= time.monotonic() - start < 10


@pytest.mark.parametrize("verb", APPLICABLE)
def test_delays_succeed(store: FaultStore, verb: str) -> None:
    store.inject(Fault.DELAY, verb)
    start = time.monotonic()
    call(store, verb)
    assert time.monotonic() - start >= 0.05


@pytest.mark.parametrize("verb", APPLICABLE)
def test_success_reported_as_failure(store: FaultStore, inner: Store, verb: str) -> None:
    store.inject(Fault.REPORTED_FAILURE, verb)
    with pytest.raises(Unavailable, match="reported-failure"):
        call(store, verb)
    assert inner.exists(["k"]) == [verb != "delete"]


@pytest.mark.parametrize("verb", ["get", "get_into", "get_range"])
def test_one_bit_of_what_is_read(store: FaultStore, verb: str) -> None:
    right = call(store, verb)
    store.inject(Fault.FLIPPED_BIT, verb)
    wrong = call(store, verb)
    assert isinstance(right, bytes)
    assert isinstance(wrong, bytes)
    assert sum((a ^ b).bit_count() for a, b in zip(right, wrong, strict=True)) == 1
    assert call(store, verb) == right


def test_one_bit_of_what_is_stored(store: FaultStore, inner: Store) -> None:
    data = bytes(range(100))
    store.inject(Fault.FLIPPED_BIT, "put")
    store.put("k", memoryview(data))
    assert sum((a ^ b).bit_count() for a, b in zip(inner.get("k"), data, strict=True)) == 1


@pytest.mark.parametrize("verb", ["get", "get_into"])
def test_short_reads_without_an_error(store: FaultStore, verb: str) -> None:
    store.inject(Fault.SHORT_READ, verb)
    found = call(store, verb)
    assert isinstance(found, bytes)
    assert len(found) < 100
    assert found == bytes(range(100))[: len(found)]


def test_a_short_range_is_the_contracts_error(store: FaultStore) -> None:
    store.inject(Fault.SHORT_READ, "get_range")
    with pytest.raises(StorageError) as caught:
        call(store, "get_range")
    assert caught.value.kind is StorageErrorKind.SHORT_READ


def test_failure_after_write_leaves_half_an_object(store: FaultStore, inner: Store) -> None:
    store.inject(Fault.FAILURE_AFTER_WRITE, "put")
    with pytest.raises(Unavailable):
        store.put("new", bytes(100))
    assert inner.get("new") == bytes(50)


def test_stale_answers(store: FaultStore) -> None:
    store.inject(Fault.STALE_LIST, "list")
    store.inject(Fault.STALE_LIST, "exists")
    store.put("new", b"x")
    store.delete(["k"])
    assert [info.key for info in store.list()] == ["k"]
    assert [info.key for info in store.list()] == ["new"]
    assert store.exists(["new", "k"]) == [False, True]
    assert store.exists(["new", "k"]) == [True, False]


def test_a_fault_waits_for_a_call_to_which_it_applies(store: FaultStore) -> None:
    store.inject(Fault.FLIPPED_BIT)
    store.exists(["k"])
    assert not store.injected
    call(store, "get")
    assert store.injected == Counter({("get", Fault.FLIPPED_BIT): 1})
    with pytest.raises(ValueError, match="does not apply"):
        store.inject(Fault.FLIPPED_BIT, "list")


def run(seed: int, inner: Store) -> list[str]:
    store = FaultStore(inner, seed=seed, rate=0.5, delay_s=0.0, faults=set(Fault) - {Fault.HANG})
    log = []
    for verb in list(APPLICABLE) * 20:
        try:
            log.append(repr(call(store, verb)))
        except StorageError as exc:
            log.append(str(exc))
        inner.put("k", bytes(range(100)))
    assert sum(store.injected.values()) == pytest.approx(0.5 * store.calls, rel=0.4)
    assert {verb for verb, _ in store.injected} == set(APPLICABLE)
    return log


def test_the_same_seed_gives_the_same_faults(inner: Store) -> None:
    first = [entry for entry in run(7, inner) if "ObjectInfo" not in entry]
    assert first == [entry for entry in run(7, inner) if "ObjectInfo" not in entry]
    assert first != [entry for entry in run(8, inner) if "ObjectInfo" not in entry]
