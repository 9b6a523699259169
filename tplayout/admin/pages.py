"""Engine pages as canonical KV: where an element is in a page of a stated order, and whether the statement can be true.

Files that hold raw pages say little about them. What the user states is checked against the values: a token's V in the
first layer depends on the token alone, so equal tokens must have equal V there, at whatever position; and values of one
dtype that are read as another have a spread of magnitudes that no KV has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tplayout.admin.transfer import Bits, part_of
from tplayout.errors import ConfigError, GeometryError
from tplayout.format.geometry import Geometry, Group

# order -> axes of a page of K and V: h head, t token, d element, s K or V. "cpu" has K by element, V by token.
ORDERS: Mapping[str, str] = {"nhd": "thsd", "hnd": "htsd", "split-nhd": "sthd", "split-hnd": "shtd", "cpu": ""}

_FLOATS: Mapping[str, Any] = {
    "F32": np.dtype("f4"),
    "F16": np.dtype("f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_SAME, _APART = 0.05, 0.2  # mean difference of V, relative to its mean size: of equal tokens, of different ones
_SPREAD = (0.7, 5.0)  # standard deviation of log2 of the magnitudes; 1.6 for a normal distribution
_MAX_PAIRS = 64

ReadPage = Callable[[int, int], Sequence[tuple[range, bytes]]]


def only_group(geometry: Geometry) -> Group:
    """The one group of a model whose pages these formats can hold. Raises GeometryError that says why not."""
    groups = geometry.groups
    if len(groups) != 1 or groups[0].kind != "full":
        kinds = ", ".join(f"{group.name} ({group.kind})" for group in groups)
        raise GeometryError(f"this format is converted for models with one full-attention group; there is {kinds}")
    dims = {part.dim for part in groups[0].parts}
    if len(groups[0].parts) != 2 or len(dims) != 1:
        raise GeometryError(f"group {groups[0].name!r} does not hold K and V of one size")
    return groups[0]


def page_bytes(group: Group, heads: int, tokens: int) -> int:
    """Bytes of a page of one layer with so many heads and tokens."""
    return 2 * heads * tokens * group.parts[0].dim * group.element_bytes


def split_page(data: bytes, group: Group, order: str, heads: int, tokens: int) -> tuple[Bits, Bits]:
    """K and V of a page, as views [heads, tokens, dim]. order: of ORDERS."""
    dim = group.parts[0].dim
    flat = np.frombuffer(data, f"u{group.element_bytes}")
    if order == "cpu":
        halves = flat.reshape(heads, 2, tokens * dim)
        return halves[:, 0].reshape(heads, dim, tokens).transpose(0, 2, 1), halves[:, 1].reshape(heads, tokens, dim)
    axes = ORDERS[order]
    sizes = {"h": heads, "t": tokens, "d": dim, "s": 2}
    page = flat.reshape([sizes[axis] for axis in axes]).transpose([axes.index(axis) for axis in "shtd"])
    return page[0], page[1]


def join_page(k: Bits, v: Bits, order: str) -> bytes:
    """Inverse of `split_page`. k, v: [heads, tokens, dim]."""
    if order == "cpu":
        heads = k.shape[0]
        halves = (k.transpose(0, 2, 1).reshape(heads, -1), v.reshape(heads, -1))
        return np.stack(halves, axis=1).tobytes()
    return np.stack((k, v)).transpose(["shtd".index(axis) for axis in ORDERS[order]]).tobytes()


def pages_of_slots(data: bytes, group: Group, heads: int, block_tokens: int) -> bytes:
    """Raw slots [tokens, heads, 2*dim], as connectors copy them, as pages [block, head, slot, 2*dim]."""
    width = 2 * group.parts[0].dim
    slots = np.frombuffer(data, f"u{group.element_bytes}").reshape(-1, block_tokens, heads, width)
    return slots.transpose(0, 2, 1, 3).tobytes()


class PagedSource:
    """A prefix in pages of `block_tokens` tokens; a `Source`."""

    def __init__(self, group: Group, order: str, block_tokens: int, tokens: int, read: ReadPage) -> None:
        """tokens: how many there are, whole pages. read: (number of the page, position of the layer) -> the heads and
        bytes of each piece of the page."""
        if order not in ORDERS:
            raise ConfigError(f"page order {order!r} is unknown: {', '.join(ORDERS)}")
        self.group = group
        self.tokens = tokens
        self._order = order
        self._block = block_tokens
        self._read = read

    def fill(self, group: int, tokens: range, out: Bits) -> bool:
        """See `Source`."""
        if tokens.stop > self.tokens:
            return False
        ks, vs = part_of(out, self.group, 0), part_of(out, self.group, 1)
        for block in range(tokens.start // self._block, -(-tokens.stop // self._block)):
            first = block * self._block
            start, stop = max(tokens.start, first), min(tokens.stop, first + self._block)
            inside, outside = slice(start - first, stop - first), slice(start - tokens.start, stop - tokens.start)
            for layer in range(len(self.group.layers)):
                for heads, data in self._read(block, layer):
                    k, v = split_page(data, self.group, self._order, len(heads), self._block)
                    ks[heads.start : heads.stop, layer, outside] = k[:, inside]
                    vs[heads.start : heads.stop, layer, outside] = v[:, inside]
        return True

    def first_values(self, token: int) -> tuple[Bits, Bits]:
        """K and V of one token in the first layer, [heads, dim]."""
        dim = self.group.parts[0].dim
        k, v = (np.zeros((self.group.heads, dim), f"u{self.group.element_bytes}") for _ in range(2))
        for heads, data in self._read(token // self._block, 0):
            ks, vs = split_page(data, self.group, self._order, len(heads), self._block)
            k[heads.start : heads.stop] = ks[:, token % self._block]
            v[heads.start : heads.stop] = vs[:, token % self._block]
        return k, v


def check_statement(source: PagedSource, tokens: Sequence[int], stated: str) -> None:
    """ConfigError unless the values are what the statement makes of them. stated: for the message.

    Needs a token that occurs twice; a prompt without one cannot be checked, which is an error too.
    """
    ids = list(tokens[: source.tokens])
    pairs = _pairs(ids)
    if not pairs:
        raise ConfigError(
            f"no token of the prompt occurs twice in its {len(ids)} stored tokens, so nothing shows whether "
            f"{stated} is right: try a longer prompt of the same engine first, or state --unchecked"
        )
    dtype = _FLOATS.get(source.group.dtype)
    if dtype is None:
        raise ConfigError(f"values of dtype {source.group.dtype} cannot be checked")
    wanted = sorted({at for pair in pairs for at in pair})
    read = {at: [bits.view(dtype).astype("f4") for bits in source.first_values(at)] for at in wanted}
    _check_spread(np.stack([value for pair in read.values() for value in pair]), source.group.dtype)
    same = _apart([(read[a][1], read[b][1]) for a, b in pairs])
    others = [(a, b) for a, b in pairwise(wanted) if ids[a] != ids[b]]
    apart = _apart([(read[a][1], read[b][1]) for a, b in others]) if others else np.ones(1)
    # A bias may make some heads alike for all tokens; if most are, this is no V at all.
    if not same.max() <= _SAME or not np.median(apart) >= _APART:
        head = int(same.argmax())
        raise ConfigError(
            f"the values do not fit {stated}: in the first layer equal tokens must have equal V, but in head {head} "
            f"they differ by {same[head]:.0%} (different tokens: by {np.median(apart):.0%}). State what the engine "
            "really had (TP size, block size, page order, tokens)"
        )


def _pairs(ids: Sequence[int]) -> list[tuple[int, int]]:
    """Positions of equal tokens, of as many different tokens as there are, up to _MAX_PAIRS."""
    first: dict[int, int] = {}
    pairs: dict[int, tuple[int, int]] = {}
    for at, token in enumerate(ids):
        if token in first:
            pairs[token] = (first[token], at)  # as far apart as can be
        else:
            first[token] = at
    return list(pairs.values())[:_MAX_PAIRS]


def _apart(pairs: Sequence[tuple[NDArray[Any], NDArray[Any]]]) -> NDArray[Any]:
    """Mean difference of each head, relative to the mean size. pairs: of [heads, dim]."""
    a, b = (np.stack(side) for side in zip(*pairs, strict=True))
    size = (np.abs(a) + np.abs(b)).mean(axis=(0, 2)) / 2
    with np.errstate(invalid="ignore", divide="ignore"):
        found: NDArray[Any] = np.abs(a - b).mean(axis=(0, 2)) / size
    return np.where(np.isfinite(found), found, np.inf)


def _check_spread(values: NDArray[Any], dtype: str) -> None:
    """ConfigError for magnitudes that KV of this dtype does not have."""
    finite = np.isfinite(values)
    sizes = np.abs(values[finite & (values != 0)])
    spread = float(np.log2(sizes).std()) if sizes.size else 0.0
    if finite.all() and _SPREAD[0] <= spread <= _SPREAD[1]:
        return
    bad = int((~finite).sum())
    raise ConfigError(
        f"the values are not KV of dtype {dtype}: {bad} of {values.size} are not finite, and their magnitudes spread "
        f"over {spread:.1f} powers of two (1.6 is usual). State the dtype that the engine really had"
    )
