"""The models that the tests serve: built once, complete or not at all, and worth testing with."""

import json

import pytest

from tools import demo_models, smollm2


def test_names_cover_both_kinds():
    assert {"smollm2", "smollm2-9x3", "llama", "llama-kv2", "gemma3", "deepseek-v2"} <= set(demo_models.names())


@pytest.mark.parametrize(("name", "dtype"), [("no-such-model", "float32"), ("llama", "float64")])
def test_unknown_names_are_refused(tmp_path, name, dtype):
    with pytest.raises(ValueError, match="there is"):
        demo_models.ensure(name, dtype, tmp_path)
    assert not list(tmp_path.iterdir())


def test_built_once_and_again_after_a_change_of_the_recipe(tmp_path, monkeypatch):
    built = []

    def write(directory, dtype, name):
        built.append(name)
        (directory / "config.json").write_text(f'{{"dtype": "{dtype}"}}')

    monkeypatch.setattr(demo_models, "_write_tiny", write)
    path = demo_models.ensure("llama", root=tmp_path)
    assert demo_models.ensure("llama", root=tmp_path) == path
    assert json.loads((path / "config.json").read_text()) == {"dtype": "float32"}
    assert built == ["llama"]
    monkeypatch.setattr(demo_models, "RECIPE", demo_models.RECIPE + 1)
    assert demo_models.ensure("llama", root=tmp_path) == path
    assert built == ["llama", "llama"]


def test_nothing_is_left_of_a_build_that_failed(tmp_path, monkeypatch):
    def write(directory, dtype, name):
        (directory / "config.json").write_text("{}")
        raise RuntimeError("disk full")

    monkeypatch.setattr(demo_models, "_write_tiny", write)
    with pytest.raises(RuntimeError, match="disk full"):
        demo_models.ensure("llama", root=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


@pytest.mark.parametrize("name", ["llama", "llama-kv2"])
def test_output_depends_on_the_first_tokens(name):
    assert demo_models.depends_on_prefix(demo_models.ensure(name))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(set(demo_models.TINY) - {"llama", "llama-kv2"}))
def test_output_of_every_model_depends_on_the_first_tokens(name):
    assert demo_models.depends_on_prefix(demo_models.ensure(name))


def test_the_encoder_decoder_comes_with_a_processor():
    import transformers

    path = demo_models.ensure(demo_models.ENCODER_DECODER)
    assert transformers.AutoConfig.from_pretrained(path).is_encoder_decoder
    tokenizer = transformers.AutoProcessor.from_pretrained(path).tokenizer
    assert tokenizer.decode(tokenizer.encode("any text"), skip_special_tokens=True) == "any text"


def test_layers_that_share_have_fewer_caches():
    """Of six layers the last three share: vLLM registers KV of three."""
    config = json.loads((demo_models.ensure("gemma3n") / "config.json").read_text())
    assert config["num_hidden_layers"] - config["num_kv_shared_layers"] == 3
    assert config["layer_types"][:3] == ["sliding_attention", "sliding_attention", "full_attention"]


def test_a_window_that_does_not_reach_the_change_is_noticed():
    """4 layers see 4 x 127 tokens back: the self check must be able to say no."""
    path = demo_models.ensure("mistral")
    assert not demo_models.depends_on_prefix(path, demo_models.random_prompt(1000))


def test_padded_heads_compute_what_the_model_does():
    import torch
    import transformers

    tokenizer = transformers.AutoTokenizer.from_pretrained(demo_models.ensure("smollm2"))
    tokens = tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    logits = {}
    for name in ("smollm2", "smollm2-9x3"):
        network = transformers.AutoModelForCausalLM.from_pretrained(demo_models.ensure(name), dtype=torch.float32)
        with torch.no_grad():
            logits[name] = network.eval()(tokens).logits[0]
    assert torch.allclose(logits["smollm2"], logits["smollm2-9x3"], atol=1e-4)
    assert tokenizer.decode(logits["smollm2"][-1].argmax()).strip() == "Paris"


def test_rope_order_is_the_inverse_of_the_interleaving():
    import torch

    rows = torch.arange(2 * 8).reshape(16, 1).float()  # 2 heads of 8 rows, halves apart
    interleaved = rows.reshape(2, 2, 4, 1).transpose(1, 2).reshape(16, 1)
    assert torch.equal(smollm2._undo_rope_order(interleaved, 2), rows)


def test_missing_package_says_what_to_do(monkeypatch):
    monkeypatch.setattr(smollm2, "PACKAGE", "no-such-distribution")
    with pytest.raises(FileNotFoundError, match="make setup"):
        smollm2.gguf_file()


def test_command_line(capsys, tmp_path):
    assert demo_models.main(["--list"]) == 0
    assert "smollm2-9x3" in capsys.readouterr().out.split()
