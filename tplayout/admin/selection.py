"""Which prefixes of a namespace are meant: by the beginning of a key, or by a prompt's tokens."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path

from tplayout.admin.chains import Index
from tplayout.errors import ConfigError, NotFound
from tplayout.format.keys import ChunkId, prompt_chain

_HEX = re.compile(r"[0-9a-f]{4,64}")
_MAX_FILE_BYTES = 256 * 2**20


def read_token_file(path: Path) -> list[int]:
    """Token ids from a file: a JSON array, or whole numbers with white space or commas between. ConfigError."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"tokens file {path}: {error.strerror}") from None
    if len(data) > _MAX_FILE_BYTES:
        raise ConfigError(f"tokens file {path} has more than {_MAX_FILE_BYTES} bytes")
    try:
        text = data.decode("ascii").strip()
        tokens = json.loads(text) if text.startswith("[") else [int(word) for word in text.replace(",", " ").split()]
    except ValueError as error:
        raise ConfigError(f"tokens file {path} is neither a JSON array nor whole numbers: {error}") from None
    if not tokens or not all(type(token) is int and 0 <= token < 2**31 for token in tokens):
        raise ConfigError(f"tokens file {path} must hold token ids from 0 to 2147483647, and one at least")
    return list(tokens)


def prompt_chunks(index: Index, tokens: Sequence[int], salt: str | None = None) -> list[ChunkId]:
    """The chunks of a prompt that are stored, from the first on up to the first gap. Raises NotFound if none is."""
    namespace = index.namespace
    chunks = prompt_chain(namespace.digest, tokens, namespace.chunk_tokens, salt)
    stored = [chunk.key in index.chunks for chunk in chunks]
    count = stored.index(False) if False in stored else len(stored)
    if not count:
        raise NotFound(f"{namespace.store.url}: nothing of this prompt is stored; `tplayout explain` says why")
    return chunks[:count]


def keys_with(index: Index, beginning: str) -> bytes:
    """The key of the one chunk whose key begins so. Raises ConfigError, or NotFound."""
    text = beginning.lower()
    if not _HEX.fullmatch(text):
        raise ConfigError(f"{beginning!r} is not the beginning of a chunk's key: 4 to 64 hex digits")
    fitting = [key for key in index.chunks if key.hex().startswith(text)]
    if not fitting:
        raise NotFound(f"{index.namespace.store.url}: no chunk's key begins with {text}; `tplayout ls` lists them")
    if len(fitting) > 1:
        raise ConfigError(f"{len(fitting)} chunks' keys begin with {text}: give more digits")
    return fitting[0]


def selected(
    index: Index, keys: Sequence[str], prompts: Sequence[Sequence[int]], salt: str | None = None
) -> list[bytes] | None:
    """Last chunks of the prefixes that are meant; None if nothing is said, which means all."""
    if not keys and not prompts:
        return None
    found = [keys_with(index, key) for key in keys]
    found += [prompt_chunks(index, tokens, salt)[-1].key for tokens in prompts]
    return list(dict.fromkeys(found))
