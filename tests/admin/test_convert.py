"""Per-rank shards of any TP and PP to a namespace and back, byte for byte."""

import json
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tplayout.admin import convert, shards
from tplayout.admin.convert import chunks_of, export_shards, import_shards, stages_of
from tplayout.admin.namespaces import open_namespace
from tplayout.admin.shard_files import Rank, ShardHeader, shard_head
from tplayout.admin.shards import ShardSet, find_shard_sets
from tplayout.admin.work import Work
from tplayout.errors import ConfigError, FormatError, GeometryError, NamespaceMismatch, NotFound, Reason
from tplayout.format.geometry import Part
from tplayout.format.keys import EXTRA_SALT, object_name, prefix_extras

WHOLE = [range(3)]


@pytest.fixture
def filled(kit, store):
    """A namespace with one prefix of five chunks, and its KV."""
    return kit.fill(store, kit.identity())


def only(directory: Path) -> Path:
    (place,) = find_shard_sets(directory)
    return place


def expected(whole, group, heads: slice, layer: int, part: int) -> bytes:
    """What slicing the full tensors gives: [token, head, dim]."""
    return whole.arrays[0][heads, layer, part].transpose(1, 0, 2).tobytes()


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_shards_are_slices_of_the_full_tensors(filled, kit, tmp_path, tp):
    namespace, whole = filled
    export_shards(namespace, tmp_path / "out", tp, WHOLE)
    place = only(tmp_path / "out")
    assert len(list(place.iterdir())) == tp
    for rank in range(tp):
        tensors = load_file(place / f"tp-{rank}-of-{tp}.pp-0-of-1.safetensors")
        assert list(tensors["tokens"]) == kit.TOKENS
        heads = slice(rank * 4 // tp, max(rank * 4 // tp + 1, (rank + 1) * 4 // tp))
        for layer in range(3):
            for number, part in enumerate(("k", "v")):
                got = tensors[f"layers.{layer}.{part}"]
                assert got.shape == (20, heads.stop - heads.start, 8)
                assert got.tobytes() == expected(whole, 0, heads, layer, number)


def test_a_tp_size_that_does_not_divide_is_refused_by_name(filled, tmp_path):
    with pytest.raises(GeometryError, match="TP size 3 cannot split 4 KV heads"):
        export_shards(filled[0], tmp_path / "out", 3, WHOLE)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("other", [1, 2, 8])
@pytest.mark.parametrize("stages", [WHOLE, [range(2), range(2, 3)]], ids=["pp1", "pp2"])
def test_there_and_back_returns_the_original_bytes(filled, kit, make_store, tmp_path, other, stages):
    namespace, _ = filled
    export_shards(namespace, tmp_path / "four", 4, WHOLE)
    first, second = make_store("first"), make_store("second")
    report = import_shards(find_shard_sets(tmp_path / "four"), first)
    assert kit.content(first) == kit.content(namespace.store)
    assert (report.prefixes, report.tally.written, report.rest) == (1, 5, 0)
    export_shards(open_namespace(first, namespace.name), tmp_path / "other", other, stages)
    import_shards(find_shard_sets(tmp_path / "other"), second)
    export_shards(open_namespace(second, namespace.name), tmp_path / "again", 4, WHOLE)
    assert kit.tree(tmp_path / "again") == kit.tree(tmp_path / "four")


def test_only_the_first_replica_counts(filled, kit, make_store, tmp_path):
    export_shards(filled[0], tmp_path / "out", 8, WHOLE)
    second = only(tmp_path / "out") / "tp-1-of-8.pp-0-of-1.safetensors"
    data = bytearray(second.read_bytes())
    data[-1] ^= 1  # replicas differ in their last bits
    second.write_bytes(data)
    import_shards(find_shard_sets(tmp_path / "out"), make_store("back"))
    assert kit.content(make_store("back")) == kit.content(filled[0].store)


def test_windows_latents_and_states(kit, store, make_store, tmp_path):
    """Unequal parts, one row a chunk, and window parts that are gone."""
    groups = (
        kit.group(layers=(0, 4)),
        kit.group("window-5", "window", layers=(1,), window=5),
        kit.group("latent", "latent", layers=(2,), heads=1, parts=(Part("latent", 6), Part("rope", 2))),
    )
    namespace, _ = kit.fill(store, kit.identity(*groups))
    chunks = chunks_of(convert.build_index(namespace), next(convert.build_index(namespace).prefixes()))
    store.delete([object_name(namespace.name, chunk.key, 1) for chunk in chunks[:3]])
    for tp in (2, 4):
        export_shards(namespace, tmp_path / f"{tp}", tp, [range(3), range(3, 5)])
        report = import_shards(find_shard_sets(tmp_path / f"{tp}"), make_store(f"back{tp}"))
        assert kit.content(make_store(f"back{tp}")) == kit.content(store)
        assert report.tally.absent == 3


def test_several_prefixes_with_extras(kit, store, make_store, tmp_path):
    identity = kit.identity()
    salted = prefix_extras(4, salt="tenant")(0)
    kit.fill(store, identity)
    namespace, _ = kit.fill(store, identity, [*kit.TOKENS[:8], 1, 2, 3, 4])  # shares two chunks
    kit.fill(store, identity, extras=salted, seed=7)
    report = export_shards(namespace, tmp_path / "out", 2, WHOLE)
    assert (report.prefixes, report.files_written) == (3, 6)
    import_shards(find_shard_sets(tmp_path / "out"), make_store("back"))
    assert kit.content(make_store("back")) == kit.content(store)
    assert salted[0][0] == EXTRA_SALT


def test_a_rerun_does_only_what_is_missing(filled, kit, make_store, tmp_path):
    namespace, _ = filled
    export_shards(namespace, tmp_path / "out", 2, WHOLE)
    before = kit.tree(tmp_path / "out")
    place = only(tmp_path / "out")
    (place / "tp-1-of-2.pp-0-of-1.safetensors").unlink()
    report = export_shards(namespace, tmp_path / "out", 2, WHOLE)
    assert (report.files_written, report.files_present) == (1, 1)
    assert kit.tree(tmp_path / "out") == before
    back = make_store("back")
    import_shards([place], back)
    back.delete([next(key for key in kit.content(back) if "namespace" not in key)])
    tally = import_shards([place], back).tally
    assert (tally.written, tally.present) == (1, 4)
    assert kit.content(back) == kit.content(namespace.store)


def test_dry_runs_write_nothing(filled, make_store, tmp_path):
    assert export_shards(filled[0], tmp_path / "out", 2, WHOLE, work=Work(dry_run=True)).files_written == 2
    assert not (tmp_path / "out").exists()
    export_shards(filled[0], tmp_path / "out", 2, WHOLE)
    report = import_shards(find_shard_sets(tmp_path / "out"), make_store("back"), work=Work(dry_run=True))
    assert report.tally.written == 5
    assert not list(make_store("back").list())


def test_a_damaged_object_spoils_its_prefix_only(filled, kit, store, tmp_path):
    namespace, _ = filled
    kit.fill(store, namespace.identity, [5] * 8, seed=3)
    name = next(key for key in kit.content(store) if key.endswith(".0.safetensors"))
    data = bytearray(store.get(name))
    data[-5000] ^= 1
    store.put(name, data)
    report = export_shards(namespace, tmp_path / "out", 2, WHOLE)
    assert not report.complete
    assert list(report.tally.damaged) == [name]
    assert (report.files_written, len(report.skipped)) == (2, 1)
    assert not [path for path in (tmp_path / "out").rglob("*") if path.name.startswith(".")]


def test_foreign_files_made_with_the_safetensors_library(kit, make_store, tmp_path):
    """Any program can write them; an identity may come from elsewhere, and a rest of a chunk is left out."""
    identity = kit.identity()
    values = np.random.default_rng(1).standard_normal((10, 4, 8)).astype("f2")
    tensors = {"tokens": np.arange(10, dtype="i4")}
    tensors |= {f"layers.{layer}.{part}": values + layer for layer in range(3) for part in "kv"}
    metadata = {"tplayout_shard": "1", "geometry": json.dumps(identity.geometry.to_json()), "layers": "[0, 1, 2]"}
    metadata |= {"tp_rank": "0", "tp_size": "1", "pp_rank": "0", "pp_size": "1"}
    save_file(tensors, tmp_path / "rank.safetensors", metadata)
    with pytest.raises(ConfigError, match="--model"):
        import_shards([tmp_path], make_store("back"))
    with pytest.raises(NamespaceMismatch, match="geometry"):
        import_shards([tmp_path], make_store("back"), kit.identity(chunk_tokens=8))
    report = import_shards([tmp_path], make_store("back"), identity, model="m")
    assert (report.tally.written, report.rest) == (2, 2)
    chunk = open_namespace(make_store("back"), identity.namespace)
    index = convert.build_index(chunk)
    (key, *_) = next(index.prefixes())
    bits = np.frombuffer(chunk.read(key, 0), "u1")
    assert values[:4, 0].tobytes() in bits.tobytes()


def test_sets_that_do_not_fit_together_are_refused_by_name(filled, kit, store, tmp_path):
    namespace, _ = filled
    export_shards(namespace, tmp_path / "out", 4, WHOLE)
    place = only(tmp_path / "out")
    lost = place / "tp-2-of-4.pp-0-of-1.safetensors"
    data = lost.read_bytes()
    lost.unlink()
    with pytest.raises(GeometryError, match="TP rank 2, PP rank 0 is missing"):
        ShardSet(place)
    (place / "copy.safetensors").write_bytes((place / "tp-1-of-4.pp-0-of-1.safetensors").read_bytes())
    with pytest.raises(GeometryError, match="TP rank 1, PP rank 0 is there twice"):
        ShardSet(place)
    (place / "copy.safetensors").unlink()
    at = header_bytes_length(data)
    lost.write_bytes(data[:at] + b"\1" + data[at + 1 :])  # a token of another prompt
    with pytest.raises(GeometryError, match="other tokens"):
        ShardSet(place)
    lost.write_bytes(data[:-1])
    with pytest.raises(FormatError, match="truncated") as caught:
        ShardSet(place)
    assert caught.value.reason is Reason.TRUNCATED
    with pytest.raises(NotFound):
        ShardSet(tmp_path)


def header_bytes_length(data: bytes) -> int:
    return 8 + int.from_bytes(data[:8], "little")


def test_tensors_must_be_what_the_metadata_says(kit, tmp_path):
    identity = kit.identity()
    header = ShardHeader(Rank(0, 1, 0, 1, (0, 1, 2)), identity.geometry, 4, identity, "", {}, False)
    head = shard_head(header)
    for old, new, reason in (
        (b'"layers.0.k":{"dtype":"F16"', b'"layers.0.k":{"dtype":"I16"', Reason.BAD_DTYPE),
        (b'"layers.0.k"', b'"layers.9.k"', Reason.BAD_TENSOR),
        (b'"tp_size":"1"', b'"tp_size":"x"', Reason.BAD_METADATA),
        (b'"shape":[4,4,8]', b'"shape":[4,8,4]', Reason.BAD_SHAPE),
        (b'"tplayout_shard":"1"', b'"tplayout_shard":"2"', Reason.WRONG_VERSION),
    ):
        assert old in head.header
        (tmp_path / "a.safetensors").write_bytes(head.header.replace(old, new, 1).ljust(head.nbytes, b"\0"))
        with pytest.raises(FormatError) as caught:
            ShardSet(tmp_path)
        assert caught.value.reason is reason
        assert "a.safetensors" in str(caught.value)


def test_pipeline_stages_are_those_of_the_engine(kit):
    geometry = kit.identity().geometry
    assert stages_of(geometry, 2) == [range(2), range(2, 3)]
    assert stages_of(geometry, 2, [1, 2]) == [range(1), range(1, 3)]
    with pytest.raises(GeometryError):
        stages_of(geometry, 2, [1, 1])


def test_what_is_no_shard_file_is_not_one(tmp_path):
    save_file({"weight": np.zeros(2)}, tmp_path / "model.safetensors")
    (tmp_path / "x.safetensors").write_bytes(b"no")
    assert find_shard_sets(tmp_path) == []
    assert not shards.is_shard_file(tmp_path / "gone.safetensors")
