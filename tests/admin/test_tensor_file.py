"""The head of a file that is to be written is what the safetensors library and our own strict reader take."""

import numpy as np
import pytest
from safetensors.numpy import load

from tplayout.admin.tensor_file import head_of
from tplayout.errors import GeometryError
from tplayout.format.header import parse_header


def test_both_readers_find_every_tensor_where_the_head_says():
    head = head_of({"who": "me"}, {"ids": ("I64", (1, 5)), "kv": ("F16", (2, 3)), "none": ("U8", (0,))})
    data = bytearray(head.header.ljust(head.nbytes, b"\0"))
    for number, span in enumerate(head.spans.values(), 1):
        data[span.start : span.stop] = bytes([number]) * len(span)
    tensors = load(bytes(data))
    assert {name: bytes(tensor.tobytes()) for name, tensor in tensors.items()} == {
        "ids": b"\1" * 40,
        "kv": b"\2" * 12,
        "none": b"",
    }
    assert tensors["kv"].dtype == np.float16
    ours = parse_header(head.header, head.nbytes)
    assert ours.metadata == {"who": "me"}
    assert ours.data_start % 4096 == 0
    assert {name: range(each.start, each.end) for name, each in ours.tensors.items()} == head.spans


def test_more_names_than_a_header_holds():
    with pytest.raises(GeometryError, match="header would have"):
        head_of({}, {f"layers.{number}.k": ("F16", (1,)) for number in range(20_000)})
