"""tplayout/format/header.py: any safetensors header, and every hostile one."""

import json
import time
import tracemalloc
from typing import Any

import pytest

from tplayout.errors import FormatError, Reason
from tplayout.format.header import MAX_HEADER_BYTES, MAX_OFFSET, TensorInfo, header_size, parse_header


def file_of(header: bytes | dict[str, Any], data: int = 0) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(data)


def tensor(dtype: Any = "U8", shape: Any = (4,), offsets: Any = (0, 4)) -> dict[str, Any]:
    listed = [list(value) if isinstance(value, tuple) else value for value in (shape, offsets)]
    return {"dtype": dtype, "shape": listed[0], "data_offsets": listed[1]}


def reason_of(data: bytes, file_size: int | None = None) -> Reason:
    with pytest.raises(FormatError) as caught:
        parse_header(data, len(data) if file_size is None else file_size)
    return caught.value.reason


def test_a_foreign_file_is_read() -> None:
    header = {
        "b": tensor("BF16", (2, 3), (4, 16)),
        "a": tensor(),
        "e": tensor("F32", (0,), (16, 16)),
        "__metadata__": {"format": "pt"},
    }
    data = file_of(header, 16)
    parsed = parse_header(data, len(data))
    start = parsed.data_start
    assert parsed.metadata == {"format": "pt"}
    assert parsed.tensors["b"] == TensorInfo("BF16", (2, 3), start + 4, start + 16)
    assert start == header_size(data[:8], len(data)) == len(data) - 16
    assert parse_header(memoryview(data)[:start], len(data)) == parsed
    assert parse_header(file_of(b"{}  "), 12).tensors == {}


HOSTILE = [
    ("not a dict", {"a": [1]}, Reason.BAD_TENSOR),
    ("missing member", {"a": {"dtype": "U8", "shape": [4]}}, Reason.BAD_TENSOR),
    ("extra member", {"a": {**tensor(), "x": 1}}, Reason.BAD_TENSOR),
    ("unknown dtype", {"a": tensor("F7")}, Reason.BAD_DTYPE),
    ("dtype no text", {"a": tensor(["U8"])}, Reason.BAD_DTYPE),
    ("negative size", {"a": tensor(shape=(-4,))}, Reason.BAD_SHAPE),
    ("two negative sizes", {"a": tensor(shape=(-2, -2))}, Reason.BAD_SHAPE),
    ("boolean size", {"a": tensor(shape=(4, True))}, Reason.BAD_SHAPE),
    ("float size", {"a": tensor(shape=(4.0,))}, Reason.BAD_SHAPE),
    ("huge size", {"a": tensor(shape=(2**64 + 4,))}, Reason.BAD_SHAPE),
    ("sizes that overflow", {"a": tensor(shape=(2**33, 2**33, 4))}, Reason.BAD_SHAPE),
    ("shape no array", {"a": tensor(shape=4)}, Reason.BAD_SHAPE),
    ("many dims", {"a": tensor(shape=(1,) * 16 + (4,))}, Reason.BAD_SHAPE),
    ("bytes do not fit the shape", {"a": tensor(shape=(3,))}, Reason.BAD_SHAPE),
    ("half a byte", {"a": tensor("F4", (7,))}, Reason.BAD_SHAPE),
    ("negative offset", {"a": tensor(offsets=(-4, 0))}, Reason.BAD_OFFSETS),
    ("offsets reversed", {"a": tensor(offsets=(4, 0))}, Reason.BAD_OFFSETS),
    ("boolean offset", {"a": tensor(shape=(1,), offsets=(False, True))}, Reason.BAD_OFFSETS),
    ("float offset", {"a": tensor(offsets=(0, 4.0))}, Reason.BAD_OFFSETS),
    ("text offset", {"a": tensor(offsets=("0", "4"))}, Reason.BAD_OFFSETS),
    ("huge offset", {"a": tensor(offsets=(0, MAX_OFFSET + 1))}, Reason.BAD_OFFSETS),
    ("three offsets", {"a": tensor(offsets=(0, 2, 4))}, Reason.BAD_OFFSETS),
    ("offsets no array", {"a": tensor(offsets="04")}, Reason.BAD_OFFSETS),
    ("overlap", {"a": tensor(), "b": tensor(offsets=(2, 6))}, Reason.BAD_OFFSETS),
    ("same bytes", {"a": tensor(), "b": tensor()}, Reason.BAD_OFFSETS),
    ("hole", {"a": tensor(), "b": tensor(offsets=(5, 9))}, Reason.BAD_OFFSETS),
    ("hole at the start", {"a": tensor(offsets=(1, 5))}, Reason.BAD_OFFSETS),
    ("metadata no object", {"__metadata__": [], "a": tensor()}, Reason.BAD_METADATA),
    ("metadata null", {"__metadata__": None, "a": tensor()}, Reason.BAD_METADATA),
    ("metadata no text", {"__metadata__": {"x": 1}, "a": tensor()}, Reason.BAD_METADATA),
    ("more than the file", {"a": tensor(shape=(2**40,), offsets=(0, 2**40))}, Reason.TRUNCATED),
    ("less than the file", {"a": tensor(shape=(3,), offsets=(0, 3))}, Reason.TRAILING),
    ("nothing for data", {}, Reason.TRAILING),
]


@pytest.mark.parametrize(("header", "reason"), [row[1:] for row in HOSTILE], ids=[row[0] for row in HOSTILE])
def test_hostile_entries_have_one_reason_each(header: dict[str, Any], reason: Reason) -> None:
    """[M30] [M31]"""
    assert reason_of(file_of(header, 4)) is reason


HOSTILE_TEXT = [
    (b"", Reason.NOT_SAFETENSORS),
    (b"[]", Reason.NOT_SAFETENSORS),
    (b' {"a":1}', Reason.NOT_SAFETENSORS),
    (b"\x93NUMPY", Reason.NOT_SAFETENSORS),
    (b'{"a":\xff}', Reason.NOT_UTF8),
    (b'{"a":"\xed\xa0\x80"}', Reason.NOT_UTF8),
    (b'{"a":1', Reason.NOT_JSON),
    (b"{} {}", Reason.NOT_JSON),
    (b"{}\0", Reason.NOT_JSON),
    (b'{"a":{"dtype":"U8","shape":[NaN],"data_offsets":[0,4]}}', Reason.NOT_JSON),
    (b'{"a":{"dtype":"U8","shape":[4],"data_offsets":[0,1e999]}}', Reason.NOT_JSON),
    (b'{"a":{},"a":{}}', Reason.DUPLICATE_NAME),
    (b'{"a":{"dtype":"U8","dtype":"U8"}}', Reason.DUPLICATE_NAME),
    (b'{"__metadata__":{"x":"1","x":"2"}}', Reason.DUPLICATE_NAME),
    (b'{"a":' * 100_000, Reason.TOO_DEEP),
    (b'{"a":' + b"[" * 100_000, Reason.TOO_DEEP),
]


@pytest.mark.parametrize(("text", "reason"), HOSTILE_TEXT, ids=range(len(HOSTILE_TEXT)))
def test_hostile_text_has_one_reason_each(text: bytes, reason: Reason) -> None:
    """[M30] [M31]"""
    assert reason_of(file_of(text, 4)) is reason


@pytest.mark.parametrize("length", [MAX_HEADER_BYTES + 1, 2**31, 2**63, 2**64 - 1])
def test_a_length_over_the_cap_is_refused_without_reading(length: int) -> None:
    """[M7] [M29] Nothing of the claimed size is allocated."""
    data = length.to_bytes(8, "little") + b"{}"
    tracemalloc.start()
    assert reason_of(data, 2**64) is Reason.TOO_LARGE
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_claimed_tensor_sizes_allocate_nothing() -> None:
    """[M29]"""
    data = file_of({"a": tensor(shape=(2**50,), offsets=(0, 2**50))}, 4)
    tracemalloc.start()
    assert reason_of(data) is Reason.TRUNCATED
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()


def test_work_is_bounded_for_the_worst_header() -> None:
    """[M29] A header at the cap, made of as many values, names or quotes as fit."""
    for filler in (b"[],", b'"\\', b"[" * 14 + b"]" * 14 + b",", b'"",'):
        text = (b'{"a":[' + filler * (MAX_HEADER_BYTES // len(filler)))[:MAX_HEADER_BYTES]
        start = time.monotonic()
        assert reason_of(file_of(text)) is Reason.NOT_JSON
        assert time.monotonic() - start < 5


@pytest.mark.parametrize("size", range(8))
def test_files_too_short_for_a_length(size: int) -> None:
    """[M27]"""
    assert reason_of(bytes(size)) is Reason.TRUNCATED
    assert reason_of(bytes(size), 100) is Reason.TRUNCATED


def test_a_prefix_without_the_whole_header_is_truncated() -> None:
    """[M27]"""
    data = file_of({"a": tensor()}, 4)
    for size in range(8, len(data) - 4):
        assert reason_of(data[:size]) is Reason.TRUNCATED
        assert reason_of(data[:size], len(data)) is Reason.TRUNCATED
    for size in range(len(data) - 4, len(data)):
        assert reason_of(data[:size]) is Reason.TRUNCATED
    assert reason_of(data, len(data) + 1) is Reason.TRAILING
