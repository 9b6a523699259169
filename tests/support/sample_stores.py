"""Small stores on disk, made with the tools' own library."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tplayout.admin.namespaces import begin_namespace
from tplayout.admin.transfer import store_prefix
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.identity import Identity
from tplayout.format.keys import chain
from tplayout.storage.url import open_store

GROUP = Group("full", "full", (0, 1), 4, (Part("k", 8), Part("v", 8)), "F16")
TOKENS = list(range(16))  # four chunks


class Noise:
    """A `Source` of KV that depends on the token's position alone."""

    def fill(self, group: int, tokens: range, out: Any) -> bool:
        out[...] = np.random.default_rng(tokens.start).integers(0, 2**16, out.shape, out.dtype)
        return True


def identity(weights: str = "files:01") -> Identity:
    return Identity(weights, {}, "float16", None, Geometry(4, (GROUP,)))


def store_prompts(url: str | Path, *prompts: Sequence[int], weights: str = "files:01") -> str:
    """Put the full chunks of the prompts into the store at a path or URL; the namespace's name."""
    with open_store(url) as store:
        target = begin_namespace(store, identity(weights), "m")
        for prompt in prompts:
            store_prefix(Noise(), chain(target.digest, prompt, 4), target)
    return target.name


def content(path: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def two_namespaces(path: Path) -> Path:
    """A store of one prompt in each of two namespaces."""
    for weights in ("files:01", "files:02"):
        store_prompts(path, TOKENS, weights=weights)
    return path


def two_prompts(path: Path) -> Path:
    """A store of two prompts in one namespace: four chunks, and two."""
    store_prompts(path, TOKENS, [9] * 8)
    return path


def damage_one(path: Path) -> Path:
    """Flip the last bit of one object of a store; its file."""
    file = next(path.rglob("*.0.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    return file
