"""Small stores on disk, made with the tools' own library, and the tool's verbs as programs call them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from click.testing import CliRunner

from tplayout.admin.convert import target_namespace
from tplayout.admin.transfer import store_prefix
from tplayout.cli.main import main
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


def store_prompts(path: Path, *prompts: Sequence[int], weights: str = "files:01") -> str:
    """Put the full chunks of the prompts into the store at `path`; the namespace's name."""
    with open_store(path) as store:
        target = target_namespace(store, identity(weights), None, "m")
        for prompt in prompts:
            store_prefix(Noise(), chain(target.digest, prompt, 4), target)
    return target.name


def content(path: Path) -> dict[str, bytes]:
    """Every file below a directory."""
    return {str(file.relative_to(path)): file.read_bytes() for file in path.rglob("*") if file.is_file()}


def run(verb: str, *arguments: object, code: int = 0) -> dict[str, Any]:
    """`tplayout VERB … --json`: its document, once it ended with `code`."""
    result = CliRunner().invoke(main, [verb, *map(str, arguments), "--json"])
    assert result.exit_code == code, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document
