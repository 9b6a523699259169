"""Whose namespace.json a publisher accepts: servers of one identity share, whatever they call the model."""

from collections.abc import Iterator
from typing import Any

import pytest

from tplayout.format.digest import make_hasher
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.identity import Identity, namespace_document
from tplayout.format.keys import namespace_object
from tplayout.staging.io_jobs import NAMESPACE_DIFFERS, Bench, Publisher
from tplayout.staging.protocol import Save
from tplayout.storage.base import Store
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


def publish(store: Store, ours: bytes) -> Any:
    """Publish no groups at all: what is left is the document."""
    bench = Bench(store, None, (), make_hasher(), IDENTITY.digest(), ours)  # type: ignore[arg-type]  # no region needed
    job = Save(job=1, slot=0, generation=1, groups=(), key="00" * 32, replace=False, sealed=True)
    return Publisher(bench).publish(job)


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


def test_a_damaged_document_is_left_alone(store: Store) -> None:
    store.put(NAME, b"{")
    saved = publish(store, document("a"))
    assert (saved.outcome, saved.kind) == ("error", NAMESPACE_DIFFERS)
    assert NAME in saved.detail
    assert store.get(NAME) == b"{"
