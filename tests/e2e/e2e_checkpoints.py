"""Checkpoints that the end-to-end tests derive from the demo models: KV scales and LoRA adapters."""

import json
import shutil
from pathlib import Path
from typing import Any

import demo_models
import torch
from safetensors.torch import load_file, save_file

# What llm-compressor writes for a checkpoint that states KV scales and leaves its weights as they are.
_KV_SCHEME = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "ignore": [],
    "format": "dense",
    "kv_cache_scheme": {
        "num_bits": 8,
        "type": "float",
        "strategy": "tensor",
        "dynamic": False,
        "symmetric": True,
    },
}


def with_kv_scales(directory: Path, scales: list[tuple[float, float]], dtype: str = "float32") -> Path:
    """The tiny Llama with a scale of K and one of V for each layer, made in `directory`."""
    model = demo_models.ensure("llama", dtype)
    shutil.copytree(model, directory)
    weights = load_file(directory / "model.safetensors")
    for layer, pair in enumerate(scales):
        for part, scale in zip("kv", pair, strict=True):
            weights[f"model.layers.{layer}.self_attn.{part}_scale"] = torch.tensor(scale)
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "quantization_config": _KV_SCHEME}))
    return directory


def near_copy(directory: Path, strength: float) -> Path:
    """The tiny Llama with noise on its weights: a draft that the tiny Llama often agrees with."""
    shutil.copytree(demo_models.ensure("llama"), directory)
    weights = load_file(directory / "model.safetensors")
    generator = torch.Generator().manual_seed(7)
    for weight in weights.values():
        weight += strength * weight.std() * torch.randn(weight.shape, generator=generator) if weight.dim() > 1 else 0
    save_file(weights, directory / "model.safetensors", {"format": "pt"})
    return directory


def lora_adapter(directory: Path, seed: int, rank: int = 8) -> Path:
    """An adapter of the tiny Llama's K and V projections, so that it changes the KV of every token."""
    config = json.loads((demo_models.ensure("llama") / "config.json").read_text())
    hidden, out = config["hidden_size"], config["num_key_value_heads"] * config["head_dim"]
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module in ("k_proj", "v_proj"):
            name = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{name}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) / hidden**0.5
            weights[f"{name}.lora_B.weight"] = torch.randn(out, rank, generator=generator) / rank**0.5
    directory.mkdir(parents=True)
    save_file(weights, directory / "adapter_model.safetensors", {"format": "pt"})
    stated = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ["k_proj", "v_proj"]}
    (directory / "adapter_config.json").write_text(json.dumps({**stated, "bias": "none", "task_type": "CAUSAL_LM"}))
    return directory


AUDIO_TOKENS = {"<|AUDIO|>": 3, "<|audio_bos|>": 4, "<|audio_eos|>": 5}
_MELS, _SECONDS, _RATE = 16, 30, 16_000  # vLLM takes no other length


def audio_model(directory: Path) -> Path:
    """A tiny Qwen2-Audio of random weights, with a tokenizer that knows its special tokens and words like "w17"."""
    import transformers

    torch.manual_seed(0)
    text = {
        "model_type": "qwen2",
        "vocab_size": demo_models.VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
    }
    tower = {
        "num_mel_bins": _MELS,
        "encoder_layers": 1,
        "encoder_attention_heads": 2,
        "encoder_ffn_dim": 64,
        "d_model": 64,
        "max_source_positions": _SECONDS * _RATE // 160 // 2,
    }
    config = transformers.Qwen2AudioConfig(
        audio_config=tower, text_config=text, audio_token_index=AUDIO_TOKENS["<|AUDIO|>"]
    )
    model = transformers.Qwen2AudioForConditionalGeneration(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, 1.0 if "embed" in name else 1.7 / parameter.shape[-1] ** 0.5)
    model.save_pretrained(directory)
    # Under the names that published checkpoints have, and vLLM knows.
    weights = load_file(directory / "model.safetensors")
    named = {name.replace("language_model.model.model.", "language_model.model."): w for name, w in weights.items()}
    save_file(named, directory / "model.safetensors", {"format": "pt"})
    extractor = transformers.WhisperFeatureExtractor(
        feature_size=_MELS, sampling_rate=_RATE, chunk_length=_SECONDS, return_attention_mask=True
    )
    transformers.Qwen2AudioProcessor(extractor, _word_tokenizer()).save_pretrained(directory)
    return directory


def _word_tokenizer() -> Any:
    """A word a token: whitespace splits, unknown words do not occur."""
    import tokenizers
    import transformers

    words = ["<pad>", "<s>", "</s>", *AUDIO_TOKENS]
    words += [f"w{number}" for number in range(len(words), demo_models.VOCABULARY)]
    model = tokenizers.models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<pad>")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        additional_special_tokens=list(AUDIO_TOKENS),
    )
