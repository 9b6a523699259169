"""How vLLM names what it offloads: block hashes of a prompt, and the paths of its native file-system tier.

vLLM hashes a serialised Python tuple. The few forms that occur are written out here byte by byte, so that nothing
needs vLLM or its serialiser; the tests compare with names that vLLM computed.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import xxhash

from tplayout.errors import ConfigError

DEFAULT_SEED = "vllm-none-hash"


def block_hashes(
    tokens: Sequence[int], block_tokens: int, algorithm: str = "sha256", seed: str | None = None
) -> list[bytes]:
    """Hashes of a prompt's full blocks, in order. algorithm: vLLM's --prefix-caching-hash-algo.

    seed: PYTHONHASHSEED of the server; without it vLLM's default, which xxhash does not have. Raises ConfigError.
    """
    if algorithm not in ALGORITHMS:
        raise ConfigError(f"hash algorithm {algorithm!r} is unknown: {', '.join(ALGORITHMS)}")
    if algorithm.startswith("xxhash") and seed is None:
        raise ConfigError(f"{algorithm} names blocks by the server's PYTHONHASHSEED: state it with --hash-seed")
    serialise, digest = ALGORITHMS[algorithm]
    parent = digest(serialise(DEFAULT_SEED if seed is None else seed))
    hashes = []
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        parent = digest(serialise((parent, tuple(tokens[start : start + block_tokens]), None)))
        hashes.append(parent)
    return hashes


def base_name(fields: Mapping[str, Any]) -> str:
    """Directory of a run of vLLM's tier: the model's name and a hash of its config.json."""
    canonical = json.dumps(fields, sort_keys=True, separators=(",", ":"))
    digest = hashlib.sha256(canonical.encode()).hexdigest()[:12]
    return f"{str(fields['model_name']).replace('/', '_')}_{digest}"


def file_name(base: str, block_hash: bytes) -> str:
    """Path of a chunk of the tier's only group, below its root."""
    text = block_hash.hex()
    return f"{base}_r0/{text[:3]}/{text[3:5]}_g0/{text}.bin"


def _frame(body: bytes) -> bytes:
    """Protocol 5 with its frame; all that is hashed here fits one frame."""
    return b"\x80\x05\x95" + len(body).to_bytes(8, "little") + body


def _python(value: Any) -> bytes:
    """What Python's standard serialiser makes of text, or of (bytes, tuple of ids, None)."""
    if isinstance(value, str):
        text = value.encode()
        return _frame(b"\x8c" + len(text).to_bytes(1, "little") + text + b"\x94.")
    parent, tokens, _ = value
    ids = b"".join(map(_python_int, tokens))
    packed = ids + (b"\x85", b"\x86", b"\x87")[len(tokens) - 1] if len(tokens) <= 3 else b"(" + ids + b"t"
    body = b"C" + bytes([len(parent)]) + parent + b"\x94" + packed + b"\x94N\x87\x94."
    if len(body) >= 65536:
        raise ConfigError(f"blocks of {len(tokens)} tokens are larger than vLLM's")
    return _frame(body)


def _python_int(number: int) -> bytes:
    if number < 256:
        return b"K" + number.to_bytes(1, "little")
    return b"M" + number.to_bytes(2, "little") if number < 65536 else b"J" + number.to_bytes(4, "little")


def _cbor(value: Any) -> bytes:
    """Canonical CBOR of the same."""
    if isinstance(value, str):
        text = value.encode()
        return _cbor_head(3, len(text)) + text
    parent, tokens, _ = value
    ids = b"".join(_cbor_head(0, token) for token in tokens)
    return b"\x83" + _cbor_head(2, len(parent)) + bytes(parent) + _cbor_head(4, len(tokens)) + ids + b"\xf6"


def _cbor_head(major: int, number: int) -> bytes:
    if number < 24:
        return bytes([major << 5 | number])
    for code, size in ((24, 1), (25, 2), (26, 4)):
        if number < 256**size:
            return bytes([major << 5 | code]) + number.to_bytes(size, "big")
    raise ConfigError(f"{number} is too large")


def _sha256(data: bytes) -> bytes:
    return hashlib.sha256(data).digest()


def _xxh3(data: bytes) -> bytes:
    return xxhash.xxh3_128(data).digest()


ALGORITHMS: Mapping[str, tuple[Callable[[Any], bytes], Callable[[bytes], bytes]]] = {
    "sha256": (_python, _sha256),
    "sha256_cbor": (_cbor, _sha256),
    "xxhash": (_python, _xxh3),
    "xxhash_cbor": (_cbor, _xxh3),
}
