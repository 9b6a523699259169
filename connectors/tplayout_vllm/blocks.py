"""Which tokens of a request have a block: window layers give theirs back while the request runs.

Layer: scheduler side, pure. A block id of 0 is the engine's null block: it stands for tokens without KV and is
never read or written.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

NULL_BLOCK = 0
BlockTables = tuple[list[int], ...]


@dataclass(frozen=True)
class Tables:
    """block_sizes: tokens a block, by KV-cache group. of_group: the KV-cache groups that hold each canonical group.

    kept: KV-cache groups that give no block back before a request ends, whatever the windows of their layers.
    """

    block_sizes: tuple[int, ...]
    of_group: tuple[tuple[int, ...], ...]
    kept: frozenset[int] = frozenset()

    def has(self, tables: BlockTables, group: int, first: int, last: int) -> bool:
        """Whether every token of [first, last) has a block in every table of the group."""
        return all(_covers(tables[table], self.block_sizes[table], first, last) for table in self.of_group[group])

    def filled(self, end: int) -> tuple[int, ...]:
        """The KV-cache groups in which a block ends at token `end`."""
        stored = {table for tables in self.of_group for table in tables}
        return tuple(sorted(table for table in stored if end % self.block_sizes[table] == 0))

    def block_start(self, group: int, token: int) -> int:
        """The first token of the block that holds `token`: the engine takes a block for whole or not at all."""
        return min(token // self.block_sizes[table] * self.block_sizes[table] for table in self.of_group[group])

    def first_held(self, tables: BlockTables, group: int, first: int, last: int) -> int:
        """The first token from `first` on behind which all up to `last` have blocks."""
        held = first
        for table in self.of_group[group]:
            size, ids = self.block_sizes[table], tables[table]
            for index in range(first // size, -(-last // size)):
                if index >= len(ids) or ids[index] == NULL_BLOCK:
                    held = max(held, (index + 1) * size)
        return min(held, last)


def _covers(ids: Sequence[int], size: int, first: int, last: int) -> bool:
    begin, end = first // size, -(-last // size)
    return end <= len(ids) and NULL_BLOCK not in ids[begin:end]
