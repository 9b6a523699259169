"""Groups and identities of few small cells, which the tests of the cache and of the tools share."""

from __future__ import annotations

from typing import Any

from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.identity import Identity

KV = (Part("k", 8), Part("v", 8))


class Shapes:
    """What a test's kit begins with."""

    @staticmethod
    def group(name: str = "full", kind: Any = "full", dtype: str = "F16", heads: int = 4, **fields: Any) -> Group:
        return Group(name, kind, fields.pop("layers", (0, 1, 2)), heads, fields.pop("parts", KV), dtype, **fields)

    @staticmethod
    def identity(*groups: Group, chunk_tokens: int = 4, weights: str = "files:00") -> Identity:
        """Of one group, unless others are given."""
        geometry = Geometry(chunk_tokens, groups or (Shapes.group(),))
        return Identity(weights, {"rope_theta": 10000.0}, "float16", None, geometry)
