"""Workers' reports of any TP and PP become the same geometry, with every cell written once."""

from dataclasses import replace

import pytest

from tplayout.errors import ConfigError, GeometryError
from tplayout.format.sharding import head_range
from tplayout_vllm.metadata import LayerReport, WorkerReport
from tplayout_vllm.placement import place


def layer(index: int, heads: int, window: int | None = None, table: int = 0) -> LayerReport:
    return LayerReport(
        f"model.layers.{index}.self_attn.attn", index, table, heads, (("k", 64), ("v", 64)), "BF16", window, False,
        None, "page",
    )  # fmt: skip


def reports(kv_heads: int, tp: int, stages: list[range]) -> dict[tuple[int, int], WorkerReport]:
    heads = len(head_range(kv_heads, tp, 0))
    return {
        (pp, rank): WorkerReport(tuple(layer(i, heads) for i in numbers))
        for pp, numbers in enumerate(stages)
        for rank in range(tp)
    }


@pytest.mark.parametrize(
    ("tp", "stages"),
    [
        (1, [range(6)]),
        (2, [range(6)]),
        (4, [range(6)]),
        (8, [range(6)]),
        (12, [range(6)]),
        (2, [range(4), range(4, 6)]),
    ],
)
def test_geometry_does_not_depend_on_the_split(tp: int, stages: list[range]) -> None:
    one = place(reports(4, 1, [range(6)]), 256, 4, 1)
    split = place(reports(4, tp, stages), 256, 4, tp)
    assert split.geometry == one.geometry
    assert split.places == one.places
    assert len(split.writers[0]) == min(tp, 4) * len(stages)


def test_windows_and_full_layers_are_two_groups() -> None:
    rows = tuple(layer(i, 2, None if i == 2 else 128, table=i) for i in range(3))
    placed = place({(0, 0): WorkerReport(rows)}, 64, 2, 1)
    assert [(g.name, g.layers) for g in placed.geometry.groups] == [("window-128", (0, 1)), ("full", (2,))]
    assert placed.tables == ((0, 1), (2,))
    assert placed.places["model.layers.1.self_attn.attn"] == (0, 1)


def test_latents_are_one_head_written_by_one_rank() -> None:
    row = replace(layer(0, 1), latent=True, parts=(("latent", 512), ("rope", 64)))
    placed = place({(0, r): WorkerReport((row,)) for r in range(4)}, 64, 16, 4)
    assert (placed.geometry.groups[0].heads, placed.writers) == (1, (((0, 0),),))


def test_scales_are_part_of_the_geometry() -> None:
    rows = tuple(replace(layer(i, 4), dtype="F8_E4M3", scales=(0.5, 2.0 + i)) for i in range(2))
    placed = place({(0, 0): WorkerReport(rows)}, 64, 4, 1)
    assert placed.geometry.groups[0].scales == ((0.5, 2.0), (0.5, 3.0))


def test_ranks_that_disagree_are_refused() -> None:
    ranks = reports(4, 2, [range(2)])
    ranks[0, 1] = WorkerReport((replace(layer(0, 2), dtype="F16"), layer(1, 2)))
    with pytest.raises(ConfigError, match=r"pp0 tp1 sees layer model\.layers\.0"):
        place(ranks, 256, 4, 2)


def test_two_caches_of_one_layer_are_refused() -> None:
    """As models with an indexer beside their attention have them."""
    rows = (layer(0, 4), replace(layer(0, 4), name="model.layers.0.self_attn.indexer.k_cache"))
    with pytest.raises(ConfigError, match=r"self_attn\.attn and .*k_cache have the same number"):
        place({(0, 0): WorkerReport(rows)}, 256, 4, 1)


def test_a_split_of_heads_that_is_not_vllm_s_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"has 3 KV heads a rank where 4 heads over TP=2 give 2"):
        place({(0, r): WorkerReport((layer(0, 3),)) for r in range(2)}, 256, 4, 2)


def test_a_missing_rank_is_refused() -> None:
    ranks = reports(4, 2, [range(2)])
    del ranks[0, 1]
    with pytest.raises(GeometryError, match="missing"):
        place(ranks, 256, 4, 2)


def test_no_layers_is_refused() -> None:
    with pytest.raises(ConfigError, match="no worker reported"):
        place({(0, 0): WorkerReport(())}, 256, 4, 1)
