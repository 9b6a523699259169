"""Opening namespaces: what is adopted, what is refused and by what name."""

import json
from typing import Any

import pytest

from tests.support.documents import namespace_document
from tplayout.cache import Cache, check_document, check_namespace
from tplayout.cache.namespace import open_namespace
from tplayout.errors import ConfigError, FormatError, NamespaceMismatch, NotFound, Reason
from tplayout.format.digest import secret_id
from tplayout.format.identity import Identity, parse_namespace_document
from tplayout.format.keys import namespace_object
from tplayout.storage.base import Store

SECRET = b"sixteen bytes or more"
OTHER = b"another such secret"


def document(identity: Identity, digest: str = "xxh3-128", secret: bytes | None = None, model: str = "m") -> bytes:
    key_id = None if secret is None else secret_id(secret)
    return namespace_document(identity, {"digest": digest, "key_id": key_id, "codec": "none"}, model)


def put_document(store: Store, identity: Identity, **facts: Any) -> bytes:
    data = document(identity, **facts)
    store.put(namespace_object(identity.namespace), data)
    return data


def names(store: Store) -> list[str]:
    return sorted(info.key for info in store.list())


def test_open_begins_a_namespace_once(store: Store, one_group: Identity) -> None:
    name = namespace_object(one_group.namespace)
    Cache.open(store, one_group, model="first")
    first = store.get(name)
    assert parse_namespace_document(first, one_group.namespace).model == "first"
    Cache.open(store, one_group, model="second")
    assert store.get(name) == first
    assert names(store) == [name]


def test_open_without_create_writes_nothing(store: Store, one_group: Identity) -> None:
    with pytest.raises(NotFound, match=f"{one_group.namespace}/namespace.json: nothing is stored for this identity"):
        Cache.open(store, one_group, create=False)
    assert names(store) == []


def test_open_by_url(url: str, one_group: Identity, kit: Any) -> None:
    with Cache.open(url, one_group) as cache:
        kit.fill(cache, 1)
        opened = cache.store
    with pytest.raises(Exception, match="closed"):
        opened.exists(["x"])
    with Cache.open(url, one_group, create=False, storage_options={}) as cache:
        assert cache.longest_prefix(kit.TOKENS).tokens == 4
        assert cache.namespace in repr(cache)


def test_a_store_of_the_caller_stays_open(store: Store, one_group: Identity) -> None:
    Cache.open(store, one_group).close()
    assert store.exists(["x"]) == [False]
    with pytest.raises(ConfigError, match="storage_options"):
        Cache.open(store, one_group, storage_options={})


def test_the_digest_of_an_existing_namespace_is_adopted(store: Store, one_group: Identity, kit: Any) -> None:
    """[M13]"""
    put_document(store, one_group, digest="blake3")
    cache = Cache.open(store, one_group)
    kit.fill(cache, 1)
    chunk = cache.chunks(kit.TOKENS)[0]
    (name,) = (info.key for info in store.list() if not info.key.endswith(".json"))
    assert b'"digest":"blake3"' in store.get(name)
    assert kit.bits(cache.get(chunk)) == kit.kv(one_group.geometry.groups[0]).tobytes()


@pytest.mark.parametrize(("theirs", "ours"), [(None, SECRET), (SECRET, None), (SECRET, OTHER)])
def test_secrets_must_agree(store: Store, one_group: Identity, theirs: bytes | None, ours: bytes | None) -> None:
    Cache.open(store, one_group, secret=theirs)
    with pytest.raises(FormatError) as caught:
        Cache.open(store, one_group, secret=ours)
    assert caught.value.reason is Reason.WRONG_SECRET
    assert one_group.namespace in str(caught.value)
    for secret in (SECRET, OTHER):
        assert secret.decode() not in str(caught.value)


def test_keyed_namespace(store: Store, one_group: Identity, kit: Any) -> None:
    cache = Cache.open(store, one_group, secret=SECRET)
    kit.fill(cache)
    again = Cache.open(store, one_group, secret=SECRET, create=False)
    assert again.longest_prefix(kit.TOKENS, verify=True).tokens == 20
    assert kit.bits(again.get(again.chunks(kit.TOKENS)[0])) == kit.kv(one_group.geometry.groups[0]).tobytes()
    assert not any(SECRET in store.get(name) for name in names(store))


def test_a_document_of_another_identity_names_the_field(store: Store, one_group: Identity, kit: Any) -> None:
    other = kit.identity(kit.group(), weights="files:01")
    store.put(namespace_object(one_group.namespace), document(other))
    for call in (
        lambda: Cache.open(store, one_group),
        lambda: check_namespace(store, one_group, document(one_group)),
    ):
        with pytest.raises(NamespaceMismatch) as caught:
            call()
        assert (caught.value.field, caught.value.ours, caught.value.theirs) == ("weights", "files:00", "files:01")


def test_a_document_with_a_false_name_is_damaged(store: Store, one_group: Identity) -> None:
    data = json.loads(document(one_group))
    data["identity_digest"] = "00" * 32
    store.put(namespace_object(one_group.namespace), json.dumps(data).encode())
    with pytest.raises(FormatError, match=f"{one_group.namespace}/namespace.json") as caught:
        Cache.open(store, one_group)
    assert caught.value.reason is Reason.WRONG_NAMESPACE


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", Reason.NOT_JSON),
        (b"[]", Reason.BAD_NAMESPACE),
        (b'{"tplayout": 2}', Reason.WRONG_VERSION),
        (b" " * (5 << 20), Reason.TOO_LARGE),
    ],
)
def test_damaged_documents(store: Store, one_group: Identity, data: bytes, reason: Reason) -> None:
    name = namespace_object(one_group.namespace)
    store.put(name, data)
    with pytest.raises(FormatError, match=name) as caught:
        check_namespace(store, one_group, document(one_group))
    assert caught.value.reason is reason
    with pytest.raises(FormatError, match=name):
        Cache.open(store, one_group)
    assert store.get(name) == data


class TestCheckNamespace:
    def test_absent(self, store: Store, one_group: Identity) -> None:
        assert check_namespace(store, one_group, document(one_group)) is None
        assert names(store) == []

    def test_the_models_name_does_not_matter(self, store: Store, one_group: Identity) -> None:
        found = put_document(store, one_group, model="/models/a")
        facts = check_namespace(store, one_group, document(one_group, model="/srv/b"))
        assert facts is not None
        assert (facts.digest, facts.key_id, facts.codec) == ("xxh3-128", None, "none")
        assert store.get(namespace_object(one_group.namespace)) == found

    @pytest.mark.parametrize(
        ("theirs", "ours", "field"),
        [
            ({"digest": "blake3"}, {}, "storage.digest"),
            ({}, {"digest": "blake3-keyed", "secret": SECRET}, "storage.digest"),
            (
                {"digest": "blake3-keyed", "secret": OTHER},
                {"digest": "blake3-keyed", "secret": SECRET},
                "storage.key_id",
            ),
        ],
    )
    def test_storage_facts_must_agree(
        self, store: Store, one_group: Identity, theirs: Any, ours: Any, field: str
    ) -> None:
        found = put_document(store, one_group, **theirs)
        mine = document(one_group, **ours)
        with pytest.raises(NamespaceMismatch) as caught:
            check_namespace(store, one_group, mine)
        assert caught.value.field == field
        with pytest.raises(NamespaceMismatch):
            check_document(found, mine, one_group.namespace)

    def test_documents_in_hand(self, one_group: Identity) -> None:
        ours = document(one_group, model="a")
        assert check_document(document(one_group, model="b"), ours, one_group.namespace).codec == "none"
        with pytest.raises(FormatError) as caught:
            check_document(b"{}", ours, one_group.namespace)
        assert caught.value.reason is Reason.WRONG_VERSION


def test_what_another_began_at_the_same_moment_counts(
    store: Store, one_group: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    put = type(store).put

    def overtaken(self: Store, key: str, data: bytes, **options: Any) -> None:
        put(self, key, data, **options)
        put(self, key, data.replace(b'"none"', b'"shuffle-zstd"'), **options)

    monkeypatch.setattr(type(store), "put", overtaken)
    assert open_namespace(store, one_group, None, True, "m")[1].name == "shuffle-zstd"
