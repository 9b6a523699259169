"""Chunk keys and object names: from a namespace and token ids to a place in the store.

Keys are BLAKE3 in derive_key mode over fixed-length or length-prefixed fields. Nothing here depends on a
process seed, on Python's hash() or on an engine's block hashes: two servers agree with nothing to configure.
"""

import operator
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import NoneType

from blake3 import blake3

from tplayout.arguments import check_type
from tplayout.errors import ConfigError, FormatError, GeometryError, Reason

KEY_BYTES = 32
ROOT = bytes(KEY_BYTES)  # the parent of a prefix's first chunk
MAX_TOKEN = 2**31 - 1
EXTRA_LORA = "lora"  # payload: digest of the adapter's files
EXTRA_MM = "mm"  # payload: mm_payload()
EXTRA_SALT = "salt"  # payload: the salt's UTF-8 bytes

_KEY_CONTEXT = "tplayout 1 chunk key"
_EXTRAS_CONTEXT = "tplayout 1 chunk extras"
_NAMESPACE = re.compile(r"[0-9a-f]{32}")
_OBJECT = re.compile(
    r"(?P<ns>[0-9a-f]{32})/(?P<fan>[0-9a-f]{2})/(?P<key>(?P=fan)[0-9a-f]{62})\.(?P<group>0|[1-9][0-9]?)\.safetensors"
)

Extras = Sequence[tuple[str, bytes]]


@dataclass(frozen=True)
class ChunkId:
    """One chunk of a prefix. key, parent, extras: 32 bytes; extras is the digest (see `extras_digest`).

    index: position in its chain, 0 for the first chunk; -1 when read from an object, which does not hold it.
    """

    key: bytes
    parent: bytes
    tokens: tuple[int, ...]
    extras: bytes
    index: int = -1


@dataclass(frozen=True)
class ObjectName:
    """The parts of a chunk object's name. namespace: 32 hex digits; key: 32 bytes."""

    namespace: str
    key: bytes
    group_index: int


def extras_digest(extras: Extras) -> bytes:
    """32 bytes that stand for an ordered list of (tag, payload); the order matters.

    ConfigError for what is no such list.
    """
    try:
        hasher = blake3(struct.pack("<I", len(extras)), derive_key_context=_EXTRAS_CONTEXT)
        for tag, payload in extras:
            name = tag.encode("utf-8")
            hasher.update(struct.pack("<I", len(name)) + name)
            hasher.update(struct.pack("<Q", len(payload)) + payload)
    except (AttributeError, TypeError, ValueError):
        raise ConfigError(
            "extras must be pairs of a tag (text) and a payload (bytes), or a function from a chunk's index to such; "
            "prefix_extras makes them for salts, adapters and items"
        ) from None
    return hasher.digest()


NO_EXTRAS = extras_digest(())


def mm_payload(offset: int, length: int, content_digest: bytes) -> bytes:
    """Payload of EXTRA_MM: a multimodal item of `length` positions that begins at the chunk's `offset`.

    offset is negative when the item began in an earlier chunk. content_digest: of the content itself.
    """
    return struct.pack("<qQ", offset, length) + content_digest


def prefix_extras(
    chunk_tokens: int,
    lora: bytes | None = None,
    items: Sequence[tuple[int, int, bytes]] = (),
    salt: str | None = None,
) -> Callable[[int], Extras]:
    """The extras of each chunk of a prefix, in the order that FORMAT.md fixes; for `chain`.

    lora: digest of the adapter's files. items: (first position in the prefix, positions, content digest).
    salt: of the request. Adapter and salt are in every chunk, an item in the chunks that it touches. Raises
    ConfigError for a salt that is no text, an adapter that is no bytes, items of another form.
    """
    check_type("chunk_tokens", chunk_tokens, int, "a whole number")
    check_type("lora", lora, (bytes, NoneType), "the digest of the adapter's files, bytes")
    before = () if lora is None else ((EXTRA_LORA, lora),)
    try:
        behind = () if salt is None else ((EXTRA_SALT, salt.encode("utf-8")),)
    except (AttributeError, UnicodeEncodeError) as error:
        raise ConfigError(f"a salt must be text that UTF-8 can hold: {error}") from None
    try:
        ordered = sorted(
            (operator.index(at), operator.index(length), bytes(memoryview(digest))) for at, length, digest in items
        )
    except (TypeError, ValueError):
        raise ConfigError(
            "items must be triples: first position, number of positions, content digest (bytes)"
        ) from None

    def extras(index: int) -> Extras:
        start, stop = index * chunk_tokens, (index + 1) * chunk_tokens
        inside = [item for item in ordered if item[0] < stop and item[0] + item[1] > start]
        return (
            *before,
            *((EXTRA_MM, mm_payload(at - start, n, digest)) for at, n, digest in inside),
            *behind,
        )

    return extras


def pack_tokens(tokens: Sequence[int]) -> bytes:
    """Token ids as int32 little-endian. Raises GeometryError for ids outside 0 .. 2**31-1."""
    try:
        packed = struct.pack(f"<{len(tokens)}i", *tokens)
        if tokens and min(tokens) < 0:
            raise GeometryError(f"token id {min(tokens)} is negative")
    except struct.error as error:
        raise GeometryError(f"token ids must be integers from 0 to {MAX_TOKEN}: {error}") from None
    return packed


def chunk_key(namespace: bytes, parent: bytes, tokens: Sequence[int], extras: bytes) -> bytes:
    """32 bytes that name a chunk. namespace: the whole identity digest; extras: `extras_digest`."""
    return key_of_packed(namespace, parent, pack_tokens(tokens), extras)


def key_of_packed(namespace: bytes, parent: bytes, packed: bytes, extras: bytes) -> bytes:
    """`chunk_key` of tokens as `pack_tokens` gives them and as chunk objects hold them."""
    for what, value in (("namespace", namespace), ("parent", parent), ("extras digest", extras)):
        if len(value) != KEY_BYTES:
            raise GeometryError(f"{what} has {len(value)} bytes, must be {KEY_BYTES}")
    message = b"".join((namespace, parent, extras, struct.pack("<I", len(packed) // 4), packed))
    return blake3(message, derive_key_context=_KEY_CONTEXT).digest()


def chain(
    namespace: bytes,
    tokens: Sequence[int],
    chunk_tokens: int,
    extras_for_chunk: Callable[[int], Extras] | None = None,
    parent: bytes = ROOT,
    start: int = 0,
) -> list[ChunkId]:
    """The full chunks of a prefix, in order; a last partial chunk has no key.

    tokens: ids from chunk `start` on. parent: key of chunk start-1. extras_for_chunk: from a chunk's index.
    """
    if chunk_tokens < 1:
        raise GeometryError(f"chunk_tokens is {chunk_tokens}, must be 1 or more")
    indices = range(start, start + len(tokens) // chunk_tokens)
    extras = [NO_EXTRAS if extras_for_chunk is None else extras_digest(extras_for_chunk(index)) for index in indices]
    return chain_of_digests(namespace, tokens, chunk_tokens, extras, parent, start)


def chain_of_digests(
    namespace: bytes,
    tokens: Sequence[int],
    chunk_tokens: int,
    extras: Sequence[bytes],
    parent: bytes = ROOT,
    start: int = 0,
) -> list[ChunkId]:
    """As `chain`, for as many chunks as have an extras digest."""
    chunks: list[ChunkId] = []
    for number, digest in enumerate(extras):
        own = tuple(tokens[number * chunk_tokens : (number + 1) * chunk_tokens])
        key = chunk_key(namespace, parent, own, digest)
        chunks.append(ChunkId(key, parent, own, digest, start + number))
        parent = key
    return chunks


def prompt_chain(namespace: bytes, tokens: Sequence[int], chunk_tokens: int, salt: str | None) -> list[ChunkId]:
    """The full chunks of a prompt as a request without adapter and multimodal items brings it."""
    return chain(namespace, tokens, chunk_tokens, prefix_extras(chunk_tokens, salt=salt))


def object_name(namespace_hex: str, key: bytes, group_index: int) -> str:
    """Store key of one chunk and group. namespace_hex: 32 hex digits."""
    name = f"{namespace_hex}/{key[:1].hex()}/{key.hex()}.{group_index}.safetensors"
    if not _OBJECT.fullmatch(name):
        raise GeometryError(f"{name!r} is no object name")
    return name


def parse_object_name(name: str) -> ObjectName:
    """Inverse of `object_name`; FormatError bad-name for anything else."""
    match = _OBJECT.fullmatch(name)
    if match is None:
        raise FormatError(Reason.BAD_NAME, "not <namespace>/<xx>/<key>.<group>.safetensors", where=name[:200])
    return ObjectName(match["ns"], bytes.fromhex(match["key"]), int(match["group"]))


def namespace_name(digest: bytes) -> str:
    """The directory of a namespace, 32 hex digits. digest: of the identity."""
    return digest.hex()[:32]


def is_namespace(text: str) -> bool:
    """Whether it can be the directory of a namespace."""
    return _NAMESPACE.fullmatch(text) is not None


def namespace_object(namespace_hex: str) -> str:
    """Store key of a namespace's document."""
    if not is_namespace(namespace_hex):
        raise GeometryError(f"{namespace_hex!r} is no namespace: 32 hex digits")
    return f"{namespace_hex}/namespace.json"
