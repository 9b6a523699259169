"""`tplayout convert` of other caches' files, as people call it."""

import json
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from tests.admin.peer_kit import PEERS, PROMPT, values
from tests.support.tool import ask, refused


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model directory of the geometry that the peers' files have."""
    path = tmp_path / "model"
    path.mkdir()
    config = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 8, "num_key_value_heads": 4}
    (path / "config.json").write_text(json.dumps({**config, "head_dim": 8, "hidden_size": 64, "dtype": "float16"}))
    save_file({"weight": np.zeros((8, 8), "f2")}, path / "model.safetensors")
    return path


@pytest.fixture
def common(model, tmp_path) -> list[object]:
    (tmp_path / "prompt").write_text(json.dumps(PROMPT))
    return ["--model", model, "--tokens", tmp_path / "prompt", "--chunk-tokens", 16]


run, fail = partial(ask, "convert"), partial(refused, "convert")


@pytest.mark.parametrize(
    ("name", "stated"),
    [
        ("tier-tp2", ["--page-order", "hnd"]),
        ("tier-tp2-agnostic", ["--page-order", "nhd", "--engine-tp", 2]),
        ("tier-canonical-nhd", []),
        ("example-cpu", ["--engine-backend", "cpu", "--engine-block-size", 8]),
        ("lmcache-gpu-tp2", ["--engine-backend", "gpu", "--engine-block-size", 8, "--engine-chunk-tokens", 16]),
    ],
)
def test_into_a_store_and_out_as_shards(common, tmp_path, name, stated):
    report = run(PEERS / name, tmp_path / "store", *common, *stated)
    assert report["to"] == "store"
    assert report["objects_written"] == 2
    run(tmp_path / "store", tmp_path / "shards", "--tp", 1)
    (file,) = (tmp_path / "shards").rglob("*.safetensors")
    tensors = load_file(file)
    for layer in range(2):
        for number, part in enumerate("kv"):
            expected = values()[:, layer, number].transpose(1, 0, 2)
            assert tensors[f"layers.{layer}.{part}"].tobytes() == expected.tobytes()


def test_a_tier_of_another_tp_size_and_back(common, tmp_path):
    stated = ["--page-order", "hnd"]
    report = run(PEERS / "tier-tp2", tmp_path / "four", *common, *stated, "--tp", 4)
    assert (report["from"], report["to"], report["files_written"]) == ("vllm-tier", "vllm-tier", 2)
    run(tmp_path / "four", tmp_path / "two", *common, *stated, "--tp", 2)
    theirs = {p.relative_to(PEERS / "tier-tp2"): p.read_bytes() for p in (PEERS / "tier-tp2").rglob("*.*")}
    assert theirs == {p.relative_to(tmp_path / "two"): p.read_bytes() for p in (tmp_path / "two").rglob("*.*")}


def test_a_store_as_a_tier(common, tmp_path):
    run(PEERS / "tier-tp2", tmp_path / "store", *common, "--page-order", "hnd")
    config = next((PEERS / "tier-canonical-hnd").rglob("config.json"))
    arguments = ["--engine-config", config, "--tokens", tmp_path / "prompt"]
    report = run(tmp_path / "store", tmp_path / "tier", *arguments)
    assert (report["to"], report["files_written"]) == ("vllm-tier", 2)
    theirs = PEERS / "tier-canonical-hnd"
    assert {p.name: p.read_bytes() for p in theirs.rglob("*.bin")} == {
        p.name: p.read_bytes() for p in (tmp_path / "tier").rglob("*.bin")
    }


def test_what_is_missing_or_wrong_is_named(common, model, tmp_path):
    out = tmp_path / "store"
    assert "--page-order" in fail(PEERS / "tier-tp2", out, *common)
    assert "--engine-tp" in fail(PEERS / "tier-tp2-agnostic", out, *common)
    assert "do not fit TP size 1" in fail(
        PEERS / "tier-tp2-agnostic", out, *common, "--engine-tp", 1, "--page-order", "nhd"
    )
    assert "--engine-block-size" in fail(PEERS / "example-cpu", out, *common)
    assert "--tokens" in fail(PEERS / "tier-tp2", out, "--model", model)
    assert "--model" in fail(PEERS / "tier-tp2", out, "--tokens", tmp_path / "prompt")
    assert "overwrite each other" in fail(
        PEERS / "example-tp2", out, *common, "--engine-backend", "cpu", "--engine-block-size", 8
    )
    assert "says blocks of 8" in fail(PEERS / "tier-tp1", out, *common, "--engine-block-size", 16)
    assert "same for every TP size" in fail(PEERS / "tier-canonical-hnd", out, *common, "--tp", 2)
    assert "F32 in the model" in fail(PEERS / "tier-tp1", out, *common, "--page-order", "hnd", "--dtype", "F32")
    assert not out.exists()


def test_a_file_for_transformers_and_back(common, model, tmp_path):
    run(PEERS / "tier-tp2", tmp_path / "store", *common, "--page-order", "hnd")
    file = tmp_path / "prompt.safetensors"
    report = run(tmp_path / "store", file, "--transformers", "--tokens", tmp_path / "prompt")
    assert (report["to"], report["files_written"], report["objects_written"]) == ("transformers", 1, 0)
    report = run(tmp_path / "store", file, "--transformers", "--tokens", tmp_path / "prompt")
    assert (report["files_written"], report["files_present"]) == (0, 1)
    (tmp_path / "mine").write_text("precious")
    arguments = (tmp_path / "store", tmp_path / "mine", "--transformers", "--tokens", tmp_path / "prompt")
    assert "is there already" in fail(*arguments)
    assert (tmp_path / "mine").read_text() == "precious"
    report = run(file, tmp_path / "back")
    assert (report["from"], report["objects_written"]) == ("transformers", 2)
    first, second = (
        {p.relative_to(tmp_path / d): p.read_bytes() for p in (tmp_path / d).rglob("*.*")} for d in ("store", "back")
    )
    assert first == second
    tensors = load_file(file)
    save_file(tensors, tmp_path / "plain.safetensors")
    assert "--model" in fail(tmp_path / "plain.safetensors", tmp_path / "x", code=1)
    run(tmp_path / "plain.safetensors", tmp_path / "x", "--model", model, "--chunk-tokens", 16)
