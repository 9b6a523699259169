"""From the workers' reports to one geometry: groups of equal layers, who holds which cells, who writes them.

Layer: scheduler side, pure. The geometry it builds is the same for every TP and PP size of a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tplayout.errors import ConfigError
from tplayout.format.geometry import Geometry, Group, Part, default_chunk_tokens
from tplayout.format.sharding import check_cover, shard_of, writes
from tplayout_vllm.metadata import LayerReport, WorkerReport

Rank = tuple[int, int]  # (pp_rank, tp_rank)


@dataclass(frozen=True)
class Placement:
    """The geometry; layer name -> (group, position); a group, the ranks that write its cells; and for each group the
    vLLM KV-cache groups that hold it."""

    geometry: Geometry
    places: dict[str, tuple[int, int]]
    writers: tuple[tuple[Rank, ...], ...]
    tables: tuple[tuple[int, ...], ...]


def place(reports: Mapping[Rank, WorkerReport], chunk_tokens: int | None, kv_heads: int, tp_size: int) -> Placement:
    """Join what the ranks report. chunk_tokens: None for the default. kv_heads: of the whole model.

    Raises ConfigError where the ranks disagree.
    """
    layers = _merge(reports)
    members: dict[tuple[object, ...], list[LayerReport]] = {}
    for layer in sorted(layers.values(), key=lambda x: x.index):
        members.setdefault((layer.latent, layer.window, layer.parts, layer.dtype, layer.heads), []).append(layer)
    groups = [_group(rows, kv_heads, tp_size) for rows in members.values()]
    groups = [Group(**{**vars(g), "name": _unique(g.name, [h.name for h in groups[:i]])}) for i, g in enumerate(groups)]
    places = {x.name: (g, p) for g, rows in enumerate(members.values()) for p, x in enumerate(rows)}
    held = {rank: {layer.index for layer in report.layers} for rank, report in reports.items()}
    writers = tuple(_writers(group, held, tp_size) for group in groups)
    tables = tuple(tuple(sorted({x.table for x in rows})) for rows in members.values())
    chunk_tokens = chunk_tokens or default_chunk_tokens(group.window for group in groups)
    return Placement(Geometry(chunk_tokens, tuple(groups)), places, writers, tables)


def _merge(reports: Mapping[Rank, WorkerReport]) -> dict[int, LayerReport]:
    layers: dict[int, LayerReport] = {}
    for rank, report in sorted(reports.items()):
        for layer in report.layers:
            other = layers.setdefault(layer.index, layer)
            if other.name != layer.name:
                raise ConfigError(
                    f"layers {other.name} and {layer.name} have the same number: TPLayoutConnector does not support "
                    "models with several caches a layer"
                )
            if other != layer:
                raise ConfigError(
                    f"rank pp{rank[0]} tp{rank[1]} sees layer {layer.name} as {layer}, another rank as {other}: "
                    "TPLayoutConnector needs ranks that agree"
                )
    if not layers:
        raise ConfigError("no worker reported an attention layer: there is no KV for TPLayoutConnector to store")
    return layers


def _group(rows: list[LayerReport], kv_heads: int, tp_size: int) -> Group:
    first = rows[0]
    heads = 1 if first.latent else kv_heads
    expected = 1 if first.latent else max(1, kv_heads // tp_size)
    if first.heads != expected:
        raise ConfigError(
            f"layer {first.name} has {first.heads} KV heads a rank where {heads} heads over TP={tp_size} give "
            f"{expected}: TPLayoutConnector does not know this split"
        )
    kind = "latent" if first.latent else "full" if first.window is None else "window"
    scales = tuple(x.scales for x in rows if x.scales is not None)
    return Group(
        name=kind if first.window is None else f"window-{first.window}",
        kind=kind,  # type: ignore[arg-type]
        layers=tuple(x.index for x in rows),
        heads=heads,
        parts=tuple(Part(name, dim) for name, dim in first.parts),
        dtype=first.dtype,
        window=first.window,
        scales=scales or None,
    )


def _unique(name: str, taken: list[str]) -> str:
    count = sum(other == name for other in taken)
    return name if count == 0 else f"{name}.{count + 1}"


def _writers(group: Group, held: Mapping[Rank, set[int]], tp_size: int) -> tuple[Rank, ...]:
    """The ranks that write a group, checked to write every cell exactly once."""
    shards = {
        rank: shard_of(group, tp_size, rank[1], numbers)
        for rank, numbers in sorted(held.items())
        if writes(group.heads, tp_size, rank[1])
    }
    shards = {rank: shard for rank, shard in shards.items() if shard.cells}
    check_cover(group, shards.values())
    return tuple(shards)
