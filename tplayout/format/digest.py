"""Cell digests: what says that the bytes of one cell are those that were written there.

A digest covers a cell's bytes and its coordinates (chunk key, group, head, layer), so a cell that is intact
but in the wrong place fails too. xxh3-128 detects accidents; blake3 also resists someone who builds a
collision; blake3-keyed also proves that the writer knew the secret.
"""

import struct
from collections.abc import Mapping
from typing import Protocol

import xxhash
from blake3 import blake3

from tplayout.errors import ConfigError, FormatError, Reason

XXH3 = "xxh3-128"
BLAKE3 = "blake3"
KEYED = "blake3-keyed"
DIGEST_BYTES: Mapping[str, int] = {XXH3: 16, BLAKE3: 32, KEYED: 32}
MIN_SECRET_BYTES = 16
KEY_ID_BYTES = 8

_DOMAIN = b"tplayout1 cell\0\0"  # 16 bytes
_COORDINATES = struct.Struct("<16s32sIII")
_SECRET_CONTEXT = "tplayout 1 cell digest secret"
_KEY_ID_CONTEXT = "tplayout 1 secret id"


class CellHasher(Protocol):
    """Digests of cells. name: as in the header; size: bytes of a digest; key_id: names the secret."""

    name: str
    size: int
    key_id: str | None

    def cell(self, chunk_key: bytes, group: str, head: int, layer: int, data: memoryview) -> bytes:
        """Digest of one cell. head: KV head of the model; layer: the model's layer number."""
        ...


def coordinates(chunk_key: bytes, group: str, head: int, layer: int) -> bytes:
    """What a digest covers besides the cell: where that is."""
    name = group.encode("ascii")
    return _COORDINATES.pack(_DOMAIN, chunk_key, head, layer, len(name)) + name


class _Xxh3:
    name = XXH3
    size = DIGEST_BYTES[XXH3]
    key_id: str | None = None

    def cell(self, chunk_key: bytes, group: str, head: int, layer: int, data: memoryview) -> bytes:
        hasher = xxhash.xxh3_128(coordinates(chunk_key, group, head, layer))
        hasher.update(data)
        return hasher.digest()


class _Blake3:
    name = BLAKE3
    size = DIGEST_BYTES[BLAKE3]
    key_id: str | None = None

    def cell(self, chunk_key: bytes, group: str, head: int, layer: int, data: memoryview) -> bytes:
        return blake3(coordinates(chunk_key, group, head, layer)).update(data).digest()


class _KeyedBlake3:
    name = KEYED
    size = DIGEST_BYTES[KEYED]

    def __init__(self, secret: bytes) -> None:
        self._key = blake3(secret, derive_key_context=_SECRET_CONTEXT).digest()
        self.key_id: str | None = secret_id(secret)

    def __repr__(self) -> str:
        return f"<{self.name}, key id {self.key_id}>"

    def __reduce__(self) -> str:
        raise TypeError("a hasher that holds a secret is not pickled")

    def cell(self, chunk_key: bytes, group: str, head: int, layer: int, data: memoryview) -> bytes:
        hasher = blake3(coordinates(chunk_key, group, head, layer), key=self._key)
        return hasher.update(data).digest()


def secret_id(secret: bytes) -> str:
    """16 hex digits that name a secret without revealing it: to tell "other secret" from "damaged"."""
    return blake3(secret, derive_key_context=_KEY_ID_CONTEXT).digest(KEY_ID_BYTES).hex()


def make_hasher(name: str | None = None, secret: bytes | None = None, key_id: str | None = None) -> CellHasher:
    """The hasher of that name; without a name the default: keyed when there is a secret, else xxh3-128.

    key_id: the one that a namespace or header states; the secret must be the one it names.
    Raises FormatError: unsupported-digest for a name this version does not know; wrong-secret when the digest
    needs a secret and none or another is given, or takes none and one is given (its user expects
    authentication). Raises ConfigError for a secret under 16 bytes, which could be guessed.
    """
    if secret is not None and len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(
            f"secret of {len(secret)} bytes, must have {MIN_SECRET_BYTES} or more (try: openssl rand -hex 32)"
        )
    if name is None:
        name = XXH3 if secret is None else KEYED
    digest_bytes(name)
    if name != KEYED:
        if secret is not None or key_id is not None:
            raise FormatError(
                Reason.WRONG_SECRET,
                f"written without a secret (digest {name}), and one is given: leave it out, or copy what is stored "
                "with it to a new store (`tplayout cp SRC NEW --secret-key-file FILE`)",
            )
        return _Xxh3() if name == XXH3 else _Blake3()
    if secret is None:
        raise FormatError(Reason.WRONG_SECRET, f"digest {name} needs the secret {key_id or ''}".rstrip())
    hasher = _KeyedBlake3(secret)
    if key_id not in (None, hasher.key_id):
        raise FormatError(Reason.WRONG_SECRET, f"secret {key_id} is needed, {hasher.key_id} is given")
    return hasher


def digest_bytes(name: str) -> int:
    """Bytes of a digest of that name; FormatError unsupported-digest for an unknown name."""
    if name not in DIGEST_BYTES:
        raise FormatError(Reason.UNSUPPORTED_DIGEST, f"{name[:100]!r}, known are {', '.join(DIGEST_BYTES)}")
    return DIGEST_BYTES[name]
