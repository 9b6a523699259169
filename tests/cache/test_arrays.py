"""What is taken as an array, bit for bit, and what is refused by name."""

from typing import Any

import numpy as np
import pytest
import torch

from tplayout.cache.arrays import as_bits, from_bits, read_cells, write_cells
from tplayout.errors import ConfigError
from tplayout.format.geometry import DTYPE_BYTES, Geometry, Part
from tplayout.format.layout import ChunkLayout, chunk_layout
from tplayout.format.sharding import Shard, whole

SHARD = Shard(range(1, 3), range(1, 3))


def layout_of(group: Any) -> ChunkLayout:
    return chunk_layout(Geometry(4, (group,)), 0, "xxh3-128")


@pytest.mark.parametrize("dtype", DTYPE_BYTES)
@pytest.mark.parametrize("form", ["numpy", "torch"])
@pytest.mark.parametrize("order", ["contiguous", "transposed", "reversed", "sliced"])
def test_every_bit_pattern_survives(kit: Any, dtype: str, form: str, order: str) -> None:
    group = kit.group(dtype=dtype, scales=((1.0, 1.0),) * 3 if dtype.startswith("F8") else None)
    layout, bits = layout_of(group), kit.kv(group)
    make = kit.numpy if form == "numpy" else kit.torch
    array = make(bits, group)
    if order == "transposed":  # token-major memory, as engines have it
        back = (3, 1, 2, 0, 4)
        array = make(np.ascontiguousarray(bits.transpose(back)), group)
        array = array.transpose(back) if form == "numpy" else array.permute(back)
    elif order == "reversed" and form == "numpy":  # torch has no negative strides
        array = make(np.ascontiguousarray(bits[::-1, :, :, ::-1]), group)[::-1, :, :, ::-1]
    elif order == "sliced":
        array = make(np.repeat(bits, 2, axis=4), group)[..., ::2]
    buf = bytearray(layout.nbytes)
    write_cells(buf, layout, whole(group), as_bits(array, layout, whole(group)))
    for head in range(group.heads):
        span = layout.kv_range(head, range(3))
        assert bytes(buf[span.start : span.stop]) == bits[head].tobytes()
    cells = read_cells({range(layout.nbytes): buf}, layout, SHARD)
    for as_ in ("numpy", "torch"):
        found = from_bits(cells.copy(), group, as_)
        assert found.dtype == make_like(kit, as_, bits, group).dtype
        assert kit.bits(found) == kit.cut(bits, SHARD).tobytes()


def make_like(kit: Any, as_: str, bits: Any, group: Any) -> Any:
    return (kit.numpy if as_ == "numpy" else kit.torch)(bits, group)


def test_signalling_nans_keep_their_payload(kit: Any) -> None:
    group = kit.group(dtype="F32")
    bits = np.full((4, 3, 2, 4, 8), 0x7FA12345, "u4")  # a conversion would set the quiet bit
    for array in (kit.numpy(bits, group), kit.torch(bits, group)):
        assert (as_bits(array, layout_of(group), whole(group)) == 0x7FA12345).all()


def test_tensors_that_need_gradients_and_parameters_are_fine(kit: Any) -> None:
    group = kit.group(dtype="F32")
    array = torch.nn.Parameter(kit.torch(kit.kv(group), group))
    assert as_bits(array, layout_of(group), whole(group)).tobytes() == kit.kv(group).tobytes()


@pytest.mark.parametrize("form", ["numpy", "torch"])
def test_wrong_dtype_is_named(kit: Any, form: str) -> None:
    group, other = kit.group(dtype="BF16"), kit.group(dtype="F16")
    array = make_like(kit, form, kit.kv(other), other)
    with pytest.raises(ConfigError, match=r"'full', heads 0:4, layers 0:3: dtype is .*float16, must be .*bfloat16"):
        as_bits(array, layout_of(group), whole(group))


def test_raw_bytes_are_not_taken_for_float8(kit: Any) -> None:
    group = kit.group(dtype="F8_E4M3")
    with pytest.raises(ConfigError, match="uint8, must be float8_e4m3fn"):
        as_bits(kit.kv(group), layout_of(group), whole(group))


def test_big_endian_is_refused(kit: Any) -> None:
    group = kit.group(dtype="F16")
    with pytest.raises(ConfigError, match=">f2, must be float16"):
        as_bits(kit.kv(group).view(">f2"), layout_of(group), whole(group))


def test_wrong_shape_is_named(kit: Any) -> None:
    group = kit.group()
    array = kit.numpy(kit.kv(group), group)
    wanted = r"heads 1:3, layers 1:3: shape is \[4, 3, 2, 4, 8\], must be \[2, 2, 2, 4, 8\] \(heads, layers, parts"
    with pytest.raises(ConfigError, match=wanted):
        as_bits(array, layout_of(group), SHARD)
    latent = kit.group("latent", "latent", heads=1, parts=(Part("latent", 8), Part("rope", 2)))
    with pytest.raises(ConfigError, match=r"must be \[1, 3, 4, 10\] \(heads, layers, tokens, dims of all parts\)"):
        as_bits(array, layout_of(latent), whole(latent))


@pytest.mark.parametrize("thing", [[1.0], None, b"bytes", memoryview(b"bytes")])
def test_other_things_are_refused(kit: Any, thing: Any) -> None:
    group = kit.group()
    with pytest.raises(ConfigError, match="must be a numpy array or a torch tensor"):
        as_bits(thing, layout_of(group), whole(group))


def test_empty_shards_have_empty_arrays(kit: Any) -> None:
    group, nothing = kit.group(dtype="BF16"), Shard(range(2, 4), range(0))
    layout = layout_of(group)
    for as_ in ("numpy", "torch"):
        array = from_bits(read_cells({}, layout, nothing), group, as_)
        assert tuple(array.shape) == (2, 0, 2, 4, 8)
        write_cells(bytearray(layout.nbytes), layout, nothing, as_bits(array, layout, nothing))
