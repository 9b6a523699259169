"""Verification of 1,000 chunks of which 50 are damaged in every way; what is no damage; going on after a stop."""

import os
import sys
import time
from collections import Counter
from pathlib import Path

import pytest

from tests.support.filled_store import (
    file_of,
    fill,
    flip,
    group,
    identity,
    layout_of_group,
    name_of,
    rewrite,
    swap,
)
from tplayout.admin.catalog import Secrets
from tplayout.admin.check import Kind
from tplayout.admin.quarantine import ON_REQUEST, plan, quarantine
from tplayout.admin.verify import Report, verify_store
from tplayout.cache import Cache
from tplayout.cache.codec import make_codec
from tplayout.errors import ConfigError, Reason
from tplayout.format.header import LENGTH_BYTES
from tplayout.format.packed import packed_layout
from tplayout.storage.base import Store
from tplayout.storage.url import open_store

PROMPTS, LENGTH = 250, 4  # prompts of four chunks: 1,000 chunks


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def summary(report: Report) -> dict[str, str]:
    """What is damage: object -> kind and reason."""
    return {finding.name: f"{finding.kind} {finding.reason}" for finding in report.damage}


def fill_many(cache: Cache) -> list[str]:
    """Names of all objects; the last quarter are the last chunks of their prompts."""
    prompts = [fill(cache, [prompt, *range(1, 4 * LENGTH)]) for prompt in range(PROMPTS)]
    return [name_of(cache, chunks[depth]) for depth in range(LENGTH) for chunks in prompts]


def damage(store: Store, cache: Cache, names: list[str]) -> dict[str, str]:
    """Damage 45 objects and add 5 that do not belong here. Object -> what has to be found."""
    layout = layout_of_group(cache)
    data = layout.data_start
    first_cell, last_cell = layout.cell_range(0, 0), layout.cell_range(1, 1)
    table = layout.digest_range(1, 0).start
    bits = {
        0: None,  # the header's length: it ends elsewhere
        6: "damaged too-large",
        LENGTH_BYTES: "damaged not-safetensors",
        LENGTH_BYTES + 12: None,  # in the JSON: the reason depends on the character
        data - 1: None,  # the header's padding
        layout.tokens_range.start: "damaged wrong-key",
        layout.tokens_range.start + 3: "damaged wrong-key",
        layout.parent_range.start: "damaged wrong-key",
        layout.extras_range.stop - 1: "damaged wrong-key",
        layout.extras_range.stop + 5: "damaged bad-padding",
        layout.nbytes - 1: "damaged bad-padding",
        table: "damaged digest-mismatch",
        table + layout.digest_size - 1: "damaged digest-mismatch",
        first_cell.start: "damaged digest-mismatch",
        first_cell.stop - 1: "damaged digest-mismatch",
        last_cell.start: "damaged digest-mismatch",
        last_cell.stop - 1: "damaged digest-mismatch",
    }
    todo = iter(names)
    expected: dict[str, str | None] = {}
    for offset, found in bits.items():
        name = next(todo)
        rewrite(store, name, flip(offset, 2))
        expected[name] = found
    for length in (0, 1, 7, 8, data - 1, data, data + 10, layout.sections, layout.nbytes // 2, layout.nbytes - 1):
        name = next(todo)
        rewrite(store, name, lambda content, length=length: bytes(content[:length]))
        expected[name] = "truncated truncated"
    for extra in (1, 4096):
        name = next(todo)
        rewrite(store, name, lambda content, extra=extra: bytes(content) + bytes(extra))
        expected[name] = "damaged trailing"
    for _ in range(4):
        pair = next(todo), next(todo)
        swap(store, *pair)
        expected |= dict.fromkeys(pair, "misnamed wrong-key")
    for (head, layer), (other_head, other_layer) in (
        ((0, 0), (1, 0)),
        ((0, 0), (0, 1)),
        ((0, 1), (1, 1)),
        ((1, 0), (1, 1)),
    ):
        name = next(todo)
        one, other = layout.cell_range(head, layer), layout.cell_range(other_head, other_layer)

        def exchange(content: bytearray, one: range = one, other: range = other) -> None:
            kept = bytes(content[one.start : one.stop])
            content[one.start : one.stop] = content[other.start : other.stop]
            content[other.start : other.stop] = kept

        rewrite(store, name, exchange)
        expected[name] = "damaged digest-mismatch"
    for content, found in (
        (b"\0" * layout.nbytes, "truncated truncated"),
        (b"not a chunk, but text under a chunk's name " * 4096, "damaged too-large"),
        (b"\x02\0\0\0\0\0\0\0{}", "damaged not-a-chunk"),
    ):
        name = next(todo)
        store.put(name, content)
        expected[name] = found if content[:1] != b"\0" else None
    name = next(todo)  # the same chunk with another digest in the header
    rewrite(store, name, lambda content: bytes(content).replace(b'"digest":"xxh3-128"', b'"digest":"xxh3-129"'))
    expected[name] = "damaged unsupported-digest"
    name = next(todo)  # the object of a group that the geometry does not have
    store.put(name.replace(".0.safetensors", ".1.safetensors"), store.get(name))
    expected[name.replace(".0.safetensors", ".1.safetensors")] = "misnamed wrong-group"
    foreign = ["README.txt", f"{cache.namespace}/notes.md", f"{cache.namespace}/ab/thumbs.db"]
    foreign.append(names[-1].removesuffix(".safetensors") + ".bak")
    for name in foreign:
        store.put(name, b"x")
        expected[name] = "foreign bad-name"
    return expected  # type: ignore[return-value]


def test_1000_chunks_of_which_50_are_damaged(store):
    cache = Cache.open(store, identity())
    names = fill_many(cache)
    assert len(names) == 1000
    sound = verify_store(store)
    assert (sound.checked, sound.findings) == (1000, [])

    tails = names[-PROMPTS:]
    expected = damage(store, cache, tails)
    assert len(expected) == 50
    report = verify_store(store)
    found = summary(report)
    assert found.keys() == expected.keys()
    assert {name: found[name] for name, reason in expected.items() if reason} == {
        n: r for n, r in expected.items() if r
    }
    assert report.notes == []  # nothing lies behind the last chunk of a prompt
    assert report.checked == 1001
    for finding in report.damage:
        assert finding.fix == f"tplayout verify {store.url} --quarantine --object {finding.name}"

    moves = quarantine(store, plan(report.findings, [Kind.FOREIGN]))
    assert {move.name for move in moves} == expected.keys()
    assert not [move for move in moves if move.left]
    homes = {move.to for move in moves if not move.to.startswith("tplayout-quarantine/")}
    assert homes == {name for name, reason in expected.items() if reason == "misnamed wrong-key"}  # swapped back
    assert all(store.exists([move.to for move in moves]))
    after = verify_store(store)
    assert (after.checked, after.findings) == (963, [])  # 37 of the 1,000 are gone


def test_quick_finds_what_sizes_headers_and_keys_tell(store):
    cache = Cache.open(store, identity())
    chunks = fill(cache, range(40))
    names = [name_of(cache, chunk) for chunk in chunks]
    layout = layout_of_group(cache)
    rewrite(store, names[0], flip(layout.cell_range(0, 0).start))
    rewrite(store, names[5], flip(LENGTH_BYTES + 30))
    rewrite(store, names[6], lambda data: bytes(data[:-1]))
    rewrite(store, names[7], lambda data: bytes(data) + b"x")
    swap(store, names[8], names[9])
    report = verify_store(store, deep=False)
    assert [finding.name for finding in report.damage if finding.name == names[0]] == []
    assert summary(report).keys() == {*names[5:10]}
    assert report.nbytes < 10 * layout.nbytes
    assert summary(verify_store(store)).keys() == {names[0], *names[5:10]}


def test_what_lies_behind_a_gap_is_told_and_is_no_damage(store):
    cache = Cache.open(store, identity())
    chunks = fill(cache, range(24))
    names = [name_of(cache, chunk) for chunk in chunks]
    store.delete([names[2]])
    report = verify_store(store)
    assert report.damage == []
    (note,) = report.notes
    assert (note.kind, set(note.objects)) == (Kind.UNREACHABLE, set(names[3:]))
    assert f"{chunks[2].key.hex()}, which is missing" in note.detail
    assert "--also unreachable" in note.fix

    rewrite(store, names[0], flip(layout_of_group(cache).cell_range(0, 0).start))
    report = verify_store(store)
    assert summary(report) == {names[0]: "damaged digest-mismatch"}
    assert [(len(note.objects), "is damaged" in note.detail) for note in report.notes] in (
        [(3, False), (1, True)],
        [(1, True), (3, False)],
    )
    moves = quarantine(store, plan(report.findings, [Kind.UNREACHABLE]))
    assert {move.name for move in moves} == {*names[:2], *names[3:]}
    assert verify_store(store).findings == []


def test_a_chunk_without_a_group_that_all_need_is_a_gap(store):
    windowed = identity(group(), group("window-4", "window", (2, 3), window=4))
    cache = Cache.open(store, windowed)
    chunks = fill(cache, range(20))
    store.delete([name_of(cache, chunks[1], 1)])  # a window may be missing
    assert verify_store(store).findings == []
    store.delete([name_of(cache, chunks[3], 0)])
    (note,) = verify_store(store).notes
    assert set(note.objects) == {
        name_of(cache, chunks[3], 1),
        name_of(cache, chunks[4], 0),
        name_of(cache, chunks[4], 1),
    }


def test_a_group_under_the_name_of_another_is_misnamed(store):
    cache = Cache.open(store, identity(group(), group("other", layers=(2, 3))))
    (chunk,) = fill(cache, range(4))
    swap(store, name_of(cache, chunk, 0), name_of(cache, chunk, 1))
    report = verify_store(store)
    assert {finding.home for finding in report.damage} == {name_of(cache, chunk, 0), name_of(cache, chunk, 1)}
    assert {finding.kind for finding in report.damage} == {Kind.MISNAMED}


def test_a_chunk_of_another_namespace_is_misnamed(store):
    ours, theirs = Cache.open(store, identity()), Cache.open(store, identity(weights="files:01"))
    (chunk,), (foreign,) = fill(ours, range(4)), fill(theirs, range(4))
    store.put(name_of(ours, chunk), store.get(name_of(theirs, foreign)))
    (finding,) = verify_store(store).findings
    assert (finding.kind, finding.home) == (Kind.MISNAMED, name_of(theirs, foreign))


@pytest.mark.parametrize(
    ("content", "kind"),
    [(None, "unidentified unidentified"), (b"", "damaged not-json"), (b"{}", "damaged wrong-version")],
)
def test_namespace_documents_are_checked(store, content, kind):
    cache = Cache.open(store, identity())
    fill(cache, range(8))
    document = f"{cache.namespace}/namespace.json"
    if content is None:
        store.delete([document])
    else:
        store.put(document, content)
    report = verify_store(store)
    assert summary(report) == {document: kind}
    assert (report.checked, report.skipped) == (0, 2)
    assert "2 objects could not be checked" in report.damage[0].detail
    if content is not None:
        quarantine(store, plan(report.findings))
        Cache.open(store, identity())
        assert verify_store(store).findings == []


def test_a_document_of_another_namespace_is_misnamed(store):
    ours, theirs = Cache.open(store, identity()), Cache.open(store, identity(weights="files:01"))
    store.put(f"{ours.namespace}/namespace.json", store.get(f"{theirs.namespace}/namespace.json"))
    assert summary(verify_store(store)) == {f"{ours.namespace}/namespace.json": "misnamed wrong-namespace"}


def test_foreign_files_that_no_key_can_name_are_found_and_left_to_people(store):
    cache = Cache.open(store, identity())
    fill(cache, range(4))
    odd = file_of(store.url, f"{cache.namespace}/two words \udcff.txt")
    odd.write_bytes(b"1")
    link = file_of(store.url, "link")
    link.symlink_to(odd)
    report = verify_store(store)
    found = {finding.name: finding for finding in report.damage}
    assert found.keys() == {f"{cache.namespace}/two words \ufffd.txt", "link"}
    assert found["link"].fix == f"rm -- {link}"
    assert plan(report.findings, ON_REQUEST) == []


def test_orphan_temporaries_are_told_and_removed_on_request(store):
    cache = Cache.open(store, identity())
    (chunk,) = fill(cache, range(4))
    name = name_of(cache, chunk)
    directory, _, last = name.rpartition("/")
    old, new = (file_of(store.url, f"{directory}/.{last}.{pid}.{'0' * 16}.tmp") for pid in (1, 2))
    for file in (old, new):
        file.write_bytes(b"half")
    os.utime(old, (time.time() - 7200,) * 2)
    report = verify_store(store)
    (finding,) = report.findings
    assert (finding.kind, finding.is_damage, finding.name) == (Kind.TEMPORARY, False, f"{directory}/{old.name}")
    assert verify_store(store, namespace=cache.namespace).findings == report.findings
    quarantine(store, plan(report.findings, [Kind.TEMPORARY]))
    assert (old.exists(), new.exists()) == (False, True)


def test_only_what_is_named_is_checked(store):
    cache = Cache.open(store, identity())
    chunks = fill(cache, range(16))
    store.put("foreign", b"")
    report = verify_store(store, only=[name_of(cache, chunks[1])])
    assert (report.checked, report.findings) == (1, [])
    with pytest.raises(ConfigError, match="no such object"):
        verify_store(store, only=["nothing"])


def test_one_namespace_by_its_first_digits(store):
    ours, theirs = Cache.open(store, identity()), Cache.open(store, identity(weights="files:01"))
    fill(ours, range(8))
    fill(theirs, range(16))
    assert verify_store(store, namespace=theirs.namespace[:8]).checked == 4


def test_keyed_namespaces_need_the_secret(store):
    secret = b"0123456789abcdef"
    cache = Cache.open(store, identity(), secret=secret)
    fill(cache, range(8))
    with pytest.raises(ConfigError, match="--secret-key-file"):
        verify_store(store)
    with pytest.raises(ConfigError, match="--secret-key-file"):
        verify_store(store, secrets=Secrets(secret * 2))
    assert verify_store(store, deep=False).findings == []
    assert verify_store(store, secrets=Secrets(secret)).findings == []


def test_with_a_secret_what_was_written_without_one_is_not_sound(store):
    """Digests that need no secret can be forged; servers with a secret refuse such a namespace too."""
    secret = b"0123456789abcdef"
    keyed = Cache.open(store, identity(weights="files:11"), secret=secret)
    fill(keyed, range(8))
    plain = Cache.open(store, identity())
    fill(plain, range(8))
    (found,) = verify_store(store, secrets=Secrets(secret)).damage
    assert (found.kind, found.reason, found.name) == (
        Kind.UNAUTHENTICATED,
        Reason.WRONG_SECRET,
        f"{plain.namespace}/namespace.json",
    )
    assert "not authenticated: written without a secret, so that its 2 objects may be forged" in found.detail
    assert found.fix == f"tplayout cp {store.url} NEW-URL --secret-key-file FILE"
    for kinds in ([], ON_REQUEST):
        assert plan([found], kinds) == []  # what is sound is not moved
    assert verify_store(store, secrets=Secrets(secret), namespace=keyed.namespace).damage == []


def test_the_rate_is_limited(store):
    cache = Cache.open(store, identity())
    fill(cache, range(4 * 8))
    nbytes = layout_of_group(cache).nbytes
    start = time.monotonic()
    assert verify_store(store, max_rate=nbytes * 20, jobs=4).nbytes == 8 * nbytes
    assert 0.3 < time.monotonic() - start < 10


def test_an_object_that_vanishes_is_no_damage(store):
    cache = Cache.open(store, identity())
    names = [name_of(cache, chunk) for chunk in fill(cache, range(8))]
    get_into = store.get_into

    def vanish(key, buf, **options):
        store.delete([max(names)])
        return get_into(key, buf, **options)

    store.get_into = vanish
    report = verify_store(store, jobs=1)
    assert report.damage == []
    assert Counter(finding.kind for finding in report.findings).keys() <= {Kind.UNREACHABLE}


def packed_cache(store: Store) -> Cache:
    return Cache.open(store, identity(), codec="shuffle-zstd")


def test_a_packed_store_is_sound(store):
    fill(packed_cache(store), range(40))
    for deep in (True, False):
        report = verify_store(store, deep=deep)
        assert (report.checked, report.findings) == (10, [])


@pytest.mark.parametrize("deep", [True, False])
def test_damage_in_packed_objects_is_named(store, deep):
    """Deep checks see every byte; quick ones header, tables, size and key."""
    cache = packed_cache(store)
    names = [name_of(cache, fill(cache, [prompt, 1, 2, 3])[0]) for prompt in range(12)]
    layout = layout_of_group(cache)
    packed = packed_layout(layout)
    changes = {
        flip(len(store.get(names[0])) - 1): "damaged digest-mismatch" if deep else None,
        flip(packed.ids_start, 2): "damaged digest-mismatch" if deep else "misnamed wrong-key",
        flip(packed.data_start): "damaged digest-mismatch" if deep else None,
        flip(packed.lengths_range(0).start + 3, 7): "damaged bad-lengths",
        flip(packed.data_start - 1): "damaged not-json",
        (lambda data: bytes(data[:-1])): "truncated truncated",
        (lambda data: bytes(data[: packed.ids_start])): "truncated truncated",
        (lambda data: b""): "truncated truncated",
        (lambda data: bytes(data) + b"\0"): "damaged trailing",
        (lambda data: bytes(data) + bytes(100_000)): "damaged trailing",
        (lambda data: bytes(plain_of(store, cache, data))): "damaged wrong-codec" if deep else "misnamed wrong-codec",
    }
    expected = {}
    for name, (change, found) in zip(names, changes.items(), strict=False):
        rewrite(store, name, change)
        if found:
            expected[name] = found
    assert summary(verify_store(store, deep=deep)) == expected


def plain_of(store: Store, cache: Cache, data: bytearray) -> memoryview:
    return make_codec("shuffle-zstd", None).unpack(data, layout_of_group(cache), b"")


def test_packed_objects_under_wrong_names_go_home(store):
    """Of one namespace or another, whatever the codecs of both."""
    cache, plain = packed_cache(store), Cache.open(store, identity(weights="files:01"))
    names = [name_of(cache, chunk) for chunk in fill(cache, range(12))]
    (other,) = [name_of(plain, chunk) for chunk in fill(plain, [7, 8, 9, 10])]
    before = {name: store.get(name) for name in [*names, other]}
    swap(store, names[0], names[1])
    swap(store, names[2], other)
    report = verify_store(store)
    assert {finding.name: finding.home for finding in report.damage} == {
        names[0]: names[1],
        names[1]: names[0],
        names[2]: other,
        other: names[2],
    }
    quarantine(store, plan(report.findings))
    assert verify_store(store).damage == []
    assert {name: store.get(name) for name in before} == before


def test_a_packed_store_without_the_library(store, monkeypatch):
    fill(packed_cache(store), range(8))
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match="zstd"):
        verify_store(store)
    assert verify_store(store, deep=False).damage == []
