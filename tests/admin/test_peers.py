"""Other caches' prompts into a store, out of it, and from one TP size to another."""

from dataclasses import replace

import numpy as np
import pytest

from tests.admin.peer_kit import GROUP, IDENTITY, PEERS, PROMPT, filled, values
from tplayout.admin.chains import build_index
from tplayout.admin.convert import chunks_of
from tplayout.admin.example_connector import read_prompt as read_example
from tplayout.admin.lmcache_files import read_prompt as read_lmcache
from tplayout.admin.namespaces import open_namespace
from tplayout.admin.peers import import_prompt, store_to_tier, tier_to_tier
from tplayout.admin.transfer import read_prefix
from tplayout.admin.vllm_tier import find_tiers, open_tier, read_prompt, rows_of, tier_for_tp
from tplayout.admin.work import Work
from tplayout.errors import ConfigError
from tplayout.format.geometry import Geometry


def tier(name, place=PEERS):
    (config,) = find_tiers(place / name)
    return open_tier(config)


def source(name, tp=None, order=None):
    return read_prompt(tier(name), rows_of(tier(name), GROUP, tp, order), PROMPT)


def stored(store):
    """All KV of the only prefix."""
    namespace = open_namespace(store, IDENTITY.namespace)
    index = build_index(namespace)
    (path,) = index.prefixes()
    got = np.zeros_like(values())

    class Collect:
        def take(self, group, tokens, bits):
            got[..., tokens.start : tokens.stop, :] = bits

    read_prefix(namespace, chunks_of(index, path), Collect())
    return got


def all_sources():
    return {
        "tier-tp1": source("tier-tp1", None, "hnd"),
        "tier-tp2": source("tier-tp2", None, "hnd"),
        "tier-tp2-agnostic": source("tier-tp2-agnostic", 2, "nhd"),
        "tier-canonical-hnd": source("tier-canonical-hnd"),
        "tier-canonical-nhd": source("tier-canonical-nhd"),
        "example-gpu": read_example(PEERS / "example-gpu", GROUP, PROMPT, 8, "gpu"),
        "lmcache-cpu-tp1": read_lmcache(PEERS / "lmcache-cpu-tp1", GROUP, PROMPT, 8, "cpu", 16),
        "lmcache-gpu-tp2": read_lmcache(PEERS / "lmcache-gpu-tp2", GROUP, PROMPT, 8, "gpu", 16),
        "example-cpu": read_example(PEERS / "example-cpu", GROUP, PROMPT, 8, "cpu"),
    }


@pytest.mark.parametrize("name", list(all_sources()))
def test_a_prompt_arrives_whole(name, kit, store, make_store):
    report = import_prompt(all_sources()[name], PROMPT, IDENTITY, store, "it", model="m")
    assert (report.tally.written, report.rest) == (2, 0)
    assert np.array_equal(stored(store), values())
    import_prompt(all_sources()["tier-tp1"], PROMPT, IDENTITY, make_store("other"), "it", model="m")
    assert kit.content(store) == kit.content(make_store("other"))  # whatever it came from
    assert import_prompt(all_sources()[name], PROMPT, IDENTITY, store, "it").tally.present == 2


def test_wrong_statements_write_nothing(store):
    wrong = source("tier-tp2-agnostic", 1, "nhd")
    with pytest.raises(ConfigError, match="do not fit TP size 1"):
        import_prompt(wrong, PROMPT, IDENTITY, store, "TP size 1")
    assert not list(store.list())
    assert import_prompt(wrong, PROMPT, IDENTITY, store, "TP size 1", unchecked=True, work=Work(dry_run=True)).complete


def test_chunks_of_any_size(store):
    identity = replace(IDENTITY, geometry=Geometry(12, (GROUP,)))
    report = import_prompt(source("tier-tp2", None, "hnd"), PROMPT, identity, store, "it")
    assert (report.tally.written, report.rest) == (2, 8)


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_from_one_tp_size_to_another(tmp_path, tp):
    origin = tier("tier-tp2")
    target = tier_for_tp(origin, tmp_path, tp)
    rows = rows_of(target, GROUP, tp, "hnd")
    hashes = target.hashes(PROMPT, "sha256", None)
    report = tier_to_tier(source("tier-tp2", None, "hnd"), PROMPT, target, rows, hashes, "it")
    assert report.files_written == 2
    assert np.array_equal(filled(read_prompt(open_tier(find_tiers(tmp_path)[0]), rows, PROMPT), range(32)), values())
    if tp == 2:
        theirs = {p.relative_to(PEERS / "tier-tp2"): p.read_bytes() for p in (PEERS / "tier-tp2").rglob("*.*")}
        assert theirs == {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*.*")}


@pytest.mark.parametrize("name", ["tier-canonical-hnd", "tier-canonical-nhd", "tier-tp1", "tier-tp2"])
def test_out_of_a_store_as_vllm_writes_it(name, store, tmp_path):
    order = None if "canonical" in name else "hnd"
    import_prompt(source(name, None, order), PROMPT, IDENTITY, store, "it")
    target = replace(tier(name), root=tmp_path)
    rows = rows_of(target, GROUP, None, order)
    hashes = target.hashes(PROMPT, "sha256", None)
    origin = open_namespace(store, IDENTITY.namespace)
    looked = store_to_tier(origin, PROMPT, target, rows, hashes, work=Work(dry_run=True))
    assert looked.files_written == 32 // target.file_tokens
    assert not list(tmp_path.rglob("*.bin"))
    report = store_to_tier(origin, PROMPT, target, rows, hashes)
    assert report.files_written == 32 // target.file_tokens
    theirs = {p.relative_to(PEERS / name): p.read_bytes() for p in (PEERS / name).rglob("*.bin")}
    assert theirs == {p.relative_to(tmp_path): p.read_bytes() for p in tmp_path.rglob("*.bin")}


def test_chunks_that_hold_no_whole_files(store, tmp_path):
    identity = replace(IDENTITY, geometry=Geometry(12, (GROUP,)))
    import_prompt(source("tier-tp1", None, "hnd"), PROMPT, identity, store, "it")
    target = replace(tier("tier-tp1"), root=tmp_path)
    origin = open_namespace(store, identity.namespace)
    with pytest.raises(ConfigError, match="--chunk-tokens"):
        store_to_tier(origin, PROMPT, target, rows_of(target, GROUP, None, "hnd"), [])
