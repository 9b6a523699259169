"""Opening a namespace from its own document."""

import pytest

from tplayout.admin.catalog import Secrets
from tplayout.admin.namespaces import begin_namespace, choose_namespace, names, open_namespace
from tplayout.errors import ConfigError, FormatError, NotFound, Reason
from tplayout.format.identity import MAX_DOCUMENT_BYTES
from tplayout.format.keys import namespace_object

SECRET = b"0123456789abcdef"


def test_choosing(kit, store):
    with pytest.raises(NotFound, match="no namespace"):
        choose_namespace(store, None)
    first, _ = kit.fill(store, kit.identity(weights="files:01"))
    assert choose_namespace(store, None).name == first.name
    second, _ = kit.fill(store, kit.identity(weights="files:02"))
    assert names(store) == sorted([first.name, second.name])
    assert choose_namespace(store, second.name[:6]).name == second.name
    with pytest.raises(ConfigError, match="there are 2 namespaces"):
        choose_namespace(store, None)
    with pytest.raises(NotFound, match=f"no namespace begins with .*; there are {names(store)[0]}"):
        choose_namespace(store, "0" * 32)
    with pytest.raises(ConfigError, match="hex digits"):
        choose_namespace(store, "zz")


def test_secrets(kit, store):
    keyed, _ = kit.fill(store, kit.identity(weights="files:01"), secret=SECRET)
    plain, _ = kit.fill(store, kit.identity(weights="files:02"))
    assert open_namespace(store, plain.name, Secrets(SECRET)).hasher.key_id is None  # tools see many namespaces
    with pytest.raises(ConfigError, match="secret"):
        open_namespace(store, keyed.name)
    with pytest.raises(ConfigError, match="secret"):
        open_namespace(store, keyed.name, Secrets(SECRET + b"x"))
    for dry_run in (False, True):
        with pytest.raises(ConfigError, match="written without a secret"):  # who gives a secret expects authentication
            begin_namespace(store, plain.identity, "", Secrets(SECRET), dry_run=dry_run)
    assert begin_namespace(store, keyed.identity, "", Secrets(SECRET)).name == keyed.name


def test_secrets_show_in_no_text():
    assert "sixteen" not in repr(Secrets(b"sixteen bytes or more"))


def test_a_dry_run_begins_nothing(kit, make_store):
    store = make_store("new")
    assert begin_namespace(store, kit.identity(), "m", dry_run=True).chunk_tokens == 4
    assert kit.content(store) == {}


def test_damage_is_named(kit, store):
    namespace, _ = kit.fill(store, kit.identity())
    name = namespace_object(namespace.name)
    store.put(name, store.get(name)[:-5])
    with pytest.raises(FormatError, match=name):
        open_namespace(store, namespace.name)
    store.put(name, bytes(MAX_DOCUMENT_BYTES + 1))  # planted: not read whole, and no error of the store
    with pytest.raises(FormatError, match=f"{name}: too-large"):
        open_namespace(store, namespace.name)
    key = next(namespace.objects())[0].key
    object_name = namespace.object_name(key, 0)
    data = bytearray(store.get(object_name))
    data[namespace.layout(0).tokens_range.start] ^= 1
    store.put(object_name, data)
    with pytest.raises(FormatError) as caught:
        namespace.chunk_id(key, 0)
    assert (caught.value.reason, caught.value.where) == (Reason.WRONG_KEY, object_name)
    store.put(object_name, data[:100])
    with pytest.raises(FormatError, match="truncated"):
        namespace.chunk_id(key, 0)
    store.put(object_name, bytes(data) + b"x")
    with pytest.raises(FormatError, match="trailing"):
        namespace.read(key, 0)


def test_what_another_began_at_the_same_moment_counts(kit, store, monkeypatch):
    put = type(store).put

    def overtaken(self, key, data, **options):
        put(self, key, data, **options)
        put(self, key, bytes(data).replace(b'"none"', b'"shuffle-zstd"'), **options)

    monkeypatch.setattr(type(store), "put", overtaken)
    assert begin_namespace(store, kit.identity(), "m").codec.name == "shuffle-zstd"
