"""Set-ups that cannot be served are refused before the model is loaded; what changes KV is in the identity."""

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tplayout.errors import ConfigError
from tplayout.format.encrypted import EncryptionKey
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.identity import Identity, namespace_document
from tplayout_vllm.metadata import WorkerReport, this_machine
from tplayout_vllm.opening import _engine_settings, _model_files, _shown_name, _storage, check_machines, check_setup
from tplayout_vllm.options import Options


def config(weight_transfer_config: Any = None, encoder: bool = False, **parallel: int) -> SimpleNamespace:
    sizes = {"decode_context_parallel_size": 1, "prefill_context_parallel_size": 1, "nnodes": 1, **parallel}
    return SimpleNamespace(
        parallel_config=SimpleNamespace(**sizes),
        model_config=SimpleNamespace(is_encoder_decoder=encoder),
        weight_transfer_config=weight_transfer_config,
    )


def test_what_can_be_served_is() -> None:
    check_setup(config())


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"decode_context_parallel_size": 2}, "context parallelism"),
        ({"prefill_context_parallel_size": 2}, "context parallelism"),
        ({"nnodes": 2}, "nnodes is 2"),
        ({"encoder": True}, "encoder-decoder"),
        ({"weight_transfer_config": object()}, "--weight-transfer-config"),
    ],
)
def test_what_cannot_is_named(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        check_setup(config(**wrong))


def test_ranks_of_another_machine_are_refused() -> None:
    here = this_machine()
    assert here == this_machine() != ""
    check_machines({(0, 0): WorkerReport((), here), (0, 1): WorkerReport((), here), (1, 0): WorkerReport(())})
    with pytest.raises(ConfigError, match="rank pp1 tp0 runs on another machine"):
        check_machines({(0, 0): WorkerReport((), here), (1, 0): WorkerReport((), "elsewhere pid:[1]")})


@dataclass
class Scheme:
    """Like vLLM's --quantization-config."""

    linear: Any
    ignore: list[str]


def settings(lora: Any = None, **model: Any) -> dict[str, Any]:
    return _engine_settings(SimpleNamespace(model_config=SimpleNamespace(**model), lora_config=lora))


def test_an_engine_as_usual_adds_nothing_to_the_identity() -> None:
    assert settings() == {}
    assert settings(SimpleNamespace(target_modules=None), model_class_overrides={}, quantization_config=None) == {}


def test_settings_that_change_kv_are_in_the_identity() -> None:
    lora = SimpleNamespace(target_modules=["v_proj", "q_proj"])
    assert settings(lora) == {"engine": {"lora_target_modules": ["q_proj", "v_proj"]}}
    scheme = Scheme(torch.float8_e4m3fn, ["re:.*x"])
    stated = {"linear": "torch.float8_e4m3fn", "ignore": ["re:.*x"]}
    assert settings(quantization_config=scheme) == {"engine": {"quantization_config": stated}}
    assert settings(model_class_overrides={"A": "m:B"}) == {"engine": {"model_class_overrides": {"A": "m:B"}}}


def files(label: str | None = None, **model: Any) -> tuple[Path, Path]:
    stated = {"hf_config_path": None, "revision": None, **model}
    return _model_files(SimpleNamespace(**stated), label)


def test_a_model_s_weights_and_configuration_may_be_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    model, config = tmp_path / "model", tmp_path / "config"
    model.mkdir()
    config.mkdir()
    assert files(model=model) == (model, model)
    assert files(model=model, hf_config_path=str(config)) == (model, config)
    # Weights that are streamed from elsewhere: their label is all that is asked for.
    assert files("label", model="nobody/nothing", hf_config_path=str(config)) == (config, config)


def test_a_single_file_of_weights_is_served_with_its_configuration(tmp_path: Path) -> None:
    file, config = tmp_path / "model.gguf", tmp_path / "config"
    file.write_bytes(b"GGUF")
    config.mkdir()
    with pytest.raises(ConfigError, match=r"single file.*config\.json beside it.*--hf-config-path"):
        files(model=file)
    assert files(model=file, hf_config_path=str(config)) == (file, config)
    (tmp_path / "config.json").write_text("{}")
    assert files(model=file) == (file, tmp_path)
    assert files("label", model=file) == (file, tmp_path)


@pytest.mark.parametrize(
    ("label", "config", "says", "not_said"),
    [
        (None, None, "weights cannot be identified", "nothing"),
        ("label", None, "configuration cannot be identified", "weights_label"),
        ("label", "nobody/config", "model nobody/config: its configuration cannot", "weights_label"),
    ],
)
def test_a_model_that_is_not_here_is_refused_with_what_helps(
    label: str | None, config: str | None, says: str, not_said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    with pytest.raises(ConfigError, match=says) as raised:
        files(label, model="nobody/weights", hf_config_path=config)
    assert "--hf-config-path" in str(raised.value)
    assert ("weights_label" in str(raised.value)) == (not_said != "weights_label")


def test_a_name_that_is_no_text_is_shown_all_the_same() -> None:
    assert _shown_name(SimpleNamespace(model=Path("/models/f\u00fcr-\udcff"))) == "f\u00fcr-\\udcff"


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
    _storage(*plant(tmp_path, lambda document: document.replace(b'"model": "model"', b'"model": "other"')))


def test_a_namespace_s_digest_is_taken_over(tmp_path: Path) -> None:
    hasher, codec, agreed = _storage(*plant(tmp_path, lambda document: document, "blake3"))
    assert (hasher.name, codec, agreed) == ("blake3", "none", True)


def test_a_namespace_s_codec_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the start is refused, with the way out, where what it needs is missing."""
    packed = plant(tmp_path, lambda document: document.replace(b'"codec": "none"', b'"codec": "shuffle-zstd"'))
    assert _storage(*packed)[1] == "shuffle-zstd"
    monkeypatch.setitem(sys.modules, "zstandard", None)
    with pytest.raises(ConfigError, match=r"pip install 'tplayout\[zstd\]'"):
        _storage(*packed)


@pytest.mark.parametrize(("secret", "name"), [(None, "xxh3-128"), (b"sixteen bytes or more", "blake3-keyed")])
def test_a_new_namespace_gets_the_default_digest(tmp_path: Path, secret: bytes | None, name: str) -> None:
    _, identity = plant(tmp_path, lambda document: document)
    elsewhere = Options(url=f"file://{tmp_path}/elsewhere", secret=secret)
    hasher, codec, agreed = _storage(elsewhere, identity)
    assert (hasher.name, codec, agreed) == (name, "none", True)


def test_a_secret_that_is_not_the_namespace_s_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"another namespace.*xxh3-128.*blake3-keyed.*use another 'url'"):
        _storage(*plant(tmp_path, lambda document: document, secret=b"sixteen bytes or more"))


KEY, OTHER = EncryptionKey(bytes(32)), EncryptionKey(bytes(range(32)))


def encrypted(document: bytes) -> bytes:
    value = json.loads(document)
    return json.dumps(
        {**value, "storage": {**value["storage"], "codec": "aes-256-gcm", "encryption_key_id": KEY.id}}
    ).encode()


def test_an_encrypted_namespace_is_taken_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its key; and the start is refused, with the way out, where what it needs is missing."""
    planted = plant(tmp_path, encrypted, encryption_key=KEY)
    hasher, codec, agreed = _storage(*planted)
    assert (hasher.name, codec, agreed) == ("xxh3-128", "aes-256-gcm", True)
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    with pytest.raises(ConfigError, match=r"pip install 'tplayout\[encrypt\]'"):
        _storage(*planted)


@pytest.mark.parametrize(
    ("change", "key", "codec", "says"),
    [
        (encrypted, OTHER, "aes-256-gcm", f"encryption key {KEY.id} is needed, {OTHER.id} is given"),
        (encrypted, None, "none", f"encryption key {KEY.id} is needed, none is given"),
        (lambda document: document, KEY, "aes-256-gcm", f"codec none takes no encryption key, {KEY.id} is given"),
    ],
)
def test_another_encryption_key_is_a_miss_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, change: Any, key: EncryptionKey | None, codec: str, says: str
) -> None:
    """[M47] Keys are changed while servers run. It goes on in its own way, which is not the namespace's; `strict`
    refuses."""
    options, identity = plant(tmp_path, change, "blake3", encryption_key=key)
    hasher, begun, agreed = _storage(options, identity)
    assert (hasher.name, begun, agreed) == ("blake3", codec, False)
    (line,) = [record.getMessage() for record in caplog.records]
    assert says in line
    assert "serving WITHOUT it" in line
    with pytest.raises(ConfigError, match=r"another namespace.*wrong-encryption-key"):
        _storage(replace(options, strict=True), identity)


def test_a_new_namespace_is_encrypted_where_there_is_a_key(tmp_path: Path) -> None:
    _, identity = plant(tmp_path, lambda document: document)
    options = Options(url=f"file://{tmp_path}/elsewhere", encryption_key=KEY)
    assert _storage(options, identity)[1:] == ("aes-256-gcm", True)


@pytest.mark.parametrize("keep", [0, 1, 100])
def test_a_damaged_namespace_is_refused_with_the_way_out(tmp_path: Path, keep: int) -> None:
    """After a power loss, say: what was not flushed may be gone."""
    with pytest.raises(ConfigError, match=r"damaged namespace\.json.*remove that file"):
        _storage(*plant(tmp_path, lambda document: document[:keep]))


def test_a_namespace_of_another_version_is_not_to_be_removed(tmp_path: Path) -> None:
    def newer(document: bytes) -> bytes:
        value = json.loads(document)
        return json.dumps({**value, "storage": {**value["storage"], "codec": "zstd"}}).encode()

    with pytest.raises(ConfigError, match=r"another namespace.*unsupported-codec.*zstd") as raised:
        _storage(*plant(tmp_path, newer))
    assert "remove" not in str(raised.value)
