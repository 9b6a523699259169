"""Which loads may start now, so that those before them get the blocks they still need.

Layer: below scheduler.py. Counts the engine's blocks and takes none.

A request whose prefix is loaded holds blocks before it runs, and the engine takes back blocks only from what runs. If
several hold blocks and none gets its next one, the engine stands still for ever. vLLM therefore starts a load only if
it leaves enough free for those under way, but miscounts that for sliding windows: `Scheduler._request_remaining_blocks`
compares what a window holds at most with the length of the block table, in which blocks that left the window still have
a place, as null blocks. Behind a hit longer than the window nothing seems to be missing (vLLM 0.31 and 0.32). This is
the same rule with the right count; models without windows are left to vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from tplayout_vllm.blocks import BlockTables


@dataclass(frozen=True)
class Table:
    """The blocks of one KV-cache group. block: tokens a block. skipped: tokens without a block before one to compute.

    most: blocks that a request holds at a time, None where it keeps all until it ends.
    """

    block: int
    most: int | None = None
    skipped: Callable[[int], int] = lambda _: 0

    def missing(self, tokens: int, have: int) -> int:
        """Free blocks that a request takes until `tokens` tokens are computed. have: places filled in its table."""
        missing = max(0, -(-tokens // self.block) - have)
        return missing if self.most is None else min(missing, self.most)


def engine_tables(manager: Any) -> tuple[Table, ...]:
    """The tables of vLLM's KVCacheManager."""
    return tuple(
        Table(one.block_size, one.max_admission_blocks_per_request, one.get_num_skipped_tokens)
        for one in manager.coordinator.single_type_managers
    )


class Admission:
    """The loads of one engine. manager: vLLM's KVCacheManager, which holds `tables`.

    ahead: tokens behind a request's last one that a step of speculative decoding needs blocks for.
    """

    def __init__(self, tables: Sequence[Table], manager: Any, ahead: int = 0) -> None:
        self._tables, self._manager, self._ahead = tables, manager, ahead
        self._miscounted = any(table.most is not None for table in tables)
        self._missing: dict[str, int] = {}  # requests with a load and not running yet -> blocks that they still need
        self._first: str | None = None  # was told to wait; nobody else may load before it

    def admits(self, request: Any, local: int, end: int) -> bool:
        """Whether a request may load tokens [local, end) now; `local` ones are held by the engine.

        Always, while no other load holds blocks: what the engine needs of all others ends, or it can take back.
        """
        self._missing.pop(request.request_id, None)  # who asks holds nothing, or not any more
        if self._missing and not self._fits(request, local, end):
            return False
        if self._first == request.request_id:
            self._first = None
        return True

    def allocated(self, request: Any, tables: BlockTables, external: int) -> None:
        """The engine gave a request blocks: to load `external` tokens, or, if there are none, to run."""
        self.forget(request.request_id)
        if external and self._miscounted:
            tokens = self._tokens(request)
            self._missing[request.request_id] = sum(
                table.missing(tokens, len(ids)) for table, ids in zip(self._tables, tables, strict=True)
            )

    def forget(self, request_id: str) -> None:
        """A request has ended, or its load has failed: its blocks come back."""
        self._missing.pop(request_id, None)
        if self._first == request_id:
            self._first = None

    def _fits(self, request: Any, local: int, end: int) -> bool:
        if self._first not in (None, request.request_id):
            return False
        free = self._manager.block_pool.get_num_free_blocks() - sum(self._missing.values())
        fits = self._needs(request, local, end) <= free
        if not fits:
            self._first = request.request_id
        return bool(fits)

    def _needs(self, request: Any, local: int, end: int) -> int:
        """Free blocks that a load takes, and the request behind it: all but what others hold of the same text."""
        tokens, needs = self._tokens(request), 0
        for table, hit in zip(self._tables, self._manager.get_computed_blocks(request)[0].blocks, strict=True):
            first = table.skipped(end) // table.block
            shared = sum(not block.is_null and block.ref_cnt > 0 for block in hit[first : local // table.block])
            needs += table.missing(tokens, first + shared)
        return needs

    def _tokens(self, request: Any) -> int:
        return min(int(request.num_tokens) + self._ahead, int(self._manager.max_model_len))
