"""Set-ups that cannot be served are refused before the model is loaded; what changes KV is in the identity."""

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sim_store import Sim

from tplayout.errors import ConfigError
from tplayout_vllm.metadata import WorkerReport, this_machine
from tplayout_vllm.opening import _engine_settings, _model_files, _shown_name, check_machines, check_setup


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


def test_the_start_line_shows_what_was_chosen(sim: Sim, log: pytest.LogCaptureFixture) -> None:
    sim.engine(options={"max_bytes": "80M", "strict": True, "never_slower": True})
    sim.engine(role="kv_consumer")
    first, second = (line for line in log.messages if "namespace" in line)
    assert f"{sim.url}, " in first
    assert "load deadline 30 s (never slower)" in first
    assert first.endswith("kv_both, strict, max_bytes 80 MiB")
    assert "load deadline 30 s (also where computing is faster)" in second
    assert second.endswith("kv_consumer")


def test_a_key_that_others_can_read_is_said_at_start(sim: Sim, tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "key"
    file.write_text("sixteen bytes or more")
    file.chmod(0o640)
    sim.engine(options={"secret_key_file": str(file)})
    (line,) = (line for line in log.messages if "key file" in line)
    assert line.startswith(f"tplayout: secret_key_file: key file {file} has mode 0640")
