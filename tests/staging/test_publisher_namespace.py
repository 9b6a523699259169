"""Whose namespace.json a publisher accepts: servers of one identity share, whatever they call the model."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.documents import namespace_document
from tools.fault_store import Fault, FaultStore
from tplayout.errors import FormatError, Reason
from tplayout.format.digest import make_hasher
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.identity import MAX_DOCUMENT_BYTES, Identity
from tplayout.format.keys import namespace_object
from tplayout.staging.io_jobs import NAMESPACE_DIFFERS, Bench, NamespaceCheck, Publisher, probe
from tplayout.staging.protocol import Probe, Save
from tplayout.storage.base import Store
from tplayout.storage.bounded import Deadline
from tplayout.storage.url import open_store

IDENTITY = Identity(
    "label:w", {}, "float16", None, Geometry(4, (Group("full", "full", (0,), 1, (Part("k", 2),), "F16"),))
)
NAME = namespace_object(IDENTITY.namespace)


@pytest.fixture
def store() -> Iterator[Store]:
    with open_store("memory://publisher-namespace") as opened:
        yield opened
        opened.delete([NAME])


def document(model: str, digest: str = "xxh3-128") -> bytes:
    return namespace_document(IDENTITY, {"digest": digest, "key_id": None, "codec": "none"}, model)


NOTHING = Save(job=1, slot=0, generation=1, groups=(), key="00" * 32, replace=False, sealed=True)


def bench(store: Store, ours: bytes) -> Bench:
    return Bench(store, None, (), make_hasher(), IDENTITY.digest(), ours)  # type: ignore[arg-type]  # no region needed


def publish(store: Store, ours: bytes) -> Any:
    """Publish no groups at all: what is left is the document."""
    return Publisher(bench(store, ours)).publish(NOTHING)


def test_the_first_server_names_the_model_and_others_share(store: Store) -> None:
    assert publish(store, document("/models/a")).outcome == "saved"
    assert publish(store, document("/srv/b")).outcome == "saved"
    assert store.get(NAME) == document("/models/a")


def test_another_digest_is_named(store: Store) -> None:
    store.put(NAME, document("a", digest="blake3"))
    saved = publish(store, document("a"))
    assert (saved.outcome, saved.kind) == ("error", NAMESPACE_DIFFERS)
    assert "storage.digest: ours 'xxh3-128', theirs 'blake3'" in saved.detail
    assert store.get(NAME) == document("a", digest="blake3")


def test_another_codec_is_named_and_nothing_is_stored(store: Store) -> None:
    """A server that began while the store was away, say: once restarted it takes the codec over."""
    packed = document("a").replace(b'"codec": "none"', b'"codec": "shuffle-zstd"')
    store.put(NAME, packed)
    saved = publish(store, document("a"))
    assert (saved.outcome, saved.kind) == ("error", NAMESPACE_DIFFERS)
    assert "storage.codec: ours 'none', theirs 'shuffle-zstd'; restart this server" in saved.detail
    assert probe(bench(store, document("a")), Probe(1)).kind == NAMESPACE_DIFFERS
    assert publish(store, packed).outcome == "saved"


def test_an_object_that_cannot_be_packed_is_not_blamed_on_the_namespace(store: Store) -> None:
    class Unpackable(FaultStore):
        def _put(self, key: str, view: memoryview, deadline: Deadline) -> None:
            raise FormatError(Reason.BAD_HEADER, "not what the geometry says", key)

    store.put(NAME, document("a"))
    region = SimpleNamespace(slot=lambda slot, group: bytes(64))
    layout = SimpleNamespace(parent_range=range(32, 64))
    at = replace(bench(Unpackable(store), document("a")), region=region, layouts=(layout,))
    with pytest.raises(FormatError, match="not what the geometry says"):
        Publisher(at).publish(replace(NOTHING, groups=(0,)))


def test_a_damaged_document_is_left_alone(store: Store) -> None:
    store.put(NAME, b"{")
    saved = publish(store, document("a"))
    assert (saved.outcome, saved.kind) == ("error", NAMESPACE_DIFFERS)
    assert NAME in saved.detail
    assert store.get(NAME) == b"{"


@pytest.mark.parametrize("damage", [lambda data: data[:100], lambda data: data.replace(b"float16", b"float17")])
@pytest.mark.parametrize("model", ["a", "as another server calls it"])
def test_a_document_that_was_sound_and_is_damaged_is_written_again(
    store: Store, damage: Callable[[bytes], bytes], model: str
) -> None:
    """A write that failed half-way, say, of this server or of another: what it said is known to be what we would."""
    now = [0.0]
    publisher = Publisher(bench(store, document("a")), clock=lambda: now[0])
    store.put(NAME, document(model))
    publisher.publish(NOTHING)
    store.put(NAME, damage(document(model)))
    now[0] = 60.0
    assert publisher.publish(NOTHING).outcome == "saved"
    assert store.get(NAME) == document("a")


def test_a_document_whose_write_failed_half_way_is_written_again(store: Store) -> None:
    faulty = FaultStore(store)
    publisher = Publisher(bench(faulty, document("a")))
    faulty.inject(Fault.FAILURE_AFTER_WRITE, "put")
    assert publisher.publish(NOTHING).kind == "unavailable"
    assert store.get(NAME) == document("a")[: len(document("a")) // 2]
    assert publisher.publish(NOTHING).outcome == "saved"
    assert store.get(NAME) == document("a")


def test_a_store_that_was_emptied_gets_its_document_again(store: Store) -> None:
    now = [0.0]
    publisher = Publisher(bench(store, document("a")), clock=lambda: now[0])
    publisher.publish(NOTHING)
    now[0] = 5.0
    publisher.publish(NOTHING)
    store.delete([NAME])
    now[0] = 64.0
    publisher.publish(NOTHING)
    assert store.exists([NAME]) == [False]
    now[0] = 65.0
    publisher.publish(NOTHING)
    assert store.get(NAME) == document("a")


def test_two_servers_that_begin_a_namespace_at_once_find_out_soon(store: Store) -> None:
    """With different digests: the last one to write its document wins, the other leaves the store alone."""
    now = [0.0]
    ours, theirs = document("a"), document("a", digest="blake3")
    publisher = Publisher(bench(store, ours), clock=lambda: now[0])
    assert publisher.publish(NOTHING).outcome == "saved"
    store.put(NAME, theirs)  # it had looked before ours was there
    now[0] = 5.0
    assert publisher.publish(NOTHING).kind == NAMESPACE_DIFFERS
    assert store.get(NAME) == theirs


def test_a_document_that_is_replaced_while_we_run_is_noticed(store: Store) -> None:
    now = [0.0]
    publisher = Publisher(bench(store, document("a")), clock=lambda: now[0])
    publisher.publish(NOTHING)
    store.put(NAME, document("a", digest="blake3"))
    now[0] = 60.0
    for _ in range(2):  # and every time from then on
        assert publisher.publish(NOTHING).kind == NAMESPACE_DIFFERS


def test_loads_ask_why_everything_looks_damaged_once_a_minute(store: Store) -> None:
    now = [0.0]
    check = NamespaceCheck(bench(store, document("a")), clock=lambda: now[0])
    assert check.conflict() == ""
    store.put(NAME, document("b", digest="blake3"))
    now[0] = 59.0
    assert check.conflict() == ""
    now[0] = 60.0
    assert "storage.digest: ours 'xxh3-128', theirs 'blake3'; restart this server" in check.conflict()
    store.delete([NAME])
    now[0] = 120.0
    assert check.conflict() == ""


@pytest.mark.parametrize(
    ("found", "differs"),
    [
        (document("a"), False),
        (document("called otherwise"), False),
        (b"{", False),  # damaged: whoever saves says so, and what verifies is right all the same
        (document("a").replace(b'"codec": "none"', b'"codec": "zstd"'), True),
        (document("a", digest="blake3"), True),
    ],
)
def test_a_probe_tells_a_store_that_answers_from_one_that_is_ours(store: Store, found: bytes, differs: bool) -> None:
    store.put(NAME, found)
    assert probe(bench(store, document("a")), Probe(1)).kind == (NAMESPACE_DIFFERS if differs else "")
    assert probe(bench(store, b""), Probe(1)).kind == ""  # who has no document of its own knows nothing


def test_a_planted_document_is_not_read_whole(store: Store) -> None:
    store.put(NAME, bytes(MAX_DOCUMENT_BYTES + 1))
    saved = publish(store, document("a"))
    assert (saved.outcome, saved.kind) == ("error", NAMESPACE_DIFFERS)
    assert "too-large" in saved.detail
    assert "remove that file" in saved.detail
    assert probe(bench(store, b""), Probe(1)).kind == ""


def test_a_damaged_document_is_replaced_by_who_knows_that_no_other_was_there(store: Store) -> None:
    """A server that could ask the store when it started, whichever of its I/O processes has written the document."""
    store.put(NAME, b"{")
    publisher = Publisher(replace(bench(store, document("a")), agreed=True))
    assert publisher.publish(NOTHING).outcome == "saved"
    assert store.get(NAME) == document("a")
    packed = document("a").replace(b'"codec": "none"', b'"codec": "shuffle-zstd"')
    store.put(NAME, packed)
    publisher = Publisher(replace(bench(store, document("a")), agreed=True))
    assert publisher.publish(NOTHING).kind == NAMESPACE_DIFFERS
    assert store.get(NAME) == packed
