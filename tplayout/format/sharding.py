"""Which heads and layers a rank holds, and which rank writes what.

Tensor and pipeline parallelism exist only here: nothing that is stored depends on them. The rules are vLLM's
(`QKVParallelLinear`, `get_pp_indices`), stated as arithmetic.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from tplayout.arguments import check_type
from tplayout.errors import GeometryError
from tplayout.format.geometry import Group


@dataclass(frozen=True)
class Shard:
    """A rectangle of cells. heads: KV heads of the whole model; layers: POSITIONS in `Group.layers`.

    Both are ranges of step 1; either may be empty.
    """

    heads: range
    layers: range

    def __post_init__(self) -> None:
        for name, span in (("heads", self.heads), ("layers", self.layers)):
            if not isinstance(span, range) or span.step != 1 or span.start < 0:
                raise GeometryError(f"shard {name} is {span!r}, must be a range of step 1 from 0 or more")

    @property
    def cells(self) -> int:
        """Number of cells."""
        return len(self.heads) * len(self.layers)


def whole(group: Group) -> Shard:
    """All cells of a group. ConfigError for what is no group."""
    _check_group(group)
    return Shard(range(group.heads), range(len(group.layers)))


def head_range(num_heads: int, tp_size: int, tp_rank: int) -> range:
    """KV heads of one rank: H/TP contiguous ones, or one replicated head when TP exceeds H.

    Raises GeometryError for sizes that no engine splits (neither divides the other).
    """
    numbers = all(isinstance(number, int) for number in (num_heads, tp_size, tp_rank))
    if not numbers or num_heads < 1 or tp_size < 1 or not 0 <= tp_rank < tp_size:
        raise GeometryError(f"no rank {tp_rank!r} of TP size {tp_size!r} over {num_heads!r} KV heads")
    if num_heads % tp_size == 0:
        each = num_heads // tp_size
        return range(tp_rank * each, (tp_rank + 1) * each)
    if tp_size % num_heads == 0:
        head = tp_rank // (tp_size // num_heads)
        return range(head, head + 1)
    raise GeometryError(f"TP size {tp_size} cannot split {num_heads} KV heads: one must be a multiple of the other")


def writes(num_heads: int, tp_size: int, tp_rank: int) -> bool:
    """Whether this rank writes its heads: of the replicas of a head the first does, always."""
    head_range(num_heads, tp_size, tp_rank)
    replicas = max(1, tp_size // num_heads)
    return tp_rank % replicas == 0


def pp_layer_ranges(num_layers: int, pp_size: int, partition: Sequence[int] | None = None) -> list[range]:
    """Layer numbers of each pipeline stage, as vLLM assigns them.

    Without `partition` each stage gets num_layers // pp_size, and the remaining layers go one each to the
    stages before the last, counted from its side. `partition` is VLLM_PP_LAYER_PARTITION: layers a stage.
    """
    if num_layers < 1 or pp_size < 1:
        raise GeometryError(f"cannot split {num_layers} layers over {pp_size} pipeline stages")
    if partition is None:
        sizes = [num_layers // pp_size] * pp_size
        for back in range(2, num_layers % pp_size + 2):
            sizes[-back] += 1
    else:
        sizes = list(partition)
        if len(sizes) != pp_size or sum(sizes) != num_layers or min(sizes) < 0:
            raise GeometryError(f"partition {sizes} does not split {num_layers} layers over {pp_size} stages")
    starts = [sum(sizes[:stage]) for stage in range(pp_size)]
    return [range(start, start + size) for start, size in zip(starts, sizes, strict=True)]


def shard_of(group: Group, tp_size: int, tp_rank: int, layer_numbers: Iterable[int] | range | None = None) -> Shard:
    """The cells of one rank. layer_numbers: the model's layers on its pipeline stage, None for all.

    Numbers that are not in the group (other groups' layers) are ignored. Raises GeometryError if what
    remains is not contiguous in the group, ConfigError for what is no group.
    """
    _check_group(group)
    heads = head_range(group.heads, tp_size, tp_rank)
    if layer_numbers is None:
        return Shard(heads, range(len(group.layers)))
    wanted = set(layer_numbers)
    positions = [position for position, layer in enumerate(group.layers) if layer in wanted]
    if not positions:
        return Shard(heads, range(0))
    layers = range(positions[0], positions[-1] + 1)
    if len(layers) != len(positions):
        gap = next(group.layers[position] for position in layers if position not in positions)
        raise GeometryError(f"group {group.name!r}: layers of a rank are not contiguous, {gap} is missing")
    return Shard(heads, layers)


def _check_group(group: Group) -> None:
    check_type("group", group, Group, "a Group, one of identity.geometry.groups")


def check_cover(group: Group, shards: Iterable[Shard]) -> None:
    """Check that the writers' shards tile every cell of the group exactly once.

    Raises GeometryError that says how many cells are missing or written twice, and names the first.
    """
    layers = len(group.layers)
    counts = bytearray(group.heads * layers)
    for shard in shards:
        if shard.cells and (shard.heads.stop > group.heads or shard.layers.stop > layers):
            raise GeometryError(
                f"group {group.name!r} has {group.heads} heads and {layers} layers, "
                f"the shard is {shard.heads} x {shard.layers}"
            )
        for head in shard.heads:
            for layer in shard.layers:
                counts[head * layers + layer] = min(2, counts[head * layers + layer] + 1)
    for fault, count in (("missing", 0), ("written twice", 2)):
        if counts.count(count):
            head, layer = divmod(counts.index(count), layers)
            raise GeometryError(
                f"group {group.name!r}: {counts.count(count)} cells {fault}, "
                f"the first is head {head}, layer {group.layers[layer]}"
            )
