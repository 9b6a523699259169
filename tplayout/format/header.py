"""Strict reading of a safetensors header.

The safetensors library accepts duplicate names and allocates by what a header claims; this parser checks caps
first, accepts nothing ambiguous, and names the defect. It reads any safetensors file, not only ours.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tplayout.errors import FormatError, Reason
from tplayout.format.canonical import parse_json

LENGTH_BYTES = 8
MAX_HEADER_BYTES = 2**20  # JSON part; 1,024 heads need a quarter of it
MAX_DIMS = 16
MAX_OFFSET = 2**53 - 1  # exact in every JSON implementation

DTYPE_BITS: Mapping[str, int] = {
    **{"F4": 4, "F6_E2M3": 6, "F6_E3M2": 6},
    **dict.fromkeys(("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"), 8),
    **dict.fromkeys(("I16", "U16", "F16", "BF16"), 16),
    **dict.fromkeys(("I32", "U32", "F32"), 32),
    **dict.fromkeys(("I64", "U64", "F64", "C64"), 64),
}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: safetensors dtype name, shape, and its bytes [start, end) in the FILE."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """What a header says, checked for consistency. data_start: where the data section begins in the file."""

    metadata: Mapping[str, str]
    tensors: Mapping[str, TensorInfo]
    data_start: int
    file_size: int


def header_size(prefix: bytes | memoryview, file_size: int) -> int:
    """Bytes from the start of the file to its data, from the first 8 bytes; caps are checked here."""
    if file_size < LENGTH_BYTES or len(prefix) < LENGTH_BYTES:
        raise FormatError(Reason.TRUNCATED, f"{min(file_size, len(prefix))} bytes, a header needs {LENGTH_BYTES}")
    length = int.from_bytes(prefix[:LENGTH_BYTES], "little")
    if length > MAX_HEADER_BYTES:
        raise FormatError(Reason.TOO_LARGE, f"header of {length} bytes, at most {MAX_HEADER_BYTES}")
    if LENGTH_BYTES + length > file_size:
        raise FormatError(Reason.TRUNCATED, f"header of {length} bytes in a file of {file_size}")
    return LENGTH_BYTES + length


def parse_header(prefix: bytes | memoryview, file_size: int) -> Header:
    """Parse the header of a file of `file_size` bytes from its first bytes (`header_size` says how many).

    Every defect raises FormatError with a reason of its own; work and memory are bounded by MAX_HEADER_BYTES.
    """
    data_start = header_size(prefix, file_size)
    if len(prefix) < data_start:
        raise FormatError(Reason.TRUNCATED, f"{len(prefix)} bytes given, the header has {data_start}")
    raw = bytes(prefix[LENGTH_BYTES:data_start])
    if raw[:1] != b"{":
        raise FormatError(Reason.NOT_SAFETENSORS, f"header starts with {raw[:4]!r}, must start with '{{'")
    document = parse_json(raw, MAX_HEADER_BYTES)
    metadata = _metadata(document.pop("__metadata__", {}))
    tensors = {name: _tensor(name, entry, data_start) for name, entry in document.items()}
    _check_tiling(tensors, data_start, file_size)
    return Header(metadata, tensors, data_start, file_size)


def _metadata(value: Any) -> dict[str, str]:
    if not isinstance(value, dict) or not all(isinstance(text, str) for text in value.values()):
        raise FormatError(Reason.BAD_METADATA, "__metadata__ must map strings to strings")
    return value


def _tensor(name: str, entry: Any, data_start: int) -> TensorInfo:
    where = repr(name)[:100]
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise FormatError(Reason.BAD_TENSOR, f"{where} must have exactly dtype, shape and data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise FormatError(Reason.BAD_DTYPE, f"{where}: {repr(dtype)[:100]}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMS or not all(_is_size(size) for size in shape):
        raise FormatError(Reason.BAD_SHAPE, f"{where}: {repr(shape)[:100]}")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_is_size(offset) for offset in offsets):
        raise FormatError(Reason.BAD_OFFSETS, f"{where}: {repr(offsets)[:100]}")
    begin, end = offsets
    if begin > end:
        raise FormatError(Reason.BAD_OFFSETS, f"{where}: ends at {end} before it begins at {begin}")
    if math.prod(shape) * DTYPE_BITS[dtype] != (end - begin) * 8:
        raise FormatError(Reason.BAD_SHAPE, f"{where}: {dtype}{shape} is not {end - begin} bytes")
    return TensorInfo(dtype, tuple(shape), data_start + begin, data_start + end)


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 <= value <= MAX_OFFSET


def _check_tiling(tensors: Mapping[str, TensorInfo], data_start: int, file_size: int) -> None:
    end = data_start
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        if tensor.start != end:
            fault = "overlaps the tensor before it" if tensor.start < end else "leaves a hole before it"
            raise FormatError(Reason.BAD_OFFSETS, f"{repr(name)[:100]} {fault}")
        end = tensor.end
    if end > file_size:
        raise FormatError(Reason.TRUNCATED, f"{file_size} bytes, the header describes {end}")
    if end < file_size:
        raise FormatError(Reason.TRAILING, f"{file_size} bytes, the header describes {end}")
