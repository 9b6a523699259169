"""A prompt's KV as transformers takes it, and back."""

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tplayout.admin.namespaces import open_namespace
from tplayout.admin.peers import import_transformers, store_to_transformers
from tplayout.admin.transformers_file import TransformersFile
from tplayout.admin.work import Work
from tplayout.errors import FormatError, GeometryError, NotFound
from tplayout.format.geometry import Part


@pytest.fixture
def filled(kit, store):
    return kit.fill(
        store, kit.identity(kit.group(layers=(0, 2)), kit.group("window-5", "window", layers=(1,), window=5))
    )


def test_there_and_back(filled, kit, make_store, tmp_path):
    namespace, whole = filled
    report = store_to_transformers(namespace, [*kit.TOKENS, 1, 2], tmp_path / "f.safetensors", work=Work(jobs=2))
    assert (report.files_written, report.complete) == (1, True)
    tensors = load_file(tmp_path / "f.safetensors")
    assert tensors["input_ids"].tolist() == [kit.TOKENS]
    for group, layer, position in ((0, 0, 0), (1, 1, 0), (0, 2, 1)):
        for part, name in enumerate(("key_cache", "value_cache")):
            assert tensors[f"{name}.{layer}"].shape == (1, 4, 20, 8)
            assert tensors[f"{name}.{layer}"].tobytes() == whole.arrays[group][:, position, part].tobytes()
    import_transformers(tmp_path / "f.safetensors", make_store("back"))
    assert kit.content(make_store("back")) == kit.content(namespace.store)


def test_transformers_itself_takes_it(filled, kit, tmp_path):
    import torch
    from safetensors.torch import load_file as load_torch
    from transformers.cache_utils import DynamicCache

    store_to_transformers(filled[0], kit.TOKENS, tmp_path / "f.safetensors")
    tensors = load_torch(tmp_path / "f.safetensors")
    cache = DynamicCache()
    for layer in range(3):
        cache.update(tensors[f"key_cache.{layer}"], tensors[f"value_cache.{layer}"], layer)
    assert cache.get_seq_length() == 20
    assert torch.equal(cache.layers[1].keys, tensors["key_cache.1"])


def test_files_that_others_wrote(kit, make_store, tmp_path):
    identity = kit.identity(kit.group(layers=(0,)))
    values = np.random.default_rng(0).standard_normal((2, 1, 4, 10, 8)).astype("f2")
    tensors = {"input_ids": np.arange(10)[None], "key_cache.0": values[0], "value_cache.0": values[1]}
    save_file(tensors, tmp_path / "f")
    with pytest.raises(FormatError, match="--model"):
        import_transformers(tmp_path / "f", make_store("s"))
    report = import_transformers(tmp_path / "f", make_store("s"), identity)
    assert (report.tally.written, report.rest) == (2, 2)
    assert open_namespace(make_store("s"), identity.namespace)
    for wrong in (
        {"key_cache.0": values[0, :, :2]},
        {"value_cache.0": values[1].astype("f4")},
        {"input_ids": np.arange(10)},
    ):
        save_file({**tensors, **wrong}, tmp_path / "w")
        with pytest.raises(FormatError, match=next(iter(wrong))):
            TransformersFile(tmp_path / "w", identity)
    del tensors["value_cache.0"]
    save_file(tensors, tmp_path / "w")
    with pytest.raises(FormatError, match="missing"):
        TransformersFile(tmp_path / "w", identity)


def test_what_such_a_file_cannot_hold_is_refused(kit, store, tmp_path):
    latent = kit.group("latent", "latent", heads=1, parts=(Part("latent", 6), Part("rope", 2)))
    namespace, _ = kit.fill(store, kit.identity(latent))
    with pytest.raises(GeometryError, match="latent"):
        store_to_transformers(namespace, kit.TOKENS, tmp_path / "f")
    scaled = kit.group(dtype="F8_E4M3", scales=((0.5, 0.5),) * 3)
    with pytest.raises(GeometryError, match="scales"):
        store_to_transformers(kit.fill(store, kit.identity(scaled))[0], kit.TOKENS, tmp_path / "f")


def test_damage_and_misses_leave_no_file(filled, kit, tmp_path):
    namespace, _ = filled
    with pytest.raises(NotFound):
        store_to_transformers(namespace, [1] * 8, tmp_path / "f")
    assert store_to_transformers(namespace, kit.TOKENS, tmp_path / "f", work=Work(dry_run=True)).files_written == 1
    name = sorted(kit.content(namespace.store))[0]
    data = bytearray(namespace.store.get(name))
    data[-5000] ^= 1
    namespace.store.put(name, data)
    assert not store_to_transformers(namespace, kit.TOKENS, tmp_path / "f").complete
    namespace.store.delete([name for name in kit.content(namespace.store) if ".1." in name][:1])
    assert not store_to_transformers(namespace, kit.TOKENS, tmp_path / "f").complete
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
