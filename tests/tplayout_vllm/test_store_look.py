"""At start: what a namespace is kept like is taken over, a wrong set-up is refused, a broken store costs misses."""

import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest
from sim_store import Sim

from tests.support.documents import namespace_document
from tests.support.rights import unprivileged
from tplayout.errors import ConfigError, Forbidden
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.identity import Identity
from tplayout.storage.local import LocalStore
from tplayout_vllm.options import Options
from tplayout_vllm.store_look import look_at_store


def look(options: Options, identity: Identity, saves: bool = True) -> tuple[Any, str, bool]:
    found = look_at_store(options, identity, saves)
    assert found.fault is None
    return found.hasher, found.codec, found.agreed


def plant(directory: Path, change: Any, digest: str = "xxh3-128", **options: Any) -> tuple[Options, Identity]:
    """A store that holds a namespace.json which `change` has been at, and what a server asks it for."""
    geometry = Geometry(16, (Group("full", "full", (0,), 1, (Part("k", 8), Part("v", 8)), "F32"),))
    identity = Identity("label:w", {}, "float32", None, geometry)
    document = namespace_document(identity, {"digest": digest, "key_id": None, "codec": "none"}, "model")
    file = directory / identity.namespace / "namespace.json"
    file.parent.mkdir()
    file.write_bytes(change(document))
    return Options(url=f"file://{directory}", **options), identity


def test_the_namespace_of_another_model_name_is_ours(tmp_path: Path) -> None:
    look(*plant(tmp_path, lambda document: document.replace(b'"model": "model"', b'"model": "other"')))


def test_a_namespace_s_digest_is_taken_over(tmp_path: Path) -> None:
    hasher, codec, agreed = look(*plant(tmp_path, lambda document: document, "blake3"))
    assert (hasher.name, codec, agreed) == ("blake3", "none", True)


def test_a_namespace_s_codec_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the start is refused, with the way out, where what it needs is missing."""
    packed = plant(tmp_path, lambda document: document.replace(b'"codec": "none"', b'"codec": "shuffle-zstd"'))
    assert look(*packed)[1] == "shuffle-zstd"
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"pip install 'tplayout\[zstd\]'"):
        look(*packed)


@pytest.mark.parametrize(("secret", "name"), [(None, "xxh3-128"), (b"sixteen bytes or more", "blake3-keyed")])
def test_a_new_namespace_gets_the_default_digest(tmp_path: Path, secret: bytes | None, name: str) -> None:
    _, identity = plant(tmp_path, lambda document: document)
    elsewhere = Options(url=f"file://{tmp_path}/elsewhere", secret=secret)
    hasher, codec, agreed = look(elsewhere, identity)
    assert (hasher.name, codec, agreed) == (name, "none", True)


def test_a_secret_that_is_not_the_namespace_s_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"another namespace.*without a secret.*use another 'url'"):
        look(*plant(tmp_path, lambda document: document, secret=b"sixteen bytes or more"))


KEY, OTHER = EncryptionKey(bytes(32)), EncryptionKey(bytes(range(32)))


def encrypted(document: bytes) -> bytes:
    value = json.loads(document)
    return json.dumps(
        {**value, "storage": {**value["storage"], "codec": "aes-256-gcm", "encryption_key_id": KEY.id}}
    ).encode()


def test_an_encrypted_namespace_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its key; and the start is refused, with the way out, where what it needs is missing."""
    planted = plant(tmp_path, encrypted, encryption_key=KEY)
    hasher, codec, agreed = look(*planted)
    assert (hasher.name, codec, agreed) == ("xxh3-128", "aes-256-gcm", True)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match=r"pip install 'tplayout\[encrypt\]'"):
        look(*planted)


@pytest.mark.parametrize(
    ("change", "key", "codec", "says"),
    [
        (encrypted, OTHER, "aes-256-gcm", f"encryption key {KEY.id} is needed, {OTHER.id} is given"),
        (encrypted, None, "none", f"encryption key {KEY.id} is needed, none is given"),
        (lambda document: document, KEY, "aes-256-gcm", f"codec none takes no encryption key, {KEY.id} is given"),
    ],
)
def test_another_encryption_key_is_a_miss_in_one_line(
    tmp_path: Path, log: pytest.LogCaptureFixture, change: Any, key: EncryptionKey | None, codec: str, says: str
) -> None:
    """[M47] Keys are changed while servers run. It goes on in its own way, which is not the namespace's; `strict`
    refuses."""
    options, identity = plant(tmp_path, change, "blake3", encryption_key=key)
    hasher, begun, agreed = look(options, identity)
    assert (hasher.name, begun, agreed) == ("blake3", codec, False)
    (line,) = [record.getMessage() for record in log.records]
    assert says in line
    assert "serving WITHOUT it" in line
    with pytest.raises(ConfigError, match=r"another namespace.*wrong-encryption-key"):
        look(replace(options, strict=True), identity)


def test_a_new_namespace_is_encrypted_where_there_is_a_key(tmp_path: Path) -> None:
    _, identity = plant(tmp_path, lambda document: document)
    options = Options(url=f"file://{tmp_path}/elsewhere", encryption_key=KEY)
    assert look(options, identity)[1:] == ("aes-256-gcm", True)


@pytest.mark.parametrize("keep", [0, 1, 100])
def test_a_damaged_namespace_costs_saves_and_is_told_with_the_way_out(
    tmp_path: Path, log: pytest.LogCaptureFixture, keep: int
) -> None:
    """After a power loss, say: what was not flushed may be gone."""
    options, identity = plant(tmp_path, lambda document: document[:keep])
    found = look_at_store(options, identity, saves=True)
    assert found.fault is not None
    assert (found.agreed, found.fault.loads) == (False, False)
    (record,) = log.records
    assert record.levelname == "ERROR"
    assert "damaged namespace.json" in record.getMessage()
    assert "remove that file" in record.getMessage()
    with pytest.raises(ConfigError, match=r"damaged namespace\.json.*remove that file.*leave 'strict' out") as raised:
        look(replace(options, strict=True), identity)
    assert "\n" not in str(raised.value)


def test_a_document_of_another_identity_is_damage(tmp_path: Path) -> None:
    options, identity = plant(tmp_path, lambda document: document.replace(b'"label:w"', b'"label:x"'))
    found = look_at_store(options, identity, saves=True)
    assert found.fault is not None
    assert "namespace differs in weights: ours 'label:w', theirs 'label:x'" in found.fault.detail


def test_a_namespace_of_another_version_is_not_to_be_removed(tmp_path: Path) -> None:
    def newer(document: bytes) -> bytes:
        value = json.loads(document)
        return json.dumps({**value, "storage": {**value["storage"], "codec": "zstd"}}).encode()

    with pytest.raises(ConfigError, match=r"another namespace.*unsupported-codec.*zstd") as raised:
        look(*plant(tmp_path, newer))
    assert "remove" not in str(raised.value)


def plain(directory: Path | str, **options: Any) -> tuple[Options, Identity]:
    geometry = Geometry(16, (Group("full", "full", (0,), 1, (Part("k", 8), Part("v", 8)), "F32"),))
    return Options(url=f"file://{directory}", **options), Identity("label:w", {}, "float32", None, geometry)


def test_strict_takes_a_store_that_works_and_leaves_it_as_it_was(tmp_path: Path) -> None:
    for limit in (None, 10_000, 1000):
        assert look(*plain(tmp_path / "kv", strict=True, max_bytes=limit))[2]
    assert [path for path in (tmp_path / "kv").rglob("*") if "tplayout-usage" not in str(path)] == []


@pytest.mark.parametrize("place", ["{tmp}/file", "{tmp}/file/below", "/dev/null/x", "/proc/tplayout-x"])
def test_strict_refuses_what_no_store_can_be_in(tmp_path: Path, place: str) -> None:
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=r"^the store file:///\S+ cannot be used .* and 'strict' is set; ") as raised:
        look(*plain(place.format(tmp=tmp_path), strict=True))
    assert "\n" not in str(raised.value)
    assert (tmp_path / "file").read_text() == "mine"


def test_strict_refuses_a_directory_that_cannot_be_written_but_not_who_only_reads(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o555)
    options, identity = plain(tmp_path / "kv", strict=True)
    with unprivileged(tmp_path):
        with pytest.raises(ConfigError, match=r"cannot be used \(forbidden: .*check the owner and mode"):
            look(options, identity)
        assert look(options, identity, saves=False)[2]
    assert os.listdir(tmp_path / "kv") == []


def test_strict_says_what_cannot_be_deleted(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a bucket that lets servers write and read, which is all that they do."""

    def delete(self: LocalStore, keys: list[str]) -> NoReturn:
        raise Forbidden("no right to delete")

    monkeypatch.setattr(LocalStore, "delete", delete)
    assert look(*plain(tmp_path / "kv", strict=True))[2]
    (line,) = log.messages
    assert "cannot be deleted (forbidden: no right to delete), which no server needs" in line


def test_refusals_name_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"^kv_connector_extra_config: storage_options 'endpoint' is unknown"):
        look(*plain(tmp_path, storage_options={"endpoint": "x"}))
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match=r"^kv_connector_extra_config: 'encryption_key_file' \(or TPLAYOUT_ENC\S+ is"):
        look(*plain(tmp_path, encryption_key=KEY))


@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.parametrize("place", ["{tmp}/file", "/dev/null/x"])
def test_a_place_that_can_hold_no_store_is_an_error_at_start(
    tmp_path: Path, log: pytest.LogCaptureFixture, place: str, saves: bool
) -> None:
    """Not "now": it does not go away by itself. The server goes on."""
    (tmp_path / "file").write_text("mine")
    found = look_at_store(*plain(place.format(tmp=tmp_path)), saves)
    assert found.fault is not None
    assert (found.agreed, found.fault.kind, found.fault.loads) == (False, "unavailable", True)
    (record,) = log.records
    assert record.levelname == "ERROR"
    assert "can never be used" in record.getMessage()
    assert "serving WITHOUT it; correct the 'url'" in record.getMessage()
    with pytest.raises(ConfigError, match="correct the 'url', or leave 'strict' out"):
        look(*plain(place.format(tmp=tmp_path), strict=True), saves)


def test_an_engine_goes_on_without_a_place_for_its_store(sim: Sim, tmp_path: Path) -> None:
    """And the metric says so from the first report on."""
    (tmp_path / "file").write_text("mine")
    sim.url = f"file://{tmp_path}/file"
    engine = sim.engine()
    for _ in range(2):
        engine.run(sim.text(1), 300, 1)
    assert engine.stats("store_healthy", "gauges") == 0
    assert engine.stats("save-store-unavailable", "skips") > 0
    assert (engine.stats("saves"), engine.stats("loads")) == (0, 0)
    assert (tmp_path / "file").read_text() == "mine"


def test_an_engine_with_a_damaged_document_reads_and_saves_once_it_is_removed(
    sim: Sim, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tplayout.staging.breaker._FIRST_S", 0.02)
    text, more = sim.text(1), sim.text(2)
    sim.engine().run(text, 300, 1)
    (document,) = sim.store.rglob("namespace.json")
    sound = document.read_bytes()
    document.write_bytes(sound[:100])
    engine = sim.engine()
    assert engine.loaded(engine.run(text, 300, 1)) == 256
    engine.run(more, 300, 1)
    assert engine.stats("store_healthy", "gauges") == 0
    assert not any(sim.stored(more, 256))
    assert document.read_bytes() == sound[:100]
    document.unlink()
    engine.until(
        lambda: bool(engine.add(sim.text(len(sim.texts) + 9), 300, 1)) and engine.stager.health["saves"] == "ok"
    )
    engine.drain()
    assert document.read_bytes() == sound
    sim.check_store()
