"""Memory of conversions and copies stays under four chunks, however many there are."""

import tracemalloc
from collections.abc import Callable

import numpy as np
import pytest

from tplayout.admin.bundle import export_prefixes, import_bundle
from tplayout.admin.chains import build_index
from tplayout.admin.convert import export_shards, import_shards
from tplayout.admin.copy import copy_namespace, recode
from tplayout.admin.namespaces import begin_namespace
from tplayout.admin.rechunk import changed_identity, rechunk
from tplayout.admin.shards import find_shard_sets
from tplayout.admin.transfer import store_prefix
from tplayout.format.geometry import Part
from tplayout.format.keys import chain

TOKENS = list(range(64 * 12))


class Cheap:
    def fill(self, group, tokens, out):
        out[...] = tokens.start
        return True


@pytest.fixture
def origin(kit, store):
    """Twelve chunks of 4 MiB."""
    group = kit.group(heads=8, layers=tuple(range(16)), parts=(Part("k", 128), Part("v", 128)))
    target = begin_namespace(store, kit.identity(group, chunk_tokens=64), "")
    store_prefix(Cheap(), chain(target.digest, TOKENS, 64), target)
    return target


def peak(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_peaks(origin, make_store, tmp_path):
    np.zeros(1)
    limit = 4 * origin.layout(0).nbytes
    index = build_index(origin)
    works = {
        "to shards": lambda: export_shards(origin, tmp_path / "shards", 4, [range(16)]),
        "from shards": lambda: import_shards(find_shard_sets(tmp_path / "shards"), make_store("a")),
        "smaller chunks": lambda: rechunk(origin, make_store("b"), changed_identity(origin.identity, 16)),
        "another dtype": lambda: rechunk(
            origin, make_store("d"), changed_identity(origin.identity, None, "BF16"), lossy=True
        ),
        "copy": lambda: copy_namespace(origin, make_store("e")),
        "export": lambda: export_prefixes(index, None, tmp_path / "bundle"),
        "import": lambda: import_bundle(tmp_path / "bundle", make_store("f")),
    }
    peaks = {name: peak(work) for name, work in works.items()}
    assert {name: bytes for name, bytes in peaks.items() if bytes >= limit} == {}
    larger = peak(lambda: rechunk(origin, make_store("c"), changed_identity(origin.identity, 256)))
    assert larger < 4 * 4 * origin.layout(0).nbytes  # of the larger chunks


class Noise:
    def fill(self, group, tokens, out):
        out[...] = np.random.default_rng(tokens.start).integers(0, 2**16, out.shape, "u2")
        return True


def test_peaks_of_packed_objects_that_do_not_get_smaller(kit, store, make_store, tmp_path):
    group = kit.group(heads=8, layers=tuple(range(16)), parts=(Part("k", 128), Part("v", 128)))
    origin = begin_namespace(store, kit.identity(group, chunk_tokens=64), "", codec="shuffle-zstd")
    store_prefix(Noise(), chain(origin.digest, TOKENS[: 64 * 5], 64), origin)
    index = build_index(origin)
    works = {
        "plain": lambda: recode(origin, make_store("a"), "none"),
        "packed": lambda: recode(origin, make_store("b"), "shuffle-zstd"),
        "other chunks": lambda: rechunk(origin, make_store("c"), changed_identity(origin.identity, 65)),
        "to shards": lambda: export_shards(origin, tmp_path / "shards", 4, [range(16)]),
        "export": lambda: export_prefixes(index, None, tmp_path / "bundle"),
        "import": lambda: import_bundle(tmp_path / "bundle", make_store("d")),
    }
    peaks = {name: peak(work) / origin.layout(0).nbytes for name, work in works.items()}
    assert {name: chunks for name, chunks in peaks.items() if chunks >= 4} == {}
    assert peaks["other chunks"] < 3.5  # the object that is read, the one that is made, and that one packed
