"""What a model's KV cache looks like, whatever engine, device or parallelism holds it.

A geometry is a chunk size and an ordered list of groups of layers. It knows no ranks, blocks or pages.
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, NoReturn, get_args

from tplayout.errors import GeometryError

DTYPE_BYTES: Mapping[str, int] = {"F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "U8": 1}
Kind = Literal["full", "window", "latent", "state"]

MAX_CHUNK_TOKENS = 65536
MAX_GROUPS = 64
MAX_HEADS = 1024
MAX_LAYERS = 1024
MAX_LAYER_NUMBER = 2**20
MAX_PARTS = 16
MAX_DIM = 2**24
MAX_CELL_BYTES = 2**31
MAX_WINDOW = 2**31 - 1

DEFAULT_CHUNK_TOKENS = 256

_NAME = re.compile(r"[a-z0-9_]+(?:[.-][a-z0-9_]+)*")
_MAX_NAME = 64


@dataclass(frozen=True)
class Part:
    """One row of a cell, "k" or "v" or a latent's piece: `dim` elements a token."""

    name: str
    dim: int

    def __post_init__(self) -> None:
        _check_name("part name", self.name)
        _check_int(f"part {self.name!r}: dim", self.dim, 1, MAX_DIM)


@dataclass(frozen=True)
class Group:
    """Layers of one kind, shape and dtype: one object a chunk.

    layers: the model's layer numbers, ascending. window: tokens, for kind "window" only. scales: for
    quantised dtypes, one row a layer: a factor a part, or a factor a head and part (head-major).
    """

    name: str
    kind: Kind
    layers: tuple[int, ...]
    heads: int
    parts: tuple[Part, ...]
    dtype: str
    window: int | None = None
    scales: tuple[tuple[float, ...], ...] | None = None

    def __post_init__(self) -> None:
        _check_name("group name", self.name)
        where = f"group {self.name!r}: "
        if self.kind not in get_args(Kind):
            _fail(where + "kind", self.kind, "full, window, latent or state")
        _check_layers(where, self.layers)
        _check_int(where + "heads", self.heads, 1, MAX_HEADS)
        if not isinstance(self.parts, tuple) or not 1 <= len(self.parts) <= MAX_PARTS:
            _fail(where + "parts", self.parts, f"a tuple of 1 to {MAX_PARTS} parts")
        if not all(isinstance(part, Part) for part in self.parts):
            _fail(where + "parts", self.parts, "a tuple of Parts")
        if len({part.name for part in self.parts}) != len(self.parts):
            _fail(where + "parts", [part.name for part in self.parts], "parts of different names")
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            _fail(where + "dtype", self.dtype, f"one of {', '.join(DTYPE_BYTES)}")
        if self.kind == "window":
            _check_int(where + "window", self.window, 1, MAX_WINDOW)
        elif self.window is not None:
            _fail(where + "window", self.window, f"no window for kind {self.kind}")
        _check_scales(where, self)

    @property
    def element_bytes(self) -> int:
        """Bytes of one element."""
        return DTYPE_BYTES[self.dtype]

    def cell_shape(self, chunk_tokens: int) -> tuple[int, ...]:
        """Shape of one cell: (parts, T, dim) when all parts are equally wide, else (T, sum of dims).

        T is `chunk_tokens`, and 1 for kind "state": the state after the chunk's last token.
        """
        rows = 1 if self.kind == "state" else chunk_tokens
        dims = {part.dim for part in self.parts}
        if len(dims) == 1:
            return (len(self.parts), rows, dims.pop())
        return (rows, sum(part.dim for part in self.parts))

    def cell_bytes(self, chunk_tokens: int) -> int:
        """Bytes of one cell."""
        return math.prod(self.cell_shape(chunk_tokens)) * self.element_bytes

    def to_json(self) -> dict[str, Any]:
        """Every field, always present: the form that is hashed and stored."""
        return {
            "name": self.name,
            "kind": self.kind,
            "layers": list(self.layers),
            "heads": self.heads,
            "parts": [{"name": part.name, "dim": part.dim} for part in self.parts],
            "dtype": self.dtype,
            "window": self.window,
            "scales": None if self.scales is None else [list(row) for row in self.scales],
        }

    @classmethod
    def from_json(cls, value: Any) -> "Group":
        """Strict inverse of `to_json`; GeometryError names the field."""
        fields = _members("group", value, {"name", "kind", "layers", "heads", "parts", "dtype", "window", "scales"})
        parts = _array("parts", fields["parts"], MAX_PARTS)
        parts = [_members("part", part, {"name", "dim"}) for part in parts]
        scales = fields["scales"]
        if scales is not None:
            rows = _array("scales", scales, MAX_LAYERS)
            scales = tuple(tuple(_array("scales", row, MAX_HEADS * MAX_PARTS)) for row in rows)
        return cls(
            name=fields["name"],
            kind=fields["kind"],
            layers=tuple(_array("layers", fields["layers"], MAX_LAYERS)),
            heads=fields["heads"],
            parts=tuple(Part(part["name"], part["dim"]) for part in parts),
            dtype=fields["dtype"],
            window=fields["window"],
            scales=scales,
        )


@dataclass(frozen=True)
class Geometry:
    """A chunk size in tokens and the groups, in the order that numbers their objects."""

    chunk_tokens: int
    groups: tuple[Group, ...]

    def __post_init__(self) -> None:
        _check_int("chunk_tokens", self.chunk_tokens, 1, MAX_CHUNK_TOKENS)
        if not isinstance(self.groups, tuple) or not 1 <= len(self.groups) <= MAX_GROUPS:
            _fail("groups", self.groups, f"a tuple of 1 to {MAX_GROUPS} groups")
        if not all(isinstance(group, Group) for group in self.groups):
            _fail("groups", self.groups, "a tuple of Groups")
        names = [group.name for group in self.groups]
        if len(set(names)) != len(names):
            _fail("groups", names, "groups of different names")
        for group in self.groups:
            if group.cell_bytes(self.chunk_tokens) > MAX_CELL_BYTES:
                _fail(f"group {group.name!r}: cell", group.cell_bytes(self.chunk_tokens), "at most 2 GiB")

    def group_index(self, name: str) -> int:
        """Position of the group of that name."""
        for index, group in enumerate(self.groups):
            if group.name == name:
                return index
        raise GeometryError(f"no group {name!r}; there is {', '.join(g.name for g in self.groups)}")

    def to_json(self) -> dict[str, Any]:
        """The form that is hashed and stored."""
        return {"chunk_tokens": self.chunk_tokens, "groups": [group.to_json() for group in self.groups]}

    @classmethod
    def from_json(cls, value: Any) -> "Geometry":
        """Strict inverse of `to_json`; GeometryError names the field."""
        fields = _members("geometry", value, {"chunk_tokens", "groups"})
        groups = tuple(Group.from_json(group) for group in _array("groups", fields["groups"], MAX_GROUPS))
        return cls(fields["chunk_tokens"], groups)


def default_chunk_tokens(windows: Iterable[int | None]) -> int:
    """Tokens of a chunk where nobody chose: 256, or the smallest window if that is less.

    windows: of each group or layer, None for full attention. A chunk that is longer than a window has often lost the
    window layers' first tokens by the time it is whole, and is then stored without these layers.
    """
    return min([DEFAULT_CHUNK_TOKENS, *(window for window in windows if window is not None)])


def window_start(tokens: int, window: int) -> int:
    """The first token that token number `tokens` attends to: with those before it, the last `window` of all.

    It is what serving a prefix of `tokens` tokens needs of a window group: the parts from here on.
    """
    return max(0, tokens - window + 1)


def _fail(field: str, value: Any, wanted: str) -> NoReturn:
    raise GeometryError(f"{field} is {repr(value)[:100]}, must be {wanted}")


def _check_int(field: str, value: Any, low: int, high: int) -> None:
    if type(value) is not int or not low <= value <= high:
        _fail(field, value, f"an integer from {low} to {high}")


def _check_name(field: str, value: Any) -> None:
    if not isinstance(value, str) or len(value) > _MAX_NAME or not _NAME.fullmatch(value):
        _fail(field, value, "1 to 64 of a-z 0-9 _ with single . or - between")


def _check_layers(where: str, layers: Any) -> None:
    if not isinstance(layers, tuple) or not 1 <= len(layers) <= MAX_LAYERS:
        _fail(where + "layers", layers, f"a tuple of 1 to {MAX_LAYERS} layer numbers")
    for layer in layers:
        _check_int(where + "layer", layer, 0, MAX_LAYER_NUMBER)
    if any(a >= b for a, b in pairwise(layers)):
        _fail(where + "layers", layers, "ascending without repeats")


def _check_scales(where: str, group: Group) -> None:
    if group.scales is None:
        return
    widths = (len(group.parts), group.heads * len(group.parts))
    if not isinstance(group.scales, tuple) or len(group.scales) != len(group.layers):
        _fail(where + "scales", group.scales, "one row for each layer")
    for row in group.scales:
        if not isinstance(row, tuple) or len(row) not in widths:
            _fail(where + "scales", row, f"a row of {widths[0]} (or {widths[1]}, a head) factors")
        for scale in row:
            if type(scale) not in (int, float) or not math.isfinite(scale) or scale <= 0:
                _fail(where + "scale", scale, "a finite number above 0")


def _members(what: str, value: Any, names: set[str]) -> dict[str, Any]:
    if not isinstance(value, dict):
        _fail(what, value, "a JSON object")
    if value.keys() != names:
        wrong = sorted(map(str, value.keys() ^ names))
        _fail(f"{what} members", sorted(map(str, value)), f"exactly {sorted(names)} (see {wrong[:5]})")
    return value


def _array(field: str, value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        _fail(field, value, f"an array of at most {most}")
    return value
