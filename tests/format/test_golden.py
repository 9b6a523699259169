"""The bytes of version 1, fixed: an object that changes here is another format."""

import hashlib
import struct
from collections.abc import Callable
from typing import Any

import pytest

from tplayout.format.digest import DIGEST_BYTES, KEYED

Make = Callable[..., Any]
SECRET = b"a secret of some length"

GOLDEN_HEADER = (
    b'{"__metadata__":{"chunk_tokens":"4","codec":"none","digest":"xxh3-128","group":"{\\"dtype\\":\\"F16\\",'
    b'\\"heads\\":2,\\"kind\\":\\"full\\",\\"layers\\":[0,2],\\"name\\":\\"full\\",\\"parts\\":[{\\"dim\\":2,'
    b'\\"name\\":\\"k\\"},{\\"dim\\":2,\\"name\\":\\"v\\"}],\\"scales\\":null,\\"window\\":null}","group_index":"0",'
    b'"tplayout":"1"},"tokens":{"dtype":"I32","shape":[4],"data_offsets":[0,16]},'
    b'"parent":{"dtype":"U8","shape":[32],"data_offsets":[16,48]},'
    b'"extras":{"dtype":"U8","shape":[32],"data_offsets":[48,80]},'
    b'"pad":{"dtype":"U8","shape":[4016],"data_offsets":[80,4096]},'
    b'"h0.digests":{"dtype":"U8","shape":[2,16],"data_offsets":[4096,4128]},'
    b'"h0.kv":{"dtype":"F16","shape":[2,2,4,2],"data_offsets":[4128,4192]},'
    b'"h0.pad":{"dtype":"U8","shape":[4000],"data_offsets":[4192,8192]},'
    b'"h1.digests":{"dtype":"U8","shape":[2,16],"data_offsets":[8192,8224]},'
    b'"h1.kv":{"dtype":"F16","shape":[2,2,4,2],"data_offsets":[8224,8288]},'
    b'"h1.pad":{"dtype":"U8","shape":[4000],"data_offsets":[8288,12288]}}'
)
GOLDEN_SHA256 = {
    "xxh3-128": "1ddeee9bfe6fb7b9e928747352446d3d10080f91c835ed51fa0680a87f908968",
    "blake3": "64b26616c7550c790dc29242e43899c2663a94835d0a3f5b951a1a33315c1dd3",
    KEYED: "f1e9a25698100fc6e7416589a20b05913d2ff20a6f5eb30926bd7b5493f45470",
}


def test_golden_header(make_sealed: Make) -> None:
    """[M17] Byte for byte; the length field makes the data begin at 4096."""
    header = make_sealed().layout.header
    assert header[:8] == struct.pack("<Q", 4088)
    assert header[8:].rstrip(b" ") == GOLDEN_HEADER
    assert len(header) == 4096


@pytest.mark.parametrize("digest", sorted(DIGEST_BYTES))
def test_golden_objects(make_sealed: Make, digest: str) -> None:
    """[M17] [M19] [M20] [M35] Fixed for version 1: another hash here is another format."""
    sealed = make_sealed(digest=digest, secret=SECRET if digest == KEYED else None)
    assert len(sealed.buf) == 16384
    assert hashlib.sha256(sealed.buf).hexdigest() == GOLDEN_SHA256[digest]


def test_every_byte_of_an_object_is_where_the_table_says(make_sealed: Make) -> None:
    """[M4] [M18] [M19] The whole object, rebuilt from FORMAT.md's table without our code's offsets."""
    sealed = make_sealed()
    cells = bytes(i % 251 for i in range(2 * 2 * 32))
    info = struct.pack("<4i", 1, 2, 3, 4) + bytes(32) + sealed.chunk.extras
    expected = sealed.layout.header + info.ljust(4096, b"\0")
    for head in range(2):
        own = [cells[(head * 2 + row) * 32 :][:32] for row in range(2)]
        table = b"".join(
            sealed.hasher.cell(sealed.chunk.key, "full", head, layer, memoryview(cell))
            for layer, cell in zip((0, 2), own, strict=True)
        )
        expected += (table + b"".join(own)).ljust(4096, b"\0")
    assert bytes(sealed.buf) == expected
