"""The worker's side: copies between its pages and the staging region, as the scheduler's side says.

Layer: below connector.py. One object a rank. It talks to no store and makes no decision: each step names the
tokens, the blocks and the slots.
"""

from __future__ import annotations

import logging
import queue
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tplayout.errors import TPLayoutError
from tplayout.format.layout import layouts_of
from tplayout.format.sharding import head_range, writes
from tplayout.staging.log_limit import LogLimit
from tplayout.staging.region import Region
from tplayout_vllm.adapter_watch import AdapterWatch
from tplayout_vllm.device import HostCopies, StreamCopies, copies_for
from tplayout_vllm.metadata import AdapterRef, ChunkCopy, StagingRef, StepMetadata, Transfer, WorkerNews
from tplayout_vllm.pages import Canonical, LayerPages, canonical_view, group_runs
from tplayout_vllm.probe import PageLayout
from tplayout_vllm.weight_watch import WeightWatch

logger = logging.getLogger("vllm.tplayout")


@dataclass(frozen=True)
class FoundLayer:
    """A registered layer: the vLLM KV-cache group whose block table it uses, its memory, and how it is laid out.

    ratio: kernel blocks in one block of the block table.
    """

    name: str
    table: int
    cache: torch.Tensor
    layout: PageLayout
    ratio: int


class WorkerSide:
    """Copies for one rank. tp: (size, rank)."""

    def __init__(self, tp: tuple[int, int], pp_rank: int) -> None:
        self._tp = tp
        self._pp_rank = pp_rank
        self._layers: Sequence[FoundLayer] = ()
        self._copies: HostCopies | StreamCopies = HostCopies()
        self._staging: _Attached | None = None
        # (request, failed); a queue, because on an accelerator a thread puts what the engine's thread takes.
        self._ended: queue.SimpleQueue[tuple[str, bool]] = queue.SimpleQueue()
        self._given_up: list[ChunkCopy] = []
        self._counters: dict[str, float] = {}
        self._limit = LogLimit()
        self._weights: WeightWatch | None = None
        self._adapters: AdapterWatch | None = None

    def register(
        self,
        layers: Sequence[FoundLayer],
        weights: WeightWatch | None = None,
        adapters: AdapterWatch | None = None,
    ) -> None:
        """Take the layers of this rank; which cells they are is told with the first work.

        weights, adapters: that make their content.
        """
        self.close()  # of caches that were registered before
        self._layers = layers
        self._weights, self._adapters = weights, adapters
        self._copies = copies_for(layers[0].cache.device if layers else torch.device("cpu"))

    def load(self, step: StepMetadata) -> None:
        """Copy this step's loads from their slots into the pages. What fails is reported, never raised."""
        for adapter in step.adapters:  # what they are is known from the first step on that computes with them
            self._agrees(adapter)
        usable = self._check_weights() if step.loads else _always
        for transfer in step.loads:
            started = time.perf_counter()
            failed = transfer.failed or not self._may_load(transfer.adapter)
            try:
                if not failed:
                    self._scatter(self._attach(step.staging), transfer)
            except Exception:
                # The engine recomputes the request: a cache must not take it down.
                self._log("loading request %s failed, it is computed instead", transfer)
                failed = True
            self._copies.after(
                _putter(self._ended, transfer.request, _never if failed else usable),
                _putter(self._ended, transfer.request, _never),
            )
            self._count("load_copy_seconds", time.perf_counter() - started)

    def save(self, step: StepMetadata) -> None:
        """Copy this step's tokens from the pages into their slots, and mark the slots that are whole.

        When this returns, the blocks may be reused by the next step (on CUDA: by work queued behind this).
        """
        usable = self._check_weights() if step.saves else _always
        for transfer in step.saves:
            started = time.perf_counter()
            staging = None
            try:
                staging = self._attach(step.staging)
                self._gather(staging, transfer, usable if self._agrees(transfer.adapter) else _never)
            except Exception:
                self._log("saving request %s failed, its chunks are not stored", transfer)
                self._give_up(staging, transfer)
            self._count("save_copy_seconds", time.perf_counter() - started)

    def take_results(self) -> tuple[set[str], set[str]]:
        """Requests whose load ended since the last call, and those among them that failed."""
        ended: list[tuple[str, bool]] = []
        while not self._ended.empty():
            ended.append(self._ended.get())
        return {request for request, _ in ended}, {request for request, failed in ended if failed}

    def take_counters(self) -> dict[str, float]:
        """Seconds and bytes copied since the last call."""
        counters, self._counters = self._counters, {}
        return counters

    def take_news(self, timed: int | None = None) -> WorkerNews | None:
        """What the scheduler's side must know since the last call, None if there is nothing. timed: of this step.

        What could be neither saved nor marked is marked there; else its slots were never free again.
        """
        changed, given_up = self._weights is not None and self._weights.changed, tuple(self._given_up)
        self._given_up.clear()
        if not changed and not given_up and timed is None:
            return None
        return WorkerNews(changed, {(self._pp_rank, self._tp[1]): given_up} if given_up else {}, timed)

    def close(self) -> None:
        """End the copies in flight and let go of the region."""
        self._copies.close()
        self._staging = None

    def _check_weights(self) -> Callable[[], bool]:
        """Whether this step's copies may be used, to be asked once they have ended."""
        try:
            return _always if self._weights is None else self._weights.check()
        except Exception:
            logger.exception("tplayout: the weights cannot be compared with what they were; nothing is copied")
            return _never

    def _may_load(self, adapter: AdapterRef | None) -> bool:
        """An adapter that is not loaded yet is read from the files by which the request was keyed."""
        not_yet = adapter is not None and self._adapters is not None and not self._adapters.loaded(adapter)
        return not_yet or self._agrees(adapter)

    def _agrees(self, adapter: AdapterRef | None) -> bool:
        """Whether this rank computes with what the request was keyed by."""
        if adapter is None:
            return True
        try:
            if self._adapters is not None and self._adapters.agrees(adapter):
                return True
        except Exception:
            logger.exception("tplayout: LoRA adapter %d cannot be looked at", adapter.number)
        more = self._limit.allow("adapter")
        if more is not None:
            logger.warning(
                "tplayout: LoRA adapter %d is not what its files were when a request came in; what it computes is not "
                "stored, nor loaded into%s",
                *(adapter.number, more),
            )
        return False

    def _count(self, name: str, value: float) -> None:
        self._counters[name] = self._counters.get(name, 0) + value

    def _attach(self, ref: StagingRef | None) -> _Attached:
        if ref is None:
            raise TPLayoutError("a transfer came without its staging region")
        if self._staging is None or self._staging.ref.region != ref.region:
            staging = _Attached(ref, self._layers, self._tp, self._pp_rank)
            self._copies.pin(staging.memory)
            self._staging = staging
        return self._staging

    def _gather(self, staging: _Attached, transfer: Transfer, usable: Callable[[], bool]) -> None:
        for copy in transfer.copies:
            for run in staging.runs:
                if run.group in copy.groups and staging.writes[run.group]:
                    out = staging.cells(copy, run.group, run.positions)
                    self._copies.save(run, transfer.tables[run.table], copy.first, copy.last, out)
                    self._count("save_copy_bytes", out.nbytes)
            self._copies.after(_marker(staging, copy, usable), _marker(staging, copy, _never))

    def _scatter(self, staging: _Attached, transfer: Transfer) -> None:
        for copy in transfer.copies:
            for run in staging.runs:
                if run.group in copy.groups:
                    src = staging.cells(copy, run.group, run.positions)
                    self._copies.load(run, transfer.tables[run.table], copy.first, copy.last, src)
                    self._count("load_copy_bytes", src.nbytes)

    def _give_up(self, staging: _Attached | None, transfer: Transfer) -> None:
        """Mark the copies as not usable. staging: None if it cannot be reached."""
        if staging is None:
            self._given_up += transfer.copies
            return
        for copy in transfer.copies:
            self._copies.after(_marker(staging, copy, _never))

    def _log(self, what: str, transfer: Transfer) -> None:
        """An error and its traceback, once a minute for each `what`: where one request fails, others do."""
        more = self._limit.allow(what)
        if more is not None:
            logger.exception("tplayout: " + what + "%s", transfer.request, more)


class _Attached:
    """The staging region as one rank sees it: which cells are its own, and where they lie in a slot."""

    def __init__(self, ref: StagingRef, layers: Sequence[FoundLayer], tp: tuple[int, int], pp_rank: int) -> None:
        self.ref = ref
        geometry = ref.geometry
        self._layouts = layouts_of(geometry, ref.digest, ref.key_id)
        self._heads = [head_range(group.heads, *tp) for group in geometry.groups]
        self.writes = [writes(group.heads, *tp) for group in geometry.groups]
        self._marks = {g: ref.writers[g].index((pp_rank, tp[1])) for g in ref.marks_of((pp_rank, tp[1]))}
        placed = [(layer, *ref.places[layer.name]) for layer in layers if layer.name in ref.places]
        self.runs = group_runs(
            [LayerPages(x.name, x.table, group, position, x.cache, x.layout, x.ratio) for x, group, position in placed]
        )
        # Last: an error above must not leave a mapping behind, in every step.
        self._region = Region.attach(ref.region)
        self.memory = torch.frombuffer(self._region.memory, dtype=torch.uint8)

    def cells(self, copy: ChunkCopy, group: int, layers: range) -> Canonical:
        """This rank's heads, the given layers and the copied tokens of a group's object in a slot."""
        spec, layout, heads = self.ref.geometry.groups[group], self._layouts[group], self._heads[group]
        section = layout.kv_offset(1) - layout.kv_offset(0) if spec.heads > 1 else 0
        cells = canonical_view(
            torch.frombuffer(self._region.slot(copy.slot, group), dtype=torch.uint8),
            layout.kv_offset(heads.start),
            section,
            spec.element_bytes,
            (len(heads), len(spec.layers), self.ref.geometry.chunk_tokens),
            [part.dim for part in spec.parts],
        )
        return cells.narrow(layers, copy.first - copy.base, copy.last - copy.base)

    def mark(self, copy: ChunkCopy, usable: bool) -> None:
        """Tell the I/O process that this rank is done with its part of the copied groups."""
        for group in copy.groups:
            if group in self._marks:
                self._region.mark(copy.slot, group, self._marks[group], copy.generation, usable=usable)


def _always() -> bool:
    return True


def _never() -> bool:
    return False


def _putter(ended: queue.SimpleQueue[tuple[str, bool]], request: str, usable: Callable[[], bool]) -> Callable[[], None]:
    return lambda: ended.put((request, not usable()))


def _marker(staging: _Attached, copy: ChunkCopy, usable: Callable[[], bool]) -> Callable[[], None]:
    return lambda: staging.mark(copy, usable())
