"""The scheduler's side: what to look up, to claim, to load and to save, step by step.

Layer: below connector.py. Single-threaded, never blocks a step that has work. All store traffic goes through the
Stager; all decisions about blocks are the engine's. It keeps a `Request` only while the engine does.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from tplayout.format.keys import ROOT, ChunkId, chain
from tplayout.staging.stager import SlotRef, Stager
from tplayout_vllm.keying import Extras, extras, unkeyable
from tplayout_vllm.metadata import ChunkCopy, StagingRef, StepMetadata, Transfer

logger = logging.getLogger("vllm.tplayout")

IDLE_WAIT = 0.005  # seconds; an engine that only waits for the store steps at most 200 times a second


@dataclass
class Tracked:
    """What is known of one request.

    chunks: ids of its full chunks, extended as tokens come. saved: chunks before this one were dealt with.
    lookup: chunk at which the running lookup started, None without one. claim: tokens [start, end) announced to the
    engine. loading: their copy is under way. failed: a load failed; do not try again.
    """

    request: Any
    extras: Extras
    chunks: list[ChunkId] = field(default_factory=list)
    saved: int = 0
    lookup: int | None = None
    claim: tuple[int, int] | None = None
    loading: bool = False
    failed: bool = False


class SchedulerSide:
    """Decides for one engine. loads/saves: whether the server's kv_role reads from or writes to the store."""

    def __init__(self, stager: Stager, staging: StagingRef, namespace: bytes, loads: bool, saves: bool) -> None:
        self._stager = stager
        self._staging = staging
        self._namespace = namespace
        self._chunk = staging.geometry.chunk_tokens
        self._groups = tuple(range(len(staging.geometry.groups)))
        self._loads, self._saves = loads, saves
        self._tracked: dict[str, Tracked] = {}
        self._loading: set[str] = set()  # survives the request: an aborted one lets go of its slots when its load ends
        self._pending: list[Transfer] = []
        self._waiting: set[str] = set()
        self.skipped: dict[str, int] = {}

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Any, local_tokens: Callable[[Any], int]) -> None:
        """A new request: start staging what the engine does not hold already."""
        reason = unkeyable(request)
        if reason is not None:
            self.skipped[reason] = self.skipped.get(reason, 0) + 1
            return
        tracked = Tracked(request, extras(request))
        self._tracked[request.request_id] = tracked
        if self._may_load(tracked):
            self._start_lookup(tracked, local_tokens(request))

    def finish(self, request_id: str) -> None:
        """The engine is done with a request. Slots of a load under way stay pinned until its copy has ended."""
        self._tracked.pop(request_id, None)
        self._waiting.discard(request_id)
        if request_id not in self._loading:
            self._stager.release(request_id)

    # -- loading -------------------------------------------------------------------------------------------------

    def matched(self, request: Any, local: int) -> int | None:
        """Tokens that can be loaded behind `local` ones that the engine holds; None while that is not known."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not self._may_load(tracked) or tracked.loading:
            return 0
        self._stager.poll()
        if tracked.lookup is None or tracked.lookup * self._chunk > local:
            self._stager.release(request.request_id)
            self._start_lookup(tracked, local)
        state = self._stager.lookup(request.request_id)
        if not state.done:
            self._waiting.add(request.request_id)
            return None
        self._waiting.discard(request.request_id)
        assert tracked.lookup is not None
        # The engine computes at least the last token, to have something to sample from.
        end = min((tracked.lookup + state.ready) * self._chunk, request.num_tokens - 1)
        if end <= local:
            self._drop_lookup(tracked)
            tracked.lookup = local // self._chunk
            return 0
        tracked.claim = (local, end)
        return end - local

    def allocated(self, request: Any, tables: tuple[list[int], ...], external: int) -> None:
        """The engine gave blocks for `external` claimed tokens: load into them with this step."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None:
            return
        claim, tracked.claim, first_chunk = tracked.claim, None, tracked.lookup
        if external == 0 or claim is None:
            if not tracked.loading:
                self._drop_lookup(tracked)
            return
        first, last = claim[0], claim[0] + external
        assert first_chunk is not None
        begin, end = first // self._chunk, -(-last // self._chunk)
        slots = self._stager.claim(request.request_id, begin - first_chunk, end - first_chunk)
        copies = tuple(
            self._copy(slot, index, first, last) for index, slot in zip(range(begin, end), slots, strict=True)
        )
        self._pending.append(Transfer(request.request_id, tables, copies))
        tracked.loading, tracked.lookup = True, None
        tracked.saved = max(tracked.saved, end if last % self._chunk == 0 else end - 1)
        self._loading.add(request.request_id)

    def loads_ended(self, finished: set[str], failed: set[str]) -> None:
        """All ranks ended these loads: their slots may be reused. A failed one is computed, not tried again."""
        for request_id in finished | failed:
            self._loading.discard(request_id)
            self._stager.release(request_id)
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.loading = False
                if request_id in failed:
                    tracked.failed, tracked.saved = True, 0

    def _may_load(self, tracked: Tracked) -> bool:
        return self._loads and not tracked.failed and not tracked.request.skip_reading_prefix_cache

    def _start_lookup(self, tracked: Tracked, local: int) -> None:
        self._extend(tracked, tracked.request.num_tokens)
        tracked.lookup = local // self._chunk
        # A chunk that only holds the last token brings nothing: that token is computed anyway.
        useful = -(-(tracked.request.num_tokens - 1) // self._chunk)
        self._stager.start_lookup(tracked.request.request_id, tracked.chunks[tracked.lookup : useful])

    def _drop_lookup(self, tracked: Tracked) -> None:
        self._stager.release(tracked.request.request_id)
        tracked.lookup = None

    def _copy(self, slot: SlotRef, index: int, first: int, last: int) -> ChunkCopy:
        base = index * self._chunk
        return ChunkCopy(
            slot.slot, slot.generation, base, max(first, base), min(last, base + self._chunk), self._groups
        )

    # -- saving --------------------------------------------------------------------------------------------------

    def step(self, output: Any) -> StepMetadata:
        """The copies of this step. Waits a moment when the engine has nothing to do but wait for the store."""
        meta = StepMetadata(loads=self._pending)
        self._pending = []
        if self._saves and output.num_scheduled_tokens:
            meta.saves = self._plan_saves(output)
        if meta.loads or meta.saves:
            meta.staging = self._staging
        elif self._waiting and not output.num_scheduled_tokens:
            self._stager.wait(IDLE_WAIT)
        return meta

    def _plan_saves(self, output: Any) -> list[Transfer]:
        transfers = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            tracked = self._tracked.get(request_id)
            if tracked is None:
                continue
            drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
            # Rejected drafts leave wrong KV behind, and a token id that is not known yet has no key.
            known = len(tracked.request.all_token_ids)
            computed = min(known, tracked.request.num_computed_tokens + scheduled - drafts)
            copies = self._save_chunks(tracked, computed)
            if copies:
                tables = output.kv_connector_block_state.get_block_ids(request_id)
                transfers.append(Transfer(request_id, tables, tuple(copies)))
        return transfers

    def _save_chunks(self, tracked: Tracked, computed: int) -> list[ChunkCopy]:
        copies = []
        last = computed // self._chunk
        if last > tracked.saved:
            self._extend(tracked, computed)
        for index in range(tracked.saved, last):
            slot = self._stager.begin_save(tracked.chunks[index])
            if slot is not None:
                copies.append(self._copy(slot, index, 0, computed))
        tracked.saved = max(tracked.saved, last)
        return copies

    def _extend(self, tracked: Tracked, tokens: int) -> None:
        """Key the chunks that are full within the first `tokens` tokens."""
        have, want = len(tracked.chunks), tokens // self._chunk
        if want <= have:
            return
        parent = tracked.chunks[-1].key if tracked.chunks else ROOT
        ids = tracked.request.all_token_ids[have * self._chunk : want * self._chunk]
        tracked.chunks += chain(self._namespace, ids, self._chunk, lambda _: tracked.extras, parent=parent, start=have)

    # -- upkeep --------------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Forget what is held in host memory and believed to be stored; what is being loaded stays."""
        self._stager.reset()

    def close(self) -> None:
        self._stager.close()
