"""Look into a file store with the library's format code, to prove what an engine did or did not store."""

import time
from pathlib import Path

from tplayout.format.chunk import verify
from tplayout.format.digest import make_hasher
from tplayout.format.identity import NamespaceDocument, parse_namespace_document
from tplayout.format.keys import ChunkId, chain, object_name, parse_object_name
from tplayout.format.layout import chunk_layout


def namespace_of(root: Path) -> NamespaceDocument:
    """The store's only namespace."""
    documents = sorted(root.glob("*/namespace.json"))
    assert len(documents) == 1, f"expected one namespace in {root}: {documents}"
    return parse_namespace_document(documents[0].read_bytes(), documents[0].parent.name)


def objects(root: Path) -> dict[str, bytes]:
    """Every chunk object: {name within the store: content}. Temporary files of unfinished writes are not objects."""
    return {str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*.safetensors"))}


def verified(root: Path, secret: bytes | None = None) -> list[ChunkId]:
    """All chunks of the store, each checked completely. FormatError for one that is damaged, foreign or misnamed."""
    document = namespace_of(root)
    identity, facts = document.identity, document.storage
    hasher = make_hasher(facts.digest, secret, facts.key_id)
    chunks = []
    for name, data in objects(root).items():
        parsed = parse_object_name(name)
        assert parsed.namespace == identity.namespace
        layout = chunk_layout(identity.geometry, parsed.group_index, facts.digest, facts.key_id)
        chunks.append(verify(data, layout, identity.digest(), parsed.key, hasher))
    return chunks


def stored_prefix(root: Path, tokens: list[int]) -> int:
    """How many of the first tokens the store holds as a chain of chunks without a gap (no extras)."""
    if not list(root.glob("*/namespace.json")):
        return 0
    identity = namespace_of(root).identity
    size = identity.geometry.chunk_tokens
    for chunk in chain(identity.digest(), tokens, size):
        names = [object_name(identity.namespace, chunk.key, group) for group in range(len(identity.geometry.groups))]
        if not all((root / name).is_file() for name in names):
            return chunk.index * size
    return len(tokens) // size * size


def wait_until_stored(root: Path, tokens: list[int], count: int, within: float = 20) -> None:
    """Wait until the store holds the first `count` tokens. Nothing but the clock moves meanwhile."""
    deadline = time.monotonic() + within
    while stored_prefix(root, tokens) < count:
        assert time.monotonic() < deadline, f"{stored_prefix(root, tokens)} of {count} tokens stored in {within} s"
        time.sleep(0.05)


def temporary_files(root: Path) -> list[str]:
    """Files that are neither a chunk object nor namespace.json."""
    return [
        str(path.relative_to(root))
        for path in root.rglob("*")
        if path.is_file() and path.suffix != ".safetensors" and path.name != "namespace.json"
    ]
