"""Arrays of a caller on one side, the cells of a chunk object on the other.

Elements are moved as integers of their width, so a NaN keeps its payload and nothing is converted. numpy is
imported with the first array, torch only if the caller uses it.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tplayout.errors import ConfigError
from tplayout.format.chunk import Buffer, piece
from tplayout.format.geometry import Group
from tplayout.format.layout import ChunkLayout
from tplayout.format.sharding import Shard

if TYPE_CHECKING:
    from numpy.typing import NDArray

# safetensors' name -> the name in numpy, ml_dtypes and torch alike
_DTYPES = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "U8": "uint8",
}


def shard_shape(layout: ChunkLayout, shard: Shard) -> tuple[int, ...]:
    """[heads, layers, parts, tokens, dim], or [heads, layers, tokens, dims of all parts] if those are unequal."""
    return (len(shard.heads), len(shard.layers), *layout.group.cell_shape(layout.chunk_tokens))


def as_bits(array: Any, layout: ChunkLayout, shard: Shard) -> NDArray[Any]:
    """A shard's array as unsigned integers, uncopied where it is in host memory. Any strides will do.

    Raises ConfigError unless it is a numpy array or torch tensor of exactly the shard's shape and the group's dtype.
    """
    import numpy as np

    group, width = layout.group, layout.group.element_bytes
    what = f"group {group.name!r}, heads {_span(shard.heads)}, layers {_span(shard.layers)}"
    torch = sys.modules.get("torch")  # a caller that has a tensor has imported it
    if torch is not None and isinstance(array, torch.Tensor):
        _check(what, array.dtype, getattr(torch, _DTYPES[group.dtype]), tuple(array.shape), layout, shard)
        signed = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[width]
        bits: NDArray[Any] = array.detach().view(signed).cpu().numpy()
    elif isinstance(array, np.ndarray):
        _check(what, array.dtype, _numpy_dtype(group), array.shape, layout, shard)
        bits = np.asarray(array)
    else:
        raise ConfigError(f"{what}: a {type(array).__name__}, must be a numpy array or a torch tensor")
    return bits.view(f"u{width}")


def write_cells(buf: bytearray, layout: ChunkLayout, shard: Shard, bits: NDArray[Any]) -> None:
    """Copy a shard's elements to their places in an object. bits: from `as_bits`."""
    import numpy as np

    for row, head in enumerate(shard.heads if shard.cells else ()):
        span = layout.kv_range(head, shard.layers)
        cells = np.frombuffer(buf, bits.dtype, bits[row].size, span.start)
        cells.reshape(bits.shape[1:])[...] = bits[row]


def read_cells(parts: Mapping[range, Buffer], layout: ChunkLayout, shard: Shard) -> NDArray[Any]:
    """A shard's elements as unsigned integers in fresh memory. parts: file range -> bytes, see `verify_shard`."""
    import numpy as np

    bits = np.empty(shard_shape(layout, shard), f"u{layout.group.element_bytes}")
    for row, head in enumerate(shard.heads if shard.cells else ()):
        cells = piece(parts, layout.kv_range(head, shard.layers))
        bits[row] = np.frombuffer(cells, bits.dtype).reshape(bits.shape[1:])
    return bits


def check_kind(as_: str) -> None:
    """ConfigError unless as_ names a library that is installed."""
    if as_ not in ("numpy", "torch"):
        raise ConfigError(f"as_ is {as_!r}, must be 'numpy' or 'torch'")
    if as_ == "torch":
        try:
            import torch  # noqa: F401
        except ImportError as error:
            raise ConfigError(f"as_='torch' needs PyTorch ({error}): pip install 'tplayout[torch]'") from None


def from_bits(bits: NDArray[Any], group: Group, as_: str) -> Any:
    """The same memory as an array or tensor of the group's dtype. as_: "numpy" or "torch"."""
    if as_ == "numpy":
        return bits.view(_numpy_dtype(group))
    import torch

    signed = {1: "u1", 2: "i2", 4: "i4"}[group.element_bytes]
    return torch.from_numpy(bits.view(signed)).view(getattr(torch, _DTYPES[group.dtype]))


def _numpy_dtype(group: Group) -> Any:
    import ml_dtypes
    import numpy as np

    name = _DTYPES[group.dtype]
    return np.dtype(getattr(ml_dtypes, name, name))


def _check(what: str, dtype: Any, wanted_dtype: Any, shape: tuple[int, ...], layout: ChunkLayout, shard: Shard) -> None:
    wanted = shard_shape(layout, shard)
    if shape != wanted:
        axes = "parts, tokens, dim" if len(wanted) == 5 else "tokens, dims of all parts"
        raise ConfigError(f"{what}: shape is {list(shape)}, must be {list(wanted)} (heads, layers, {axes})")
    if dtype != wanted_dtype:
        raise ConfigError(f"{what}: dtype is {dtype}, must be {wanted_dtype}; nothing is converted here")


def _span(numbers: range) -> str:
    return f"{numbers.start}:{numbers.stop}"
