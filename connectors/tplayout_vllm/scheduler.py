"""The scheduler's side: what to look up, to claim, to load and to save, step by step.

Layer: below connector.py. Single-threaded, never blocks a step that has work. All store traffic goes through the
Stager; all decisions about blocks are the engine's. It keeps a `Request` only while the engine does.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tplayout.format.keys import ROOT, ChunkId, chain
from tplayout.staging.stager import SlotRef, Stager
from tplayout_vllm import search
from tplayout_vllm.admission import Admission
from tplayout_vllm.blocks import BlockTables, Tables
from tplayout_vllm.keying import ExtrasOf, Keying
from tplayout_vllm.metadata import AdapterRef, ChunkCopy, StagingRef, StepMetadata, Transfer
from tplayout_vllm.metrics import TPLayoutStats
from tplayout_vllm.placement import Rank
from tplayout_vllm.prefill_speed import PrefillSpeed
from tplayout_vllm.report import Report

logger = logging.getLogger("vllm.tplayout")

IDLE_WAIT = 0.005  # seconds; an engine that only waits for the store steps at most 200 times a second


@dataclass
class Tracked:
    """What is known of one request.

    adapter: the LoRA adapter that it is computed with. chunks: ids of its full chunks, extended as tokens come. saved:
    chunks before this one were dealt with. search: what the store can supply, None before it is asked. claim: tokens
    [first, last) announced to the engine. loading: their copy is under way. failed: a load failed; do not try again.
    """

    request: Any
    extras: ExtrasOf
    adapter: AdapterRef | None = None
    chunks: list[ChunkId] = field(default_factory=list)
    saved: int = 0
    search: search.PrefixSearch | None = None
    claim: tuple[int, int] | None = None
    loading: bool = False
    failed: bool = False


class SchedulerSide:
    """Decides for one engine. loads, saves: whether the server's kv_role reads from and writes to the store.

    never_slower: do not wait for KV longer than the engine would take to compute it.
    """

    def __init__(
        self,
        stager: Stager,
        staging: StagingRef,
        tables: Tables,
        namespace: bytes,
        admission: Admission,
        *,
        loads: bool,
        saves: bool,
        never_slower: bool,
    ) -> None:
        self._stager = stager
        self._staging = staging
        self._tables = tables
        self._namespace = namespace
        self._chunk = staging.geometry.chunk_tokens
        self._windows = search.Windows.of(staging.geometry, tables)
        self._admission = admission
        self._loads, self._saves = loads, saves
        self._never_slower = never_slower
        self._prefill = PrefillSpeed()
        self._tracked: dict[str, Tracked] = {}
        self._loading: set[str] = set()  # survives the request: an aborted one lets go of its slots when its load ends
        self._pending: list[Transfer] = []
        self._planned: list[Transfer] = []
        self._waiting: set[str] = set()
        self._keying = Keying(self._chunk)
        self._unkeyable: Counter[str] = Counter()
        self._counted: Counter[str] = Counter()
        self._report = Report(stager)
        self._stopped: str | None = None

    # -- requests ------------------------------------------------------------------------------------------------

    def add(self, request: Any, local_tokens: Callable[[Any], int]) -> None:
        """A new request: start staging what the engine does not hold already."""
        extras = self._stopped or self._keying.extras(request)
        if isinstance(extras, str):
            self._unkeyable[extras] += 1
            return
        tracked = Tracked(request, extras, self._keying.adapter(request))
        self._tracked[request.request_id] = tracked
        if self._may_load(tracked):
            self._search(tracked, local_tokens(request))

    def finish(self, request_id: str) -> None:
        """The engine is done with a request. Slots of a load under way stay pinned until its copy has ended."""
        self._tracked.pop(request_id, None)
        self._waiting.discard(request_id)
        self._admission.forget(request_id)
        if request_id not in self._loading:
            search.release(self._stager, request_id)

    # -- loading -------------------------------------------------------------------------------------------------

    def matched(self, request: Any, local: int) -> int | None:
        """Tokens that can be loaded behind `local` ones that the engine holds; None while that is not known, or while
        other loads need the blocks."""
        tracked = self._tracked.get(request.request_id)
        if tracked is None or not self._may_load(tracked) or tracked.loading:
            return 0
        if tracked.search is None or tracked.search.start * self._chunk > local:
            self._search(tracked, local)
        assert tracked.search is not None
        end = tracked.search.poll(local, self._prefill.seconds(self._chunk) if self._never_slower else None)
        if end is None or (end > local and not self._admission.admits(request, local, end)):
            self._waiting.add(request.request_id)
            return None
        self._waiting.discard(request.request_id)
        tracked.claim = (local, end) if end > local else None
        return max(0, end - local)

    def filled(self, request_id: str) -> tuple[int, ...]:
        """The engine's KV-cache groups whose blocks the announced load fills to the last token.

        The engine does not zero what a load fills. Where a hit ends within a block, the rest of it must not hold what
        another group of another dtype has left there.
        """
        tracked = self._tracked.get(request_id)
        if tracked is None or tracked.claim is None:
            return ()
        return self._tables.filled(tracked.claim[1])

    def allocated(self, request: Any, tables: BlockTables, external: int) -> bool:
        """The engine gave blocks for `external` claimed tokens: load into them with this step. False: no load."""
        self._admission.allocated(request, tables, external)
        tracked = self._tracked.get(request.request_id)
        if tracked is None or tracked.loading:
            return False
        claim, found, tracked.claim, tracked.search = tracked.claim, tracked.search, None, None
        if external == 0 or claim is None or found is None:
            search.release(self._stager, request.request_id)
            return False
        first, last = claim[0], claim[0] + external
        copies = [
            copy
            for index, slot in found.claim(first, last)
            for copy in self._loads_of(slot, index, first, last, tables)
        ]
        self._pending.append(Transfer(request.request_id, tables, tuple(copies), tracked.adapter))
        tracked.loading = True
        self._loading.add(request.request_id)
        return True

    def fail_load(self, request_id: str) -> None:
        """The engine waits for a load that cannot be made: let the workers report it as failed."""
        self._pending.append(Transfer(request_id, (), (), failed=True))
        self._loading.add(request_id)

    def step_ended(self, finished: set[str], failed: set[str], timed: int | None) -> None:
        """A step has its results, and all ranks ended these loads: their slots may be reused.

        A failed load is computed, not tried again. timed: as in the step's metadata.
        """
        self._prefill.ended(timed)
        self._counted["load_failures"] += len(failed)
        for request_id in failed:
            self._admission.forget(request_id)
        for request_id in finished | failed:
            self._loading.discard(request_id)
            search.release(self._stager, request_id)
            tracked = self._tracked.get(request_id)
            if tracked is not None:
                tracked.loading = False
                tracked.failed |= request_id in failed

    def _may_load(self, tracked: Tracked) -> bool:
        return self._loads and not tracked.failed and not tracked.request.skip_reading_prefix_cache

    def _search(self, tracked: Tracked, local: int) -> None:
        request = tracked.request
        search.release(self._stager, request.request_id)
        self._extend(tracked, request.num_tokens)
        # The engine computes at least the last token, to have something to sample from.
        tracked.search = search.PrefixSearch(
            self._stager,
            self._staging.geometry,
            self._windows,
            request.request_id,
            tracked.chunks,
            local // self._chunk,
            request.num_tokens - 1,
        )

    def _loads_of(self, slot: SlotRef, index: int, first: int, last: int, tables: BlockTables) -> list[ChunkCopy]:
        """The copies of one chunk for a hit [first, last): all of it, or of window layers what the window shows."""
        spans: dict[tuple[int, int], list[int]] = {}
        base = index * self._chunk
        end = min(last, base + self._chunk)
        for group in slot.groups:
            start = max(first, base)
            if group in self._windows.sizes:
                start = max(start, self._windows.start(group, last))
                start = self._tables.first_held(tables, group, start, end) if start < end else end
            if start < end:
                spans.setdefault((start, end), []).append(group)
        return [
            ChunkCopy(slot.slot, slot.generation, base, start, stop, tuple(groups))
            for (start, stop), groups in spans.items()
        ]

    # -- saving --------------------------------------------------------------------------------------------------

    def step(self, output: Any) -> StepMetadata:
        """The copies of this step. Waits a moment when the engine has nothing to do but wait for the store."""
        timed = self._prefill.began(output.num_scheduled_tokens.values())
        if self._saves and output.num_scheduled_tokens:
            self._plan_saves(output)
        elif not self._pending and self._waiting and not output.num_scheduled_tokens:
            self._counted["idle_steps"] += 1
            self._stager.wait(IDLE_WAIT)
        meta = self.planned()
        meta.timed = timed
        meta.adapters = self._adapters_of(output.num_scheduled_tokens)
        return meta

    def _adapters_of(self, requests: Iterable[str]) -> tuple[AdapterRef, ...]:
        found = (self._tracked[name].adapter for name in requests if name in self._tracked)
        return tuple({adapter for adapter in found if adapter is not None})

    def planned(self) -> StepMetadata:
        """The loads that wait for a step, and the saves of this one: the ranks must hear of every slot that was begun,
        or nobody ever says that it is done with it."""
        meta = StepMetadata(saves=self._planned, loads=self._pending)
        self._planned, self._pending = [], []
        if meta.loads or meta.saves:
            meta.staging = self._staging
        return meta

    def _plan_saves(self, output: Any) -> None:
        """An error ends the saves of its request; it is raised when those of the others are planned."""
        errors = []
        for request_id, scheduled in output.num_scheduled_tokens.items():
            try:
                self._plan_request(request_id, scheduled, output)
            except Exception as error:
                errors.append(error)
                self.finish(request_id)
        if errors:
            raise errors[0]

    def _plan_request(self, request_id: str, scheduled: int, output: Any) -> None:
        tracked = self._tracked.get(request_id)
        if tracked is None:
            return
        drafts = len(output.scheduled_spec_decode_tokens.get(request_id, ()))
        # Rejected drafts leave wrong KV behind, and a token id that is not known yet has no key.
        known = len(tracked.request.all_token_ids)
        computed = min(known, tracked.request.num_computed_tokens + scheduled - drafts)
        if computed // self._chunk <= tracked.saved:
            return
        tables = output.kv_connector_block_state.get_block_ids(request_id)
        copies: list[ChunkCopy] = []
        try:
            self._save_chunks(tracked, computed, tables, copies)
        except Exception:
            for copy in copies:  # no rank has heard of them
                self._stager.abandon_save(SlotRef(copy.slot, copy.generation, copy.groups))
            raise
        if copies:
            self._planned.append(Transfer(request_id, tables, tuple(copies), tracked.adapter))

    def _save_chunks(self, tracked: Tracked, computed: int, tables: BlockTables, copies: list[ChunkCopy]) -> None:
        """Begin the saves of the chunks that this step completes; `copies` gets what the ranks have to copy."""
        last = computed // self._chunk
        self._extend(tracked, computed)
        for index in range(tracked.saved, last):
            base, end = index * self._chunk, (index + 1) * self._chunk
            # Window layers have given back what left the window: such a chunk is stored without them.
            held = [g for g in range(len(self._tables.of_group)) if self._tables.has(tables, g, base, end)]
            slot = self._stager.begin_save(tracked.chunks[index], held) if held else None
            if slot is not None:
                copies.append(ChunkCopy(slot.slot, slot.generation, base, base, end, slot.groups))
        tracked.saved = last

    def given_up(self, parts: Mapping[Rank, Sequence[ChunkCopy]]) -> None:
        """Saves that ranks have not made and could not mark either: marked on their behalf."""
        for rank, copies in parts.items():
            for copy in copies:
                for group in copy.groups:
                    if rank in self._staging.writers[group]:
                        writer = self._staging.writers[group].index(rank)
                        self._stager.give_up_part(copy.slot, copy.generation, group, writer)

    def _extend(self, tracked: Tracked, tokens: int) -> None:
        """Key the chunks that are full within the first `tokens` tokens."""
        have, want = len(tracked.chunks), tokens // self._chunk
        if want <= have:
            return
        parent = tracked.chunks[-1].key if tracked.chunks else ROOT
        ids = tracked.request.all_token_ids[have * self._chunk : want * self._chunk]
        tracked.chunks += chain(self._namespace, ids, self._chunk, tracked.extras, parent=parent, start=have)

    def stop(self, reason: str) -> None:
        """Neither load nor save from now on; requests are counted as skipped for this reason."""
        self._stopped, self._loads, self._saves = reason, False, False

    # -- upkeep --------------------------------------------------------------------------------------------------

    def take_stats(self) -> TPLayoutStats:
        """What was counted since the last call, and how the pool stands."""
        self._stager.poll()
        return self._report.take(self._counted, self._unkeyable)

    def reset(self) -> None:
        """Forget what is held in host memory and believed to be stored; what is being loaded stays."""
        self._stager.reset()

    def close(self) -> None:
        """Let go of staging. An engine that goes on, to finish its requests, does so without the cache."""
        self.stop("closed")
        self._stager.close()
