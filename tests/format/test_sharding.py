"""tplayout/format/sharding.py: ranks to cells, and who writes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tplayout.errors import ConfigError, GeometryError
from tplayout.format.geometry import Group, Part
from tplayout.format.sharding import (
    Shard,
    check_cover,
    head_range,
    pp_layer_ranges,
    shard_of,
    whole,
    writes,
)


def group_of(heads: int, layers: tuple[int, ...]) -> Group:
    return Group("full", "full", layers, heads, (Part("k", 1), Part("v", 1)), "F16")


@pytest.mark.parametrize(
    ("heads", "tp", "expected"),
    [
        (8, 1, [(0, 8)]),
        (8, 4, [(0, 2), (2, 4), (4, 6), (6, 8)]),
        (3, 3, [(0, 1), (1, 2), (2, 3)]),
        (3, 6, [(0, 1), (0, 1), (1, 2), (1, 2), (2, 3), (2, 3)]),
        (12, 6, [(0, 2), (2, 4), (4, 6), (6, 8), (8, 10), (10, 12)]),
        (6, 12, [(h, h + 1) for h in range(6) for _ in range(2)]),
        (1, 4, [(0, 1)] * 4),
    ],
)
def test_heads_of_each_rank(heads: int, tp: int, expected: list[tuple[int, int]]) -> None:
    assert [head_range(heads, tp, rank) for rank in range(tp)] == [range(a, b) for a, b in expected]


@pytest.mark.parametrize(
    ("heads", "tp", "rank"),
    [
        (3, 2, 0),
        (8, 3, 0),
        (6, 4, 1),
        (4, 6, 0),
        (0, 1, 0),
        (4, 0, 0),
        (4, 2, 2),
        (4, 2, -1),
        (4, "2", 0),
        (4, None, 0),
        (4, 2, 0.0),
    ],
)
def test_sizes_that_no_engine_splits_are_refused(heads: int, tp: int, rank: int) -> None:
    with pytest.raises(GeometryError):
        head_range(heads, tp, rank)
    with pytest.raises(GeometryError):
        writes(heads, tp, rank)


@pytest.mark.parametrize(
    ("heads", "tp", "expected"),
    [(4, 2, [0, 1]), (2, 4, [0, 2]), (3, 12, [0, 4, 8]), (1, 3, [0]), (4, 4, [0, 1, 2, 3])],
)
def test_the_lowest_replica_writes(heads: int, tp: int, expected: list[int]) -> None:
    """[M5]"""
    assert [rank for rank in range(tp) if writes(heads, tp, rank)] == expected


SPLITS = st.integers(1, 12).flatmap(
    lambda heads: st.tuples(
        st.just(heads),
        st.sampled_from([tp for tp in range(1, 37) if heads % tp == 0 or tp % heads == 0]),
    )
)


@given(SPLITS, st.integers(1, 12), st.data())
def test_writers_tile_every_cell_once(split: tuple[int, int], layers: int, data: st.DataObject) -> None:
    """[M6] Any TP x PP of any group; each head and layer has exactly one writer."""
    heads, tp = split
    stages = pp_layer_ranges(layers, data.draw(st.integers(1, layers)))
    group = group_of(heads, tuple(range(layers)))
    ranks = [(rank, stage) for rank in range(tp) for stage in stages]
    shards = [shard_of(group, tp, rank, stage) for rank, stage in ranks if writes(heads, tp, rank)]
    check_cover(group, shards)
    every = [shard_of(group, tp, rank, stage) for rank, stage in ranks]
    assert {(h, p) for s in every for h in s.heads for p in s.layers} == {
        (h, p) for h in range(heads) for p in range(layers)
    }


@pytest.mark.parametrize(
    ("layers", "pp", "sizes"),
    [
        (4, 2, [2, 2]),
        (5, 2, [3, 2]),
        (10, 4, [2, 3, 3, 2]),
        (9, 4, [2, 2, 3, 2]),
        (11, 4, [3, 3, 3, 2]),
        (61, 8, [7, 7, 8, 8, 8, 8, 8, 7]),
        (3, 4, [1, 1, 1, 0]),
    ],
)
def test_pipeline_stages_are_those_of_vllm(layers: int, pp: int, sizes: list[int]) -> None:
    stages = pp_layer_ranges(layers, pp)
    assert [len(stage) for stage in stages] == sizes
    assert [layer for stage in stages for layer in stage] == list(range(layers))


def test_pipeline_stages_equal_vllms_own_function() -> None:
    from vllm.distributed.utils import get_pp_indices

    for layers in range(1, 40):
        for pp in range(1, layers + 1):
            theirs = [range(*get_pp_indices(layers, rank, pp)) for rank in range(pp)]
            assert pp_layer_ranges(layers, pp) == theirs


def test_an_explicit_partition_is_taken_as_it_is() -> None:
    assert pp_layer_ranges(10, 3, [1, 6, 3]) == [range(1), range(1, 7), range(7, 10)]
    for wrong in ([5, 4], [5, 5, 0, 0], [11, -1, 0], []):
        with pytest.raises(GeometryError, match="partition"):
            pp_layer_ranges(10, 3, wrong)
    for layers, pp in ((0, 1), (4, 0)):
        with pytest.raises(GeometryError):
            pp_layer_ranges(layers, pp)


def test_layers_of_a_stage_become_positions_in_the_group() -> None:
    group = group_of(4, (5, 11, 17, 23))
    assert shard_of(group, 2, 1) == Shard(range(2, 4), range(4))
    assert shard_of(group, 2, 0, range(12)) == Shard(range(2), range(2))
    assert shard_of(group, 4, 3, [11, 17, 99]) == Shard(range(3, 4), range(1, 3))
    assert shard_of(group, 1, 0, range(6, 11)).cells == 0
    with pytest.raises(GeometryError, match="11 is missing"):
        shard_of(group, 1, 0, [5, 17])


def test_cover_names_what_is_missing_or_twice() -> None:
    """[M6]"""
    group = group_of(4, (3, 7))
    left, right = Shard(range(2), range(2)), Shard(range(2, 4), range(2))
    check_cover(group, [left, right, Shard(range(0), range(2))])
    with pytest.raises(GeometryError, match="4 cells missing, the first is head 2, layer 3"):
        check_cover(group, [left])
    with pytest.raises(GeometryError, match="1 cells written twice, the first is head 3, layer 7"):
        check_cover(group, [left, right, Shard(range(3, 4), range(1, 2))])
    with pytest.raises(GeometryError, match="4 heads and 2 layers"):
        check_cover(group, [Shard(range(5), range(2))])


def test_shards_are_ranges_of_step_one() -> None:
    for heads, layers in ((range(0, 4, 2), range(1)), (range(-1, 2), range(1)), (range(1), [0])):
        with pytest.raises(GeometryError):
            Shard(heads, layers)  # type: ignore[arg-type]
    assert whole(group_of(3, (0, 1))) == Shard(range(3), range(2))


def test_what_is_no_group_is_refused() -> None:
    for call in (lambda: shard_of("full", 1, 0), lambda: whole(None)):  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match="group must be a Group"):
            call()
