"""Names the weights of a model by their files, without reading them whole.

KV is a function of the weights, and a model's name says nothing about them: it stays when they are fine-tuned,
quantised again or fixed. A fingerprint covers each file's size, its header, and blocks from every tensor, so a
tensor whose values changed is seen. It does not cover paths, times, or files that no engine loads.
"""

import json
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatchcase
from pathlib import Path

from blake3 import blake3

from tplayout.errors import ConfigError

_CONTEXT = "tplayout 1 weights fingerprint"
_INDEX_SUFFIX = ".safetensors.index.json"

# What vLLM loads for a load format: the first pattern that matches decides, in the directory itself only.
_HF = ("*.safetensors", "*.bin", "*.pt")
_PATTERNS: dict[str, tuple[str, ...]] = {
    "auto": ("consolidated*.safetensors", *_HF, "*.pth", "*.gguf"),
    "hf": _HF,
    "bitsandbytes": _HF,
    "mistral": ("consolidated*.safetensors",),
    "safetensors": ("*.safetensors",),
    "fastsafetensors": ("*.safetensors",),
    "instanttensor": ("*.safetensors",),
    "npcache": ("*.bin",),
    "pt": ("*.pt",),
    "gguf": ("*.gguf",),
}
_TRAINING_STATE = ("training_args.bin", "optimizer.bin", "optimizer.pt", "scheduler.pt", "scaler.pt")
# How quantised weights are to be read, where a checkpoint does not say so in config.json.
_QUANTIZATION_FILES = ("quantize_config.json", "quant_config.json", "hf_quant_config.json")

_THREADS = 8
_BLOCK = 1024  # bytes of a sample
_MAX_HEADER = 100_000_000  # safetensors' own limit
_BLOCKS_A_TENSOR = 4
_BLOCKS_A_FILE = 2048
_MIN_BLOCKS_A_FILE = 64
_SPACING = 64 * 2**10  # between samples of a file whose tensors are not parsed
_EDGE = 2**20  # read whole at both ends of such a file


def describe_weights(path: str | Path, label: str | None = None, load_format: str = "auto") -> str:
    """The `weights` of an identity: the label if there is one, else the fingerprint of the files.

    label: the operator's word that equal labels mean equal weights. load_format: vLLM's name.
    """
    if label is not None:
        if not label.strip():
            raise ConfigError("weights_label is empty: give it a text that names these weights, or leave it out")
        return f"label:{label}"
    return weights_fingerprint(path, load_format)


def weights_fingerprint(path: str | Path, load_format: str = "auto") -> str:
    """ "files:" and 64 hex digits for a model directory or a single file. Raises ConfigError if there is none.

    The same for every copy of the files, whatever the directory is called; another one after any change of
    sizes, names, tensor layout, or of a tensor's values (small changes within a tensor can be missed).
    """
    path = Path(path)
    try:
        files = [path] if path.is_file() else _files_loaded(path, load_format)
        with ThreadPoolExecutor(_THREADS) as pool:
            digests = list(pool.map(_file_digest, files))
    except OSError as error:
        raise ConfigError(f"the weights in {path} cannot be read: {error}. {_WAY_OUT}") from None
    total = blake3(derive_key_context=_CONTEXT)
    for file, digest in zip(files, digests, strict=True):
        name = file.name.encode()
        total.update(len(name).to_bytes(4, "little") + name + digest)
    return f"files:{total.hexdigest()}"


_WAY_OUT = "Name these weights with 'weights_label' if they have no files here."


def _files_loaded(directory: Path, load_format: str) -> list[Path]:
    """The files that hold weights, sorted by name, and those that say how they are quantised."""
    if load_format not in _PATTERNS:
        raise ConfigError(f"load format {load_format!r} has no weight files to fingerprint. {_WAY_OUT}")
    there = [file for file in directory.iterdir() if not file.name.startswith(".") and file.is_file()]
    for pattern in _PATTERNS[load_format]:
        found = [file for file in there if fnmatchcase(file.name, pattern)]
        found = [file for file in found if not file.name.endswith(_TRAINING_STATE)]
        if found:
            break
    else:
        wanted = ", ".join(_PATTERNS[load_format])
        raise ConfigError(f"{directory} holds no weights ({wanted}). {_WAY_OUT}")
    if pattern.endswith(".safetensors"):
        stem = "consolidated" if pattern.startswith("consolidated") else "model"
        found = _of_index(directory / (stem + _INDEX_SUFFIX), found)
    found += [file for file in there if file.name in _QUANTIZATION_FILES]
    return sorted(found, key=lambda file: file.name)


def _of_index(index: Path, files: list[Path]) -> list[Path]:
    """The files that the index names; all where there is no index. Leftover shards are not loaded by vLLM."""
    if not index.is_file():
        return files
    try:
        named = set(json.loads(index.read_bytes())["weight_map"].values())
        if not named:
            raise ValueError("no weights")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        raise ConfigError(f"{index} is not an index of weight files: fetch the model again") from None
    missing = sorted(map(str, named - {file.name for file in files}))
    if missing:
        raise ConfigError(f"{index} names {missing[0]}, which is not there: fetch the model again")
    return [file for file in files if file.name in named]


def _file_digest(file: Path) -> bytes:
    """32 bytes over the file's size, its header, and samples of its content."""
    fd = os.open(file, os.O_RDONLY | os.O_CLOEXEC)
    try:
        size = os.fstat(fd).st_size
        hasher = blake3(size.to_bytes(8, "little"))
        for offset, length in _samples(file, fd, size):
            data = os.pread(fd, length, offset)
            if len(data) != length:
                raise ConfigError(f"{file} changed while it was read: try again")
            hasher.update(data)
        return hasher.digest()
    finally:
        os.close(fd)


def _samples(file: Path, fd: int, size: int) -> Iterator[tuple[int, int]]:
    """(offset, length) of what is hashed, which is a function of the size and of what was read before."""
    if file.name.endswith(".safetensors"):
        yield from _tensor_samples(file, fd, size)
    elif size <= 2 * _EDGE:
        yield 0, size
    else:
        # A GGUF file starts with its names and shapes; a PyTorch file ends with a CRC-32 of every tensor.
        yield 0, _EDGE
        count = min(_BLOCKS_A_FILE, max(_MIN_BLOCKS_A_FILE, size // _SPACING))
        yield from _spread(_EDGE, size - _EDGE, count)
        yield size - _EDGE, _EDGE


def _tensor_samples(file: Path, fd: int, size: int) -> Iterator[tuple[int, int]]:
    length = int.from_bytes(os.pread(fd, 8, 0), "little")
    if not 2 <= length <= min(_MAX_HEADER, size - 8):
        raise ConfigError(f"{file} is no complete safetensors file: fetch the model again")
    yield 0, 8 + length
    start = 8 + length
    try:
        header = json.loads(os.pread(fd, length, 8))
        spans = sorted(
            (int(entry["data_offsets"][0]), int(entry["data_offsets"][1]))
            for name, entry in header.items()
            if name != "__metadata__"
        )
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError):
        raise ConfigError(f"{file} has no valid safetensors header: fetch the model again") from None
    if any(not 0 <= begin <= end <= size - start for begin, end in spans):
        raise ConfigError(f"{file} ends before its tensors do: fetch the model again")
    count = max(1, min(_BLOCKS_A_TENSOR, _BLOCKS_A_FILE // max(1, len(spans))))
    for begin, end in spans:
        yield from _spread(start + begin, start + end, count)


def _spread(begin: int, end: int, count: int) -> Iterator[tuple[int, int]]:
    """`count` blocks from begin to end, both ends included; the whole range where it is no longer."""
    last = end - begin - _BLOCK
    if last <= _BLOCK * (count - 1):
        yield begin, end - begin
    elif count == 1:
        yield begin + last // 2, _BLOCK
    else:
        for index in range(count):
            yield begin + last * index // (count - 1), _BLOCK
