"""A chunk object is a safetensors file: the safetensors library alone reads every element of it."""

import json
from itertools import product
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.numpy import load

from tplayout.format.chunk import seal
from tplayout.format.digest import make_hasher
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.keys import chain
from tplayout.format.layout import chunk_layout

DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "U8": torch.uint8,
}
KV = (Part("k", 3), Part("v", 3))


@pytest.mark.parametrize(
    ("kind", "parts"),
    [("full", KV), ("latent", (Part("c", 4), Part("rope", 2))), ("state", KV), ("state", (Part("a", 5), Part("b", 1)))],
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_element_is_read_by_the_library(tmp_path: Path, dtype: str, kind: str, parts: tuple[Part, ...]) -> None:
    """[M4] [M21] Elements are written by their meaning and found at their index."""
    group = Group("g", kind, (1, 4), 3, parts, dtype)  # type: ignore[arg-type]
    layout = chunk_layout(Geometry(5, (group,)), 0, "xxh3-128")
    shape = (3, 2, *group.cell_shape(5))
    values = torch.arange(torch.Size(shape).numel()).remainder(13).reshape(shape).to(torch.float32).to(DTYPES[dtype])
    buf = bytearray(layout.nbytes)
    for head in range(3):
        span = layout.kv_range(head, range(2))
        buf[span.start : span.stop] = bytes(values[head].contiguous().view(torch.uint8).flatten().tolist())
    chunk = chain(bytes(32), [7, 2**31 - 1, 0, 1, 2], 5)[0]
    seal(buf, layout, bytes(32), chunk, make_hasher())
    path = tmp_path / "chunk.safetensors"
    path.write_bytes(buf)
    with safetensors.safe_open(str(path), "pt") as file:
        names = set(file.keys())
        assert json.loads(file.metadata()["group"]) == group.to_json()
        assert file.get_tensor("tokens").tolist() == [7, 2**31 - 1, 0, 1, 2]
        assert bytes(file.get_tensor("parent").tolist()) == bytes(32)
        assert bytes(file.get_tensor("extras").tolist()) == chunk.extras
        for head in range(3):
            kv = file.get_tensor(f"h{head}.kv")
            assert kv.dtype == DTYPES[dtype]
            assert kv.shape == shape[1:]
            for index in product(*map(range, shape[1:])):
                assert kv[index].to(torch.float32) == values[(head, *index)].to(torch.float32)
            assert file.get_tensor(f"h{head}.digests").shape == (2, 16)
        pads = [name for name in names if name.endswith("pad")]
        assert all(not file.get_tensor(name).any() for name in pads)
    assert names == {"tokens", "parent", "extras", *pads, *(f"h{h}.{t}" for h in range(3) for t in ("kv", "digests"))}


def test_numpy_reads_it_too() -> None:
    """[M21]"""
    group = Group("g", "full", (0,), 2, KV, "F32")
    layout = chunk_layout(Geometry(4, (group,)), 0, "blake3")
    buf = bytearray(layout.nbytes)
    seal(buf, layout, bytes(32), chain(bytes(32), range(4), 4)[0], make_hasher("blake3"))
    tensors = load(bytes(buf))
    assert tensors["h1.kv"].shape == (1, 2, 4, 3)
    assert tensors["tokens"].tolist() == [0, 1, 2, 3]
