"""The KV of one prompt as a file for Hugging Face transformers: safetensors with a cache's tensors.

Tensors `key_cache.<n>` and `value_cache.<n>` [1, heads, tokens, dim], n counting the model's layers, are what
`DynamicCache.update(key, value, n)` takes; `input_ids` [1, tokens] says of what. The file holds the identity too, so
that it can go back; prompts with extras (salt, adapter, images) are not converted.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from tplayout.admin.local_files import NewFile, ReadFile, os_errors
from tplayout.admin.tensor_file import Head, head_of
from tplayout.admin.transfer import Bits, part_of
from tplayout.errors import ConfigError, FormatError, GeometryError, Reason
from tplayout.format.canonical import canonical_json, parse_json
from tplayout.format.geometry import Geometry, Group
from tplayout.format.header import MAX_HEADER_BYTES, TensorInfo
from tplayout.format.identity import Identity
from tplayout.format.keys import pack_tokens

MARK = "tplayout_transformers"
VERSION = "1"
_NAMES = ("key_cache", "value_cache")


def check_geometry(geometry: Geometry) -> None:
    """GeometryError unless every layer holds K and V of one size, of all tokens."""
    for group in geometry.groups:
        if group.kind not in ("full", "window") or len(group.parts) != 2 or len({p.dim for p in group.parts}) != 1:
            raise GeometryError(f"group {group.name!r} ({group.kind}) does not hold K and V of one size")
        if group.scales and any(scale != 1 for row in group.scales for scale in row):
            raise GeometryError(f"group {group.name!r} is quantised with scales: convert it to another --dtype first")


def is_there(path: Path, identity: Identity, model: str, tokens: Sequence[int]) -> bool:
    """Whether the path holds this prompt's file already: what is written appears complete. ConfigError for another."""
    try:
        with ReadFile(path) as file:
            head = _head(identity, model, len(tokens))
            ids = head.spans["input_ids"]
            if (
                file.size == head.nbytes
                and file.read(0, len(head.header)) == head.header
                and file.read(ids.start, len(ids)) == _ids(tokens)
            ):
                return True
    except FileNotFoundError:
        return False
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror or error}") from None
    raise ConfigError(f"{path} is there already and is not the file of this prompt: remove it, or give another DST")


def _ids(tokens: Sequence[int]) -> bytes:
    return np.asarray(tokens, "<i8").tobytes()


def _head(identity: Identity, model: str, tokens: int) -> Head:
    metadata = {MARK: VERSION, "identity": canonical_json(identity.to_json()).decode(), "model": model}
    tensors: dict[str, tuple[str, Sequence[int]]] = {"input_ids": ("I64", (1, tokens))}
    owner = {layer: group for group in identity.geometry.groups for layer in group.layers}
    for layer, group in sorted(owner.items()):
        shape = (1, group.heads, tokens, group.parts[0].dim)
        tensors |= {f"{name}.{layer}": (group.dtype, shape) for name in _NAMES}
    return head_of(metadata, tensors)


class TransformersWriter:
    """Writes a prompt's file; a `Sink`. `publish` gives it its name."""

    def __init__(self, path: Path, identity: Identity, model: str, tokens: Sequence[int]) -> None:
        """Raises GeometryError for a model whose KV such a file cannot hold, StorageError."""
        check_geometry(identity.geometry)
        pack_tokens(tokens)
        self._geometry = identity.geometry
        self._tokens = len(tokens)
        self._spans = (head := _head(identity, model, len(tokens))).spans
        with os_errors():
            self._file = NewFile(path, head.nbytes)
            self._file.write(0, head.header)
            self._file.write(self._spans["input_ids"].start, _ids(tokens))

    def take(self, group: int, tokens: range, bits: Bits) -> None:
        """See `Sink`."""
        shape = self._geometry.groups[group]
        row = shape.parts[0].dim * shape.element_bytes
        for number, name in enumerate(_NAMES):
            for position, layer in enumerate(shape.layers):
                start = self._spans[f"{name}.{layer}"].start
                for head in range(shape.heads):
                    data = np.ascontiguousarray(part_of(bits, shape, number)[head, position]).tobytes()
                    with os_errors():
                        self._file.write(start + (head * self._tokens + tokens.start) * row, data)

    def publish(self) -> None:
        """Give the file its name."""
        with os_errors():
            self._file.publish()

    def discard(self) -> None:
        """Remove what was not published."""
        self._file.discard()


class TransformersFile:
    """A prompt's file, opened and checked; a `Source`. Files without identity take the one that is given."""

    def __init__(self, path: Path, identity: Identity | None = None) -> None:
        """Raises FormatError that names the file and the tensor; GeometryError."""
        with os_errors():
            self._file = ReadFile(path)
        try:
            header = self._file.safetensors_header()
            where = str(path)
            self.model = header.metadata.get("model", "")
            if identity is None:
                if header.metadata.get(MARK) != VERSION or "identity" not in header.metadata:
                    raise FormatError(Reason.BAD_METADATA, "the file holds no identity: name --model", where)
                identity = Identity.from_json(parse_json(header.metadata["identity"].encode(), MAX_HEADER_BYTES))
            self.identity = identity
            check_geometry(identity.geometry)
            self._tensors = dict(header.tensors)
            self._check(where)
        except BaseException:
            self._file.close()
            raise

    def _check(self, where: str) -> None:
        ids = self._tensors.get("input_ids")
        if ids is None or ids.dtype != "I64" or len(ids.shape) != 2 or ids.shape[0] != 1:
            raise FormatError(Reason.BAD_TENSOR, "tensor 'input_ids' must be there, I64 [1, tokens]", where)
        data = self._file.read(ids.start, ids.end - ids.start)
        self.tokens = [int(token) for token in np.frombuffer(data, "<i8")]
        pack_tokens(self.tokens)
        for group in self.identity.geometry.groups:
            shape = (1, group.heads, len(self.tokens), group.parts[0].dim)
            for layer in group.layers:
                for name in _NAMES:
                    tensor = self._tensors.get(f"{name}.{layer}")
                    if tensor is None:
                        raise FormatError(Reason.BAD_TENSOR, f"tensor '{name}.{layer}' is missing", where)
                    if (tensor.dtype, tensor.shape) != (group.dtype, shape):
                        found = f"{tensor.dtype}{list(tensor.shape)}, must be {group.dtype}{list(shape)}"
                        raise FormatError(Reason.BAD_SHAPE, f"'{name}.{layer}' is {found}", where)

    def fill(self, group: int, tokens: range, out: Bits) -> bool:
        """See `Source`."""
        shape = self.identity.geometry.groups[group]
        for number, name in enumerate(_NAMES):
            for position, layer in enumerate(shape.layers):
                self._fill(self._tensors[f"{name}.{layer}"], shape, tokens, part_of(out, shape, number)[:, position])
        return True

    def _fill(self, tensor: TensorInfo, group: Group, tokens: range, out: Bits) -> None:
        """out: [heads, tokens, dim]."""
        row = group.parts[0].dim * group.element_bytes
        for head in range(group.heads):
            start = tensor.start + (head * len(self.tokens) + tokens.start) * row
            data = self._file.read(start, len(tokens) * row)
            out[head] = np.frombuffer(data, out.dtype).reshape(len(tokens), -1)

    def close(self) -> None:
        """Close the file."""
        self._file.close()

    def __enter__(self) -> TransformersFile:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()
