"""Every verb on an encrypted store: with its key, without one, and with another."""

import os
import struct
from pathlib import Path
from typing import Any

import pytest

from tests.support.filled_store import fill, identity, name_of
from tests.support.sample_stores import content
from tests.support.tool import ask, call, refused
from tplayout.admin.journal import Journal
from tplayout.cache import Cache
from tplayout.format.encryption_key import EncryptionKey

KEY, OTHER = bytes(range(32)), bytes(range(1, 33))
KEY_ID, OTHER_ID = EncryptionKey(KEY).id, EncryptionKey(OTHER).id
TOKENS = range(1000, 1040)


class World:
    """An encrypted store, files with keys, and what of it must show nowhere."""

    def __init__(self, path: Path, secret: bytes | None = None) -> None:
        self.path = path
        self.url = path / "store"
        with Cache.open(self.url, identity(), model="tiny", encryption_key=KEY, secret=secret) as cache:
            self.chunks = fill(cache, TOKENS)
            self.names = [name_of(cache, chunk) for chunk in self.chunks]
            self.namespace = cache.namespace
            self.values = [cache.get(chunk).tobytes() for chunk in self.chunks]
        self.key = self.file("key", KEY.hex())
        self.other = self.file("other", OTHER.hex())
        self.tokens = self.file("tokens", " ".join(map(str, TOKENS[:39])))
        self.model = path / "namespace.json"
        self.model.write_bytes((self.url / self.namespace / "namespace.json").read_bytes())
        self.with_key = ("--encryption-key-file", self.key)
        self.with_other = ("--encryption-key-file", self.other)

    def file(self, name: str, text: str) -> Path:
        path = self.path / name
        path.write_text(f"{text}\n")
        path.chmod(0o600)
        return path

    def plain_texts(self) -> list[bytes]:
        """Token ids of each chunk, each chunk's KV (by cell of 32 bytes), and the keys."""
        ids = [struct.pack("<4i", *chunk.tokens) for chunk in self.chunks]
        cells = [value[start : start + 32] for value in self.values for start in range(0, len(value), 32)]
        return [*ids, *cells, KEY, OTHER, KEY.hex().encode(), OTHER.hex().encode()]

    def nothing_plain_in(self, *paths: Path) -> None:
        texts = self.plain_texts()
        for path in paths:
            files = content(path) if path.is_dir() else {path.name: path.read_bytes()}
            assert files
            for name, data in files.items():
                assert not [text for text in texts if text in data], name

    def shards(self) -> Path:
        """Per-rank shards of the same."""
        path = self.path / "shards"
        if not path.exists():
            ask("convert", self.url, path, "--tp", 2, *self.with_key)
        return path

    def plain(self) -> Path:
        """The same, not encrypted."""
        path = self.path / "plain"
        with Cache.open(path, identity(), model="tiny") as cache:
            fill(cache, TOKENS)
        return path


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def flip_last(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)


def test_nothing_plain_is_in_any_file_of_the_store(world: World) -> None:
    """[M46] And it is what would be there, were it not encrypted."""
    world.nothing_plain_in(world.url)
    stored = b"".join(content(world.plain()).values())
    assert all(text in stored for text in world.plain_texts()[:10])


def test_looking_verbs_with_the_key(world: World) -> None:
    nbytes = sum(file.stat().st_size for file in world.url.rglob("*.safetensors"))
    (prefix,) = ask("ls", world.url, world.namespace[:8], *world.with_key)["prefixes"]
    assert prefix["tokens"] == 40
    assert [share["bytes"] for share in ask("du", world.url, "--by", "prefix", *world.with_key)["rows"]] == [nbytes]
    shown = ask("inspect", world.url, world.names[3], *world.with_key)
    assert (shown["codec"], shown["encryption_key_id"], shown["sound"]) == ("aes-256-gcm", KEY_ID, True)
    assert shown["tokens"] == [1012, 1013, 1014, 1015]
    text = call("inspect", world.url, world.names[3], "--cell", "0:1", *world.with_key).stdout
    assert f"codec aes-256-gcm, encryption key {KEY_ID}" in text
    for depth in ([], ["--quick"]):
        report = ask("verify", world.url, *world.with_key, *depth)
        assert (report["checked"], report["undecrypted"], report["findings"]) == (10, 0, [])
        found = ask("explain", world.url, "--model", world.model, "--tokens", world.tokens, *world.with_key, *depth)
        assert found["hit_tokens"] == 36


def test_looking_verbs_without_the_key(world: World) -> None:
    """What needs no key is told, what does is said not to be."""
    (space,) = ask("ls", world.url)["namespaces"]
    assert (space["codec"], space["encryption_key_id"], space["chunks"]) == ("aes-256-gcm", KEY_ID, 10)
    assert ask("du", world.url)["objects"] == 10
    assert ask("du", world.url, "--by", "age")["objects"] == 10
    assert f"encryption key {KEY_ID}" in call("inspect", world.url).stdout
    way_out = "give --encryption-key-file or TPLAYOUT_ENCRYPTION_KEY"
    shown = ask("ls", world.url, world.namespace)
    assert (shown["namespace"]["chunks"], shown["prefixes"], shown["damaged"]) == (10, None, None)
    result = call("ls", world.url, world.namespace)
    assert (result.exit_code, f"codec    aes-256-gcm, encryption key {KEY_ID}" in result.stdout) == (0, True)
    assert f"the prefixes cannot be shown without the key: {way_out}" in result.stderr
    shown = ask("du", world.url, "--by", "prefix")
    assert (shown["rows"], shown["objects"], list(shown["left_out"])) == ([], 10, [world.namespace])
    result = call("du", world.url, "--by", "prefix")
    assert (result.exit_code, result.stdout) == (0, "")
    assert "left out, 10 objects" in result.stderr
    assert way_out in result.stderr

    shown = ask("inspect", world.url, world.names[0])
    assert (shown["sound"], shown["tokens"], shown["parent"], shown["cells"]) == (None, None, None, [])
    text = call("inspect", world.url, world.names[0]).stdout
    assert f"encrypted: its stored bytes match their digests; the key {KEY_ID} shows more" in text
    assert "cells     4, not to be opened" in text
    for option in (["--cell", "0:1"], ["--heatmap", world.path / "map.png"]):
        assert way_out in refused("inspect", world.url, world.names[0], *option)

    for key, ours in (([], None), (world.with_other, OTHER_ID)):
        found = ask("explain", world.url, "--model", world.model, "--tokens", world.tokens, *key, code=1)
        assert (found["hit_tokens"], [cause["reason"] for cause in found["reasons"]]) == (0, ["encryption-key"])
        assert (found["reasons"][0]["ours"], found["reasons"][0]["theirs"]) == (ours, KEY_ID)
        assert {chunk["state"] for chunk in found["chunks"]} == {"refused"}


def test_verify_without_the_key_finds_damage_and_says_what_it_cannot(world: World) -> None:
    """[M45]"""
    report = ask("verify", world.url)
    assert (report["sound"], report["checked"], report["undecrypted"]) == (True, 10, 10)
    text = call("verify", world.url).stdout
    assert "10 encrypted objects of these: only the stored bytes checked, nothing authenticated" in text
    assert text.endswith("sound, as far as can be told without the key\n")
    assert "only size and header checked" in call("verify", world.url, "--quick").stdout
    flip_last(world.url / world.names[4])
    swapped = (world.url / world.names[1]).read_bytes()
    (world.url / world.names[2]).write_bytes(swapped)
    for key in ([], world.with_key):
        findings = ask("verify", world.url, *key, code=1)["findings"]
        damaged = {finding["object"]: finding["reason"] for finding in findings if finding["damage"]}
        assert damaged == {world.names[4]: "digest-mismatch", world.names[2]: "digest-mismatch"}
    assert ask("inspect", world.url, world.names[4], code=1)["fault"]["reason"] == "digest-mismatch"
    assert ask("inspect", world.url, world.names[4], *world.with_key, code=1)["sound"] is False
    moved = ask("verify", world.url, "--quarantine", "--yes")["quarantined"]
    assert len(moved) == 2
    assert ask("verify", world.url, *world.with_key)["checked"] == 8
    in_quarantine = moved[0]["to"]
    assert ask("inspect", world.url, in_quarantine, *world.with_key, code=1)["sound"] is False


def test_a_resumed_verification_is_of_the_same_key(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = world.path / "journal"
    with monkeypatch.context() as patch:
        patch.setattr(Journal, "finish", Journal.close)  # it stays, as that of an interrupted run
        ask("verify", world.url, "--journal", journal)
    assert "is of another verification (encryption_key is None" in refused(
        "verify", world.url, "--journal", journal, *world.with_key
    )
    assert ask("verify", world.url, "--journal", journal)["checked"] == 10
    assert not journal.exists()


@pytest.mark.parametrize("verb", ["ls", "verify", "verify --quick", "inspect", "cp", "mv", "export", "convert"])
def test_another_key_is_refused_by_name(world: World, verb: str) -> None:
    """[M47] One line, nothing written."""
    arguments: dict[str, list[Any]] = {
        "ls": ["ls", world.url, world.namespace],
        "verify": ["verify", world.url],
        "verify --quick": ["verify", world.url, "--quick"],
        "inspect": ["inspect", world.url, world.names[0]],
        "cp": ["cp", world.url, world.path / "to"],
        "mv": ["mv", world.url, world.path / "to", "--yes"],
        "export": ["export", world.url, world.path / "to"],
        "convert": ["convert", world.url, world.path / "to", "--tp", 2],
    }
    line = refused(*arguments[verb], *world.with_other)
    assert f"encryption key {KEY_ID} is needed, {OTHER_ID} is given" in line
    if verb not in ("ls", "verify", "verify --quick", "inspect"):
        assert "encryption key" in refused(*arguments[verb])
    assert not (world.path / "to").exists()


def test_gc_needs_the_key_to_tell_heads_from_tails(world: World) -> None:
    before = content(world.url)
    for key in ([], world.with_other):
        report = ask("gc", world.url, "--max-bytes", 0, "--grace", 0, "--yes", *key, code=1)
        assert (report["chunks"], report["limit_met"]) == (0, False)
        assert "is encrypted" in report["unjudged"][world.namespace]
    assert content(world.url) == before
    size = (world.url / world.names[0]).stat().st_size
    document = (world.url / world.namespace / "namespace.json").stat().st_size
    ask("gc", world.url, "--max-bytes", 3 * size + document, "--grace", 0, "--yes", *world.with_key)
    assert {name for name in content(world.url) if "safetensors" in name} == set(world.names[:3])


def test_copies_stay_encrypted_with_the_same_key(world: World) -> None:
    before = content(world.url)
    ask("cp", world.url, world.path / "copied", *world.with_key)
    ask("export", world.url, world.path / "bundle", *world.with_key)
    ask("import", world.path / "bundle", world.path / "imported", *world.with_key)
    assert content(world.path / "copied") == content(world.path / "imported") == before
    world.nothing_plain_in(world.path / "bundle")
    assert "encryption key" in refused("import", world.path / "bundle", world.path / "to")
    assert ask("cp", world.url, world.path / "copied", *world.with_key)["namespaces"][world.namespace]["present"] == 10
    ask("mv", world.path / "copied", world.path / "moved", "--yes", *world.with_key)
    assert content(world.path / "moved") == before


@pytest.mark.parametrize("verb", ["convert", "cp", "mv"])
def test_rotation(world: World, verb: str) -> None:
    """A store under one key becomes one under another; what is cut short goes on."""
    new = world.path / "new"
    more = {"convert": ["--codec", "aes-256-gcm"], "cp": [], "mv": ["--yes"]}[verb]
    arguments = [verb, world.url, new, *world.with_key, "--dst-encryption-key-file", world.other, *more]
    assert call(*arguments, "--dry-run").exit_code == 0
    assert not new.exists()
    before = content(world.url)
    ask(*arguments)
    assert ask("ls", new)["namespaces"][0]["encryption_key_id"] == OTHER_ID
    assert ask("verify", new, *world.with_other)["checked"] == 10
    assert not set(content(new).values()) & set(before.values())
    world.nothing_plain_in(new)
    with Cache.open(new, identity(), encryption_key=OTHER, create=False) as cache:
        assert [cache.get(chunk).tobytes() for chunk in world.chunks] == world.values
    if verb != "mv":
        (new / world.names[5]).unlink()
        ask(*arguments)
        assert ask("verify", new, *world.with_other)["checked"] == 10


def test_encrypting_and_decrypting(world: World) -> None:
    plain = world.plain()
    ask("convert", plain, world.path / "sealed", "--codec", "aes-256-gcm", *world.with_key)
    world.nothing_plain_in(world.path / "sealed")
    ask("cp", plain, world.path / "copied", "--dst-encryption-key-file", world.key)
    world.nothing_plain_in(world.path / "copied")
    ask("convert", world.path / "sealed", world.path / "opened", "--codec", "none", *world.with_key)
    assert content(world.path / "opened") == content(plain)
    ask("convert", world.path / "sealed", world.path / "eight", "--chunk-tokens", 8, *world.with_key)
    world.nothing_plain_in(world.path / "eight")
    assert ask("verify", world.path / "eight", *world.with_key)["checked"] == 5


def encrypting(world: World, source: Path, bundle: Path, to: Path) -> list[list[Any]]:
    """Every verb that writes a store, without its key."""
    return [
        ["cp", source, to],
        ["mv", source, to, "--yes"],
        ["import", bundle, to],
        ["convert", source, to, "--codec", "aes-256-gcm"],
        ["convert", source, to, "--chunk-tokens", 8],
        ["convert", world.shards(), to],
    ]


@pytest.mark.parametrize("way", ["option", "environment"])
@pytest.mark.parametrize("number", range(6))
def test_who_gives_a_key_finds_nothing_in_clear(world: World, monkeypatch, way: str, number: int) -> None:
    """One rule for all verbs that write: encrypted with it, or refused, and never in clear."""
    plain, bundle, to = world.plain(), world.path / "bundle", world.path / "to"
    ask("export", plain, bundle)
    arguments = encrypting(world, plain, bundle, to)[number]
    if way == "environment":
        monkeypatch.setenv("TPLAYOUT_ENCRYPTION_KEY", KEY.hex())
        ask(*arguments)
    else:
        ask(*arguments, *world.with_key)
    assert [space["encryption_key_id"] for space in ask("ls", to)["namespaces"]] == [KEY_ID]
    world.nothing_plain_in(to)
    report = ask("verify", to, *world.with_key)
    assert (report["checked"] > 0, report["sound"], report["undecrypted"]) == (True, True, 0)


@pytest.mark.parametrize("number", range(6))
def test_who_gives_a_key_writes_nothing_into_what_is_in_clear(world: World, number: int) -> None:
    plain, bundle, to = world.plain(), world.path / "bundle", world.path / "to"
    ask("export", plain, bundle)
    arguments = encrypting(world, plain, bundle, to)[number]
    ask("cp", plain, to)
    ask("convert", plain, to, "--chunk-tokens", 8)
    before = content(to)
    line = refused(*arguments, *world.with_key)
    assert ("is not encrypted" in line, "leave out the key" in line) == (True, True)
    assert content(to) == before


@pytest.mark.parametrize("codec", ["none", "shuffle-zstd"])
@pytest.mark.parametrize("more", [[], ["--chunk-tokens", 8]])
def test_a_codec_that_does_not_encrypt_contradicts_a_key(world: World, codec: str, more: list[Any]) -> None:
    line = refused("convert", world.plain(), world.path / "to", "--codec", codec, *more, *world.with_key)
    assert (f"codec {codec} does not encrypt" in line, "leave out the key" in line) == (True, True)
    if codec != "none":
        line = refused("convert", world.url, world.path / "to", "--codec", codec, *more, *world.with_key)
        assert "`--codec none` decrypts" in line
    assert not (world.path / "to").exists()


def test_a_bundle_is_as_the_store_is(world: World) -> None:
    line = refused("export", world.plain(), world.path / "bundle", *world.with_key)
    assert ("is not encrypted" in line, "tplayout cp" in line) == (True, True)
    assert not (world.path / "bundle").exists()


def test_nothing_is_decrypted_unasked(world: World) -> None:
    """[M47] A store that is there and plain takes nothing of an encrypted one, unless --codec says so."""
    plain = world.plain()
    (plain / world.names[0]).unlink()
    before = content(plain)
    ask("export", world.url, world.path / "bundle", *world.with_key)
    for arguments in (["cp", world.url, plain], ["mv", world.url, plain, "--yes"]):
        assert "is not encrypted (codec none)" in refused(*arguments, *world.with_key)
    assert "is not encrypted (codec none)" in refused("import", world.path / "bundle", plain, *world.with_key)
    assert content(plain) == before
    ask("convert", world.url, plain, "--codec", "none", *world.with_key)
    assert world.names[0] in content(plain)


def test_shards_come_and_go(world: World) -> None:
    """Files of other formats are plain; what comes from them is encrypted where there is a key."""
    ask("convert", world.url, world.path / "shards", "--tp", 2, *world.with_key)
    ask("convert", world.path / "shards", world.path / "back", *world.with_key)
    world.nothing_plain_in(world.path / "back")
    assert ask("ls", world.path / "back")["namespaces"][0]["encryption_key_id"] == KEY_ID
    line = refused("convert", world.path / "shards", world.plain(), *world.with_key)
    assert "is not encrypted" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--codec", "none", "--dst-encryption-key-file", "KEY"], "does not go with --codec none"),
        (["--codec", "shuffle-zstd", "--dst-encryption-key-file", "KEY"], "does not go with --codec shuffle-zstd"),
        (["--codec", "aes-256-gcm"], "needs an encryption key"),
        (["--tp", 2, "--dst-encryption-key-file", "KEY"], "--dst-encryption-key-file does not go with"),
    ],
)
def test_options_that_do_not_go_together(world: World, arguments: list[Any], words: str) -> None:
    plain = world.plain()
    arguments = [world.key if argument == "KEY" else argument for argument in arguments]
    assert words in refused("convert", plain, world.path / "to", *arguments)
    assert not (world.path / "to").exists()


def test_files_that_hold_no_key(world: World) -> None:
    for text in ("", "too short", KEY.hex()[:-1], KEY.hex() + "0", "g" * 64):
        file = world.file("bad", text)
        line = refused("verify", world.url, "--encryption-key-file", file)
        assert "(make one: openssl rand -hex 32)" in line
        assert not text or text not in line
    assert "cannot be read" in call("verify", world.url, "--encryption-key-file", world.path / "none").stderr


def test_the_key_in_the_environment(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A file comes first; what is no key refuses every verb that takes one."""
    monkeypatch.setenv("TPLAYOUT_ENCRYPTION_KEY", KEY.hex())
    assert ask("verify", world.url)["undecrypted"] == 0
    assert OTHER_ID in refused("verify", world.url, *world.with_other)
    found = {one["topic"]: one for one in ask("doctor")["findings"]}["encryption"]
    assert (found["level"], KEY_ID in found["text"]) == ("ok", True)
    monkeypatch.setenv("TPLAYOUT_ENCRYPTION_KEY", "hunter2")
    assert "TPLAYOUT_ENCRYPTION_KEY holds no encryption key" in refused("verify", world.url)
    found = {one["topic"]: one for one in ask("doctor", code=1)["findings"]}["encryption"]
    assert (found["level"], "hunter2" in str(found)) == ("fail", False)


def test_without_the_library_one_line_says_what_to_install(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    for arguments in (
        ["verify", world.url],
        ["inspect", world.url, world.names[0]],
        ["cp", world.url, world.path / "to"],
        ["convert", world.url, world.path / "to", "--codec", "none"],
    ):
        assert "pip install 'tplayout[encrypt]'" in refused(*arguments, *world.with_key)
    assert ask("ls", world.url)["namespaces"][0]["chunks"] == 10
    assert ask("verify", world.url)["undecrypted"] == 10


def test_a_secret_beside_the_key(tmp_path: Path) -> None:
    """With it, and without the key, forgery is found too; each is asked for by name."""
    world = World(tmp_path, secret=b"0123456789abcdef")
    secret = ("--secret-key-file", world.file("secret", "0123456789abcdef"))
    assert "--secret-key-file" in refused("verify", world.url, *world.with_key)
    assert ask("verify", world.url, *secret)["undecrypted"] == 10
    assert ask("verify", world.url, *secret, *world.with_key)["undecrypted"] == 0
    assert ask("inspect", world.url, world.names[0], *world.with_key)["sound"] is None
    assert "not verified" in call("inspect", world.url, world.names[0]).stdout


def test_no_temporary_is_plain(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """[M46] Every byte that a verb writes to a file, whatever becomes of that."""
    seen: list[bytes] = []
    write = os.write

    def spy(fd: int, data: Any) -> int:
        seen.append(bytes(data))
        return write(fd, data)

    monkeypatch.setattr(os, "write", spy)
    new = ("--dst-encryption-key-file", world.other)
    ask("convert", world.url, world.path / "new", "--codec", "aes-256-gcm", *world.with_key, *new)
    ask("cp", world.url, world.path / "copied", *world.with_key)
    written = b"".join(seen)
    assert len(written) > sum(map(len, content(world.url).values()))
    assert not [text for text in world.plain_texts() if text in written]
