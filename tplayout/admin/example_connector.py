"""vLLM's ExampleConnector directories (vLLM 0.32): one prompt's layers as a source.

`<root>/<md5 of the token ids>/<layer name>.safetensors`, tensor `kv_cache` [tokens, heads, 2*dim] of raw slots. The
block size and what a slot is (a token, or on the CPU backend a piece of a block) are not told and must be stated.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Sequence
from pathlib import Path

from tplayout.admin.local_files import ReadFile, os_errors
from tplayout.admin.pages import PagedSource, pages_of_slots
from tplayout.errors import ConfigError, GeometryError, NotFound
from tplayout.format.geometry import Group
from tplayout.format.header import TensorInfo

_LAYER = re.compile(r"(?:^|\.)(\d+)(?:\.|$)")
_FOLDER = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")
BACKENDS = {"gpu": "hnd", "cpu": "cpu"}  # backend -> order of a page [head, slot, 2*dim]


def is_example_directory(directory: Path) -> bool:
    """Whether a directory looks like ExampleConnector's."""
    if not directory.is_dir():
        return False
    folders = [path for path in directory.iterdir() if path.is_dir() and _FOLDER.fullmatch(path.name)]
    return any(list(folder.glob("*layers.*.safetensors")) for folder in folders[:10])


def folder_name(tokens: Sequence[int]) -> str:
    """Directory of a prompt; its token ids up to the last whole block before its end."""
    return hashlib.md5(struct.pack(f"<{len(tokens)}q", *tokens), usedforsecurity=False).hexdigest()


def read_prompt(root: Path, group: Group, tokens: Sequence[int], block_tokens: int, backend: str) -> PagedSource:
    """The longest part of a prompt that was saved. backend: of BACKENDS.

    Raises NotFound if nothing was, GeometryError for files of another model or of several ranks, which overwrite each
    other, ConfigError for a backend that is unknown.
    """
    if backend not in BACKENDS:
        raise ConfigError(f"backend {backend!r} is unknown: {', '.join(BACKENDS)}")
    for count in range(len(tokens) // block_tokens, 0, -1):
        folder = root / folder_name(tokens[: count * block_tokens])
        if folder.is_dir():
            return _open(folder, group, count * block_tokens, block_tokens, backend)
    raise NotFound(
        f"{root}: nothing of this prompt in blocks of {block_tokens} tokens; other tokens, block size or images"
    )


def _open(folder: Path, group: Group, tokens: int, block_tokens: int, backend: str) -> PagedSource:
    files = _layer_files(folder)
    if tuple(files) != group.layers:
        raise GeometryError(f"{folder}: layers {list(files)}, the model has {list(group.layers)}")
    places = [_place(path, group, tokens) for path in files.values()]
    paths = list(files.values())
    row = group.heads * 2 * group.parts[0].dim * group.element_bytes

    def read(page: int, layer: int) -> list[tuple[range, bytes]]:
        start = places[layer].start + page * block_tokens * row
        with os_errors(), ReadFile(paths[layer]) as file:
            data = file.read(start, block_tokens * row)
        return [(range(group.heads), pages_of_slots(data, group, group.heads, block_tokens))]

    return PagedSource(group, BACKENDS[backend], block_tokens, tokens, read)


def _layer_files(folder: Path) -> dict[int, Path]:
    """Layer number -> file, ascending."""
    found = {}
    for path in folder.glob("*.safetensors"):
        number = _LAYER.search(path.name)
        if number:
            found[int(number[1])] = path
    return dict(sorted(found.items()))


def _place(path: Path, group: Group, tokens: int) -> TensorInfo:
    with os_errors(), ReadFile(path) as file:
        tensor = file.safetensors_header().tensors.get("kv_cache")
    wanted = (tokens, group.heads, 2 * group.parts[0].dim)
    if tensor is None or len(tensor.shape) != 3:
        raise GeometryError(f"{path}: no tensor kv_cache [tokens, heads, 2*dim]; this is not what is converted")
    if tensor.shape[1] < group.heads and (tensor.shape[0], tensor.shape[2]) == (wanted[0], wanted[2]):
        raise GeometryError(
            f"{path}: {tensor.shape[1]} of the model's {group.heads} KV heads: written with tensor parallelism, where "
            "ExampleConnector's ranks overwrite each other; the other heads are lost"
        )
    if tensor.shape != wanted or tensor.dtype != group.dtype:
        raise GeometryError(f"{path}: {tensor.dtype}{list(tensor.shape)}, must be {group.dtype}{list(wanted)}")
    return tensor
