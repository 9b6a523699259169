"""The head of a safetensors file that is to be written: its header, and where each tensor will lie."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tplayout.format.header import DTYPE_BITS
from tplayout.format.layout import encode_header


@dataclass(frozen=True)
class Head:
    """A file before its data. header: its first bytes; spans: each tensor's bytes in the file, in their order."""

    header: bytes
    spans: Mapping[str, range]

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return max((span.stop for span in self.spans.values()), default=len(self.header))


def head_of(metadata: Mapping[str, str], tensors: Mapping[str, tuple[str, Sequence[int]]]) -> Head:
    """The head of a file with these tensors, one behind the other; data starts at a multiple of 4096.

    tensors: name -> safetensors dtype (of whole bytes) and shape. Raises GeometryError for more names than a header
    holds.
    """
    entries: dict[str, Any] = {}
    spans: dict[str, range] = {}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * DTYPE_BITS[dtype] // 8
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        spans[name] = range(offset, end)
        offset = end
    header = encode_header(metadata, entries)
    start = len(header)
    return Head(header, {name: range(start + span.start, start + span.stop) for name, span in spans.items()})
