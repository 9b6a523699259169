"""KV values of one dtype as another, with the error measured.

A quantised group's value is the stored number times its scale. What exceeds the new dtype's range becomes its largest
finite value, as engines do it, and is counted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from tplayout.admin.transfer import Bits, part_of
from tplayout.errors import ConfigError
from tplayout.format.geometry import Group

_NUMPY: dict[str, Any] = {
    "F32": np.dtype("f4"),
    "F16": np.dtype("f2"),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
}
_LARGEST = {
    "F32": 3.4028234663852886e38,
    "F16": 65504.0,
    "BF16": 3.3895313892515355e38,
    "F8_E4M3": 448.0,
    "F8_E5M2": 57344.0,
}
_EXACT = {
    "F32": {"F32"},
    "F16": {"F16", "F32"},
    "BF16": {"BF16", "F32"},
    "F8_E4M3": {"F8_E4M3", "F16", "BF16", "F32"},
    "F8_E5M2": {"F8_E5M2", "F16", "BF16", "F32"},
    "U8": {"U8"},
}


class Losses:
    """Measured errors of a conversion: the largest and mean absolute difference, and how many values were clamped."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._sum = 0.0
        self.max = 0.0
        self.count = 0
        self.clamped = 0
        self.largest = 0.0  # of the values before, to judge the errors by

    @property
    def mean(self) -> float:
        """Mean absolute error; 0 if nothing was converted."""
        return self._sum / self.count if self.count else 0.0

    def add(self, before: NDArray[Any], after: NDArray[Any], clamped: int) -> None:
        """Count values; NaN and infinities, which no error describes, are left out."""
        finite = np.isfinite(before)
        errors = np.abs(np.subtract(before, after, dtype="f8", where=finite, out=np.zeros(before.shape)))
        with self._lock:
            self.max = max(self.max, float(errors.max(initial=0.0, where=finite)))
            self.largest = max(self.largest, float(np.abs(before).max(initial=0.0, where=finite)))
            self._sum += float(errors.sum(where=finite))
            self.count += int(finite.sum())
            self.clamped += clamped


@dataclass(frozen=True)
class Converter:
    """Copies cells of one group's dtype into cells of another's. losses: None where nothing can be lost."""

    copy: Callable[[Bits, Bits], None]
    losses: Losses | None

    def __call__(self, cells: Bits, out: Bits) -> None:
        """cells, out: [heads, layers, *cell shape] of equal shape, bits of the old and the new dtype."""
        self.copy(cells, out)


def converted_group(group: Group, dtype: str) -> Group:
    """The group with another dtype; fp8 gets scale 1 everywhere. Raises ConfigError for U8, which has no values."""
    if dtype == group.dtype:
        return group
    for name in (dtype, group.dtype):
        if name not in _NUMPY:
            raise ConfigError(f"group {group.name!r}: {group.dtype} to {dtype}: {name} has no values to convert")
    scales = ((1.0,) * len(group.parts),) * len(group.layers) if dtype.startswith("F8") else None
    return replace(group, dtype=dtype, scales=scales)


def is_lossless(old: Group, new: Group) -> bool:
    """Whether every value of the old dtype is one of the new."""
    if old.dtype == new.dtype:
        return old.scales == new.scales
    return new.dtype in _EXACT[old.dtype] and not _scaled(old)


def _scaled(group: Group) -> bool:
    return any(scale != 1 for row in group.scales or () for scale in row)


def converter(old: Group, new: Group) -> Converter:
    """What copies cells of `old` into cells of `new`, which differs in dtype only."""
    if old.dtype == new.dtype:
        return Converter(_copy, None)
    losses = None if is_lossless(old, new) else Losses()
    scales = _scale_array(old) if _scaled(old) else None

    def convert(cells: Bits, out: Bits) -> None:
        # A cell at a time: the values in between are wider than what is stored.
        for head, layer in np.ndindex(cells.shape[:2]):
            place = (slice(head, head + 1), slice(layer, layer + 1))
            values = cells[place].view(_NUMPY[old.dtype]).astype("f4")
            if scales is not None:
                for part in range(len(old.parts)):
                    part_of(values, old, part)[...] *= scales[head, layer, part]
            limit = _LARGEST[new.dtype]
            beyond = np.isfinite(values) & (np.abs(values) > limit)
            clipped = np.where(beyond, np.copysign(np.float32(limit), values), values)
            stored = clipped.astype(_NUMPY[new.dtype])
            if losses is not None:
                losses.add(values, stored.astype("f4"), int(beyond.sum()))
            out[place] = stored.view(out.dtype)

    return Converter(convert, losses)


def _copy(cells: Bits, out: Bits) -> None:
    out[...] = cells


def _scale_array(group: Group) -> NDArray[Any]:
    """[heads, layers, parts] of float32."""
    parts = len(group.parts)
    scales = np.empty((group.heads, len(group.layers), parts), "f4")
    for layer, row in enumerate(group.scales or ()):
        scales[:, layer] = np.asarray(row, "f4").reshape(-1, parts)
    return scales
