"""What a server would look for: the identity of a model as it is started, and a prompt's tokens."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tplayout.errors import ConfigError, FormatError
from tplayout.format.identity import MAX_DOCUMENT_BYTES, Identity, parse_namespace_document
from tplayout.model import CONFIG_FILES, describe_model

_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


@dataclass(frozen=True)
class Wanted:
    """An identity. weights_known: False if only a configuration was given: then the weights are not compared."""

    identity: Identity
    weights_known: bool = True


def wanted_identity(
    model: str | Path,
    *,
    kv_dtype: str = "auto",
    compute_dtype: str = "auto",
    chunk_tokens: int | None = None,
    weights_label: str | None = None,
    overrides: Mapping[str, Any] | None = None,
    load_format: str = "auto",
) -> Wanted:
    """The identity that a server has. model: a model directory, a configuration file, or a namespace.json.

    The other arguments are those of `describe_model`, and count for nothing with a namespace.json. Raises ConfigError.
    """
    path = Path(model)
    if not path.exists():
        raise ConfigError(
            f"--model {path}: no such file or directory; give a model directory, config.json or namespace.json"
        )
    if path.is_file() and (document := _document(path)) is not None:
        return Wanted(document)
    known = weights_label is not None or _has_weights(path)
    with tempfile.TemporaryDirectory() as scratch:
        directory = path
        if path.is_file():  # describe_model reads a directory
            directory = Path(scratch)
            shutil.copyfile(path, directory / CONFIG_FILES[0])
        identity = describe_model(
            directory,
            kv_dtype=kv_dtype,
            compute_dtype=compute_dtype,
            chunk_tokens=chunk_tokens,
            weights_label=weights_label if known else "not given",
            overrides=overrides,
            load_format=load_format,
        )
    return Wanted(identity, known)


def tokens_of_text(model: str | Path, text: str, special_tokens: bool = True) -> list[int]:
    """Token ids of a text by the model's own tokenizer.

    Its tokenizer.json is read with the tokenizers library, which starts fast; what has none, with transformers. Raises
    ConfigError if there is no tokenizer, or no library that reads it.
    """
    directory = Path(model) if Path(model).is_dir() else Path(model).parent
    file = directory / "tokenizer.json"
    if not file.is_file():
        return _by_transformers(directory, text, special_tokens)
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise ConfigError("--text needs a tokenizer: pip install 'tplayout[text]', or give --tokens") from None
    try:
        tokenizer = Tokenizer.from_file(str(file))
        tokens = [int(token) for token in tokenizer.encode(text, add_special_tokens=special_tokens).ids]
    except Exception as error:  # the library raises nothing narrower
        raise ConfigError(f"--text: {file} cannot be read: {_line(error)}") from None
    return _with_bos(directory, tokenizer, tokens) if special_tokens else tokens


def _by_transformers(directory: Path, text: str, special_tokens: bool) -> list[int]:
    try:
        from transformers import AutoTokenizer
    except ImportError:
        raise ConfigError(
            f"--text: {directory} has no tokenizer.json, and other tokenizers need transformers: "
            "pip install transformers, or give --tokens"
        ) from None
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True)
        return [int(token) for token in tokenizer.encode(text, add_special_tokens=special_tokens)]
    except Exception as error:  # a tokenizer may raise anything
        raise ConfigError(f"--text: {directory} has no tokenizer that can be read ({_line(error)})") from None


def _with_bos(directory: Path, tokenizer: Any, tokens: list[int]) -> list[int]:
    """The tokens with or without a first BOS as tokenizer_config.json asks, which tokenizer.json may not know."""
    try:
        config = json.loads((directory / "tokenizer_config.json").read_bytes())
        wants, bos = config.get("add_bos_token"), config.get("bos_token")
    except (OSError, ValueError, AttributeError):
        return tokens
    text = bos.get("content") if isinstance(bos, dict) else bos
    number = tokenizer.token_to_id(text) if isinstance(text, str) else None
    if not isinstance(wants, bool) or number is None or wants == (tokens[:1] == [number]):
        return tokens
    return [number, *tokens] if wants else tokens[1:]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:160]


def _document(path: Path) -> Identity | None:
    """The identity if the file is a namespace.json, None if it is something else."""
    if path.stat().st_size > MAX_DOCUMENT_BYTES:
        return None
    data = path.read_bytes()
    try:
        value = json.loads(data)
    except ValueError:
        raise ConfigError(f"--model {path} is no JSON: give a model directory, config.json or namespace.json") from None
    if not isinstance(value, dict) or "tplayout" not in value:
        return None
    try:
        return parse_namespace_document(data, str(value.get("namespace"))).identity
    except FormatError as error:
        raise ConfigError(f"--model {path} is a damaged namespace.json: {error}") from None


def _has_weights(path: Path) -> bool:
    return path.is_dir() and any(file.suffix in _WEIGHTS for file in path.iterdir())
