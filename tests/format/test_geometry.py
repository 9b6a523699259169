"""tplayout/format/geometry.py: what is a geometry, and what is refused."""

import copy
import dataclasses
from typing import Any

import pytest

from tplayout.errors import GeometryError
from tplayout.format import geometry as g
from tplayout.format.geometry import Geometry, Group, Part

KV = (Part("k", 64), Part("v", 64))
FULL = Group("full", "full", (0, 1, 2), 4, KV, "BF16")


@pytest.mark.parametrize(
    ("group", "shape", "nbytes"),
    [
        (FULL, (2, 16, 64), 2 * 16 * 64 * 2),
        (Group("w", "window", (3,), 1, KV, "F8_E4M3", window=128), (2, 16, 64), 2 * 16 * 64),
        (Group("mla", "latent", (0,), 1, (Part("c", 512), Part("rope", 64)), "F32"), (16, 576), 16 * 576 * 4),
        (Group("one", "latent", (0,), 1, (Part("c", 576),), "F16"), (1, 16, 576), 16 * 576 * 2),
        (Group("ssm", "state", (5,), 8, (Part("conv", 12), Part("ssm", 100)), "U8"), (1, 112), 112),
    ],
)
def test_cell_shape_and_bytes(group: Group, shape: tuple[int, ...], nbytes: int) -> None:
    """[M4] The order of elements within a cell, for each kind."""
    assert group.cell_shape(16) == shape
    assert group.cell_bytes(16) == nbytes


def test_json_round_trip_keeps_every_field() -> None:
    groups = (
        dataclasses.replace(FULL, scales=((0.5, 1.0), (0.25, 2.0), (1.0, 1.0)), dtype="F8_E5M2"),
        Group("draft.full", "full", (0,), 2, KV, "F16", scales=((1.0, 2.0, 3.0, 4.0),)),
        Group("w", "window", (7,), 2, KV, "F16", window=4096),
    )
    geometry = Geometry(256, groups)
    document = geometry.to_json()
    assert Geometry.from_json(document) == geometry
    assert set(document["groups"][0]) == {f.name for f in dataclasses.fields(Group)}
    assert [geometry.group_index(name) for name in ("full", "draft.full", "w")] == [0, 1, 2]
    with pytest.raises(GeometryError, match="no group 'x'"):
        geometry.group_index("x")


BAD_GROUPS = [
    ("name", ""),
    ("name", "Full"),
    ("name", "a..b"),
    ("name", "a/b"),
    ("name", "x" * 65),
    ("name", 3),
    ("kind", "other"),
    ("kind", ["full"]),
    ("layers", ()),
    ("layers", (1, 1)),
    ("layers", (2, 1)),
    ("layers", (-1,)),
    ("layers", (True,)),
    ("layers", (1.0,)),
    ("layers", [0, 1]),
    ("layers", tuple(range(g.MAX_LAYERS + 1))),
    ("layers", (g.MAX_LAYER_NUMBER + 1,)),
    ("heads", 0),
    ("heads", True),
    ("heads", g.MAX_HEADS + 1),
    ("parts", ()),
    ("parts", ("k", "v")),
    ("parts", (Part("k", 1), Part("k", 2))),
    ("parts", tuple(Part(f"p{i}", 1) for i in range(g.MAX_PARTS + 1))),
    ("dtype", "auto"),
    ("dtype", ["BF16"]),
    ("window", 4),
    ("scales", ((1.0, 1.0),)),
    ("scales", ((1.0,), (1.0,), (1.0,))),
    ("scales", ((1.0, 0.0),) * 3),
    ("scales", ((1.0, -1.0),) * 3),
    ("scales", ((1.0, float("nan")),) * 3),
    ("scales", ((1.0, float("inf")),) * 3),
    ("scales", ((1.0, True),) * 3),
    ("scales", ((1.0, "1"),) * 3),
]


@pytest.mark.parametrize(("field", "value"), BAD_GROUPS)
def test_impossible_groups_are_refused_by_field(field: str, value: Any) -> None:
    """[M7]"""
    with pytest.raises(GeometryError, match=field.rstrip("s")):
        dataclasses.replace(FULL, **{field: value})


@pytest.mark.parametrize("dim", [0, -1, g.MAX_DIM + 1, 1.0, True, "1"])
def test_impossible_dims_are_refused(dim: Any) -> None:
    """[M7]"""
    with pytest.raises(GeometryError, match="dim"):
        Part("k", dim)


@pytest.mark.parametrize("window", [None, 0, -1, 2**31, 1.5])
def test_window_groups_need_a_window(window: Any) -> None:
    with pytest.raises(GeometryError, match="window"):
        Group("w", "window", (0,), 1, KV, "F16", window=window)


@pytest.mark.parametrize("tokens", [0, -1, g.MAX_CHUNK_TOKENS + 1, True, 256.0])
def test_impossible_chunk_sizes_are_refused(tokens: Any) -> None:
    """[M7]"""
    with pytest.raises(GeometryError, match="chunk_tokens"):
        Geometry(tokens, (FULL,))


def test_groups_are_one_or_more_of_different_names() -> None:
    """[M7]"""
    many = tuple(dataclasses.replace(FULL, name=f"g{i}") for i in range(g.MAX_GROUPS + 1))
    for groups in ((), (FULL, FULL), [FULL], (5,), many):
        with pytest.raises(GeometryError, match="groups"):
            Geometry(16, groups)  # type: ignore[arg-type]


def test_cells_over_two_gib_are_refused() -> None:
    """[M7]"""
    wide = Group("g", "full", (0,), 1, (Part("k", 2**20),), "F32")
    Geometry(512, (wide,))
    with pytest.raises(GeometryError, match="2 GiB"):
        Geometry(513, (wide,))


def _paths(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    children = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path, *(p for key, child in children for p in _paths(child, (*path, key)))]


@pytest.mark.parametrize("junk", [None, True, -1, 1.5, "x", [], {}, [[]], [{}], "\ud800", 10**30, {"a": 1}])
def test_hostile_documents_raise_nothing_but_geometry_errors(junk: Any) -> None:
    """[M7] Every value of a valid document is replaced in turn."""
    scaled = dataclasses.replace(FULL, scales=((0.5, 1.0),) * 3)
    document = Geometry(4, (scaled, Group("w", "window", (7,), 2, KV, "F16", window=9))).to_json()
    for path in _paths(document):
        hostile = copy.deepcopy(document)
        if path:
            target = hostile
            for step in path[:-1]:
                target = target[step]
            target[path[-1]] = junk
        else:
            hostile = junk
        try:
            Geometry.from_json(hostile)
        except GeometryError:
            continue
        assert path[-1] in ("window", "scales", "chunk_tokens") or "scales" in path or "name" in path, path


@pytest.mark.parametrize("where", ["geometry", "group", "part"])
def test_unknown_and_missing_members_are_refused(where: str) -> None:
    document = Geometry(4, (FULL,)).to_json()
    target = {"geometry": document, "group": document["groups"][0], "part": document["groups"][0]["parts"][0]}
    target[where]["tp_size"] = 4
    with pytest.raises(GeometryError, match="tp_size"):
        Geometry.from_json(document)
    del target[where]["tp_size"]
    target[where].popitem()
    with pytest.raises(GeometryError, match="members"):
        Geometry.from_json(document)


def test_a_window_counts_the_token_that_looks_through_it() -> None:
    """Token 7 with a window of 4 attends to tokens 4 to 7, of which 7 is not computed yet."""
    assert [g.window_start(7, window) for window in (1, 4, 7, 8, 100)] == [7, 4, 1, 0, 0]
    assert g.window_start(0, 4) == 0
