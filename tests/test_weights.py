"""Fingerprints of weights: every change is seen, nothing else is, and no 140 GB are read."""

import json
import os
import shutil
import time
import zipfile
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from tplayout.errors import ConfigError
from tplayout.weights import describe_weights, weights_fingerprint

SHAPES = {"embed": (256, 64), "layer.0": (512, 300), "layer.1": (512, 300), "norm": (64,), "scalar": ()}


def tensors(seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    return {name: np.asarray(generator.standard_normal(shape), dtype=np.float32) for name, shape in SHAPES.items()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    directory = tmp_path / "model"
    directory.mkdir()
    save_file(tensors(), directory / "model.safetensors")
    return directory


def test_form(model):
    fingerprint = weights_fingerprint(model)
    assert fingerprint.startswith("files:")
    assert len(bytes.fromhex(fingerprint.removeprefix("files:"))) == 32


@pytest.mark.parametrize("name", SHAPES)
def test_any_changed_tensor_is_seen(model, name):
    before = weights_fingerprint(model)
    changed = tensors()
    changed[name] = np.asarray(changed[name] + 1)
    save_file(changed, model / "model.safetensors")
    assert weights_fingerprint(model) != before


@pytest.mark.parametrize("name", ["embed", "layer.0"])
@pytest.mark.parametrize("end", ["first", "last"])
def test_changed_rows_at_either_end_of_a_tensor_are_seen(model, name, end):
    before = weights_fingerprint(model)
    changed = tensors()
    changed[name][0 if end == "first" else -1] += 1
    save_file(changed, model / "model.safetensors")
    assert weights_fingerprint(model) != before


def test_two_tensors_that_changed_places_are_seen(model):
    before = weights_fingerprint(model)
    changed = tensors()
    changed["layer.0"], changed["layer.1"] = changed["layer.1"], changed["layer.0"]
    save_file(changed, model / "model.safetensors")
    assert weights_fingerprint(model) != before


def test_copy_rename_and_touch_do_not_matter(model, tmp_path):
    before = weights_fingerprint(model)
    os.utime(model / "model.safetensors", (1, 1))
    copy = Path(shutil.copytree(model, tmp_path / "elsewhere" / "another name"))
    (copy / "model.safetensors").chmod(0o400)
    assert weights_fingerprint(copy) == before


def test_links_are_followed(model, tmp_path):
    """A hub's cache holds blobs, and directories of links to them."""
    before = weights_fingerprint(model)
    (model / "model.safetensors").rename(tmp_path / "blob")
    (model / "model.safetensors").symlink_to(tmp_path / "blob")
    assert weights_fingerprint(model) == before


@pytest.mark.parametrize(
    "name",
    [
        "README.md",
        "config.json",
        "tokenizer.json",
        "pytorch_model.bin",
        "model.gguf",
        "optimizer.bin",
        ".cache.safetensors",
        "original/consolidated.00.pth",
        "onnx/model.safetensors",
    ],
)
def test_files_that_are_not_loaded_do_not_matter(model, name):
    before = weights_fingerprint(model)
    (model / name).parent.mkdir(exist_ok=True)
    (model / name).write_bytes(b"anything")
    assert weights_fingerprint(model) == before


@pytest.mark.parametrize("name", ["quantize_config.json", "quant_config.json", "hf_quant_config.json"])
def test_how_weights_are_quantised_matters(model, name):
    before = weights_fingerprint(model)
    (model / name).write_text('{"bits": 4}')
    four = weights_fingerprint(model)
    (model / name).write_text('{"bits": 8}')
    assert len({before, four, weights_fingerprint(model)}) == 3


def shards(directory: Path, order: list[int]) -> None:
    directory.mkdir()
    for number in order:
        save_file({f"t{number}": np.full(5000, number, np.float32)}, directory / f"model-{number}.safetensors")


def test_order_of_the_listing_does_not_matter(tmp_path):
    shards(tmp_path / "a", [1, 2, 3])
    shards(tmp_path / "b", [3, 1, 2])
    assert weights_fingerprint(tmp_path / "a") == weights_fingerprint(tmp_path / "b")


def write_index(directory: Path, files: list[str]) -> None:
    index = {"weight_map": {f"t{i}": file for i, file in enumerate(files)}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))


def test_leftover_shards_outside_the_index_do_not_matter(tmp_path):
    shards(tmp_path / "a", [1, 2])
    before = weights_fingerprint(tmp_path / "a")
    write_index(tmp_path / "a", ["model-1.safetensors", "model-2.safetensors"])
    assert weights_fingerprint(tmp_path / "a") == before
    save_file({"old": np.zeros(10, np.float32)}, tmp_path / "a" / "model-9.safetensors")
    assert weights_fingerprint(tmp_path / "a") == before


def test_missing_shard_and_damaged_index_are_named(tmp_path):
    shards(tmp_path / "a", [1])
    write_index(tmp_path / "a", ["model-1.safetensors", "model-2.safetensors"])
    with pytest.raises(ConfigError, match=r"names model-2\.safetensors, which is not there"):
        weights_fingerprint(tmp_path / "a")
    for damaged in ("[1]", '{"weight_map": {}}', '{"weight_map": null}', "[" * 100_000):
        (tmp_path / "a" / "model.safetensors.index.json").write_text(damaged)
        with pytest.raises(ConfigError, match="not an index"):
            weights_fingerprint(tmp_path / "a")


@pytest.mark.parametrize(
    "header", ['{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,1e400]}}', "[" * 100_000], ids=["endless", "deep"]
)
def test_hostile_headers_are_refused(tmp_path, header):
    (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header.encode())
    with pytest.raises(ConfigError, match="no valid safetensors header"):
        weights_fingerprint(tmp_path)


def test_format_that_is_loaded_decides(model):
    """As in vLLM: Mistral's consolidated files come first, unless the load format says otherwise."""
    before = weights_fingerprint(model)
    save_file(tensors(seed=1), model / "consolidated.safetensors")
    write_index(model, ["model.safetensors"])
    consolidated = weights_fingerprint(model)
    assert consolidated != before
    assert weights_fingerprint(model, "mistral") == consolidated
    assert weights_fingerprint(model, "safetensors") == before


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "consolidated.00.pth", "model.gguf"])
def test_other_formats(tmp_path, name):
    file = tmp_path / name
    content = bytearray(np.random.default_rng(0).bytes(8 * 2**20))
    file.write_bytes(content)
    before = weights_fingerprint(tmp_path)
    os.utime(file, (1, 1))
    assert weights_fingerprint(tmp_path) == before
    for place in (0, len(content) // 2, len(content) - 70_000):
        changed = content.copy()
        changed[place : place + 70_000] = bytes(70_000)
        file.write_bytes(changed)
        assert weights_fingerprint(tmp_path) != before
    file.write_bytes(content + b"\0")
    assert weights_fingerprint(tmp_path) != before


def test_smallest_tensor_of_a_pytorch_file_is_seen(tmp_path):
    """The zip directory at its end holds a CRC-32 of every tensor."""

    def write(small: bytes) -> str:
        with zipfile.ZipFile(tmp_path / "pytorch_model.bin", "w") as archive:
            info = zipfile.ZipInfo("data/0")
            archive.writestr(info, bytes(6 * 2**20))
            archive.writestr(zipfile.ZipInfo("data/1"), small)
            archive.writestr(zipfile.ZipInfo("data/2"), bytes(6 * 2**20))
        return weights_fingerprint(tmp_path)

    assert write(b"\1\2\3\4") != write(b"\1\2\3\5")


def test_single_file(model):
    assert weights_fingerprint(model / "model.safetensors") == weights_fingerprint(model)


def test_no_weights_ask_for_a_label(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ConfigError, match="weights_label"):
        weights_fingerprint(tmp_path)
    with pytest.raises(ConfigError, match="weights_label"):
        weights_fingerprint(tmp_path / "no such directory")
    with pytest.raises(ConfigError, match=r"dummy.*weights_label"):
        weights_fingerprint(tmp_path, "dummy")
    assert describe_weights(tmp_path, "random seed 0", "dummy") == "label:random seed 0"


def test_label_never_equals_a_fingerprint(model):
    fingerprint = describe_weights(model)
    assert fingerprint == weights_fingerprint(model)
    assert describe_weights(model, fingerprint) != fingerprint
    with pytest.raises(ConfigError, match="empty"):
        describe_weights(model, "  ")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x10",
        (2**40).to_bytes(8, "little") + b"{}",
        (100).to_bytes(8, "little") + b"{}",
        (2).to_bytes(8, "little") + b"[]",
        (2).to_bytes(8, "little") + b"{{",
        (8).to_bytes(8, "little") + b'{"a": 1}',
        (35).to_bytes(8, "little") + b'{"a": {"data_offsets": [0, 999999]}',
        (36).to_bytes(8, "little") + b'{"a": {"data_offsets": [0, 999999]}}',
        (31).to_bytes(8, "little") + b'{"a": {"data_offsets": [5, 0]}}' + bytes(9),
    ],
)
def test_damaged_file_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(ConfigError, match=r"model\.safetensors"):
        weights_fingerprint(tmp_path)


def sparse_shard(file: Path, count: int, nbytes: int) -> None:
    entries = {
        f"model.layers.{i}.weight": {
            "dtype": "BF16",
            "shape": [nbytes // 2],
            "data_offsets": [i * nbytes, (i + 1) * nbytes],
        }
        for i in range(count)
    }
    header = json.dumps(entries).encode()
    with file.open("wb") as stream:
        stream.write(len(header).to_bytes(8, "little") + header)
        stream.truncate(8 + len(header) + count * nbytes)


@pytest.mark.parametrize(("files", "tensors_a_file"), [(30, 25), (30, 1000)])
def test_140_gb_take_less_than_two_seconds(tmp_path, files, tensors_a_file):
    """Dense (70B) and mixture of experts (many tensors), as sparse files. CPU time: CI machines are shared."""
    nbytes = 140 * 10**9 // files // tensors_a_file // 2 * 2
    for number in range(files):
        sparse_shard(tmp_path / f"model-{number:05}.safetensors", tensors_a_file, nbytes)
    start = time.process_time()
    before = weights_fingerprint(tmp_path)
    assert time.process_time() - start < 2
    last = tmp_path / f"model-{files - 1:05}.safetensors"
    with last.open("r+b") as stream:
        stream.seek(-nbytes, os.SEEK_END)
        stream.write(b"\1" * nbytes)
    assert weights_fingerprint(tmp_path) != before


def test_140_gb_of_another_format_take_less_than_two_seconds(tmp_path):
    for number in range(15):
        with (tmp_path / f"pytorch_model-{number:05}.bin").open("wb") as stream:
            stream.truncate(140 * 10**9 // 15)
    start = time.process_time()
    weights_fingerprint(tmp_path)
    assert time.process_time() - start < 2
