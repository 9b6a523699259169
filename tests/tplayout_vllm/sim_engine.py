"""An engine without a model: vLLM's scheduler, the connector on both sides, real I/O processes, pages of `sim_model`.

Every step checks that whatever a scheduled request attends to is, bit for bit, what its text demands, and that
free blocks and the null block are neither read (they are poisoned) nor written, the free ones that the engine's own
prefix cache still holds included. `Sim.check_store` does so for what is stored.
"""

import copy
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from sim_config import Setup, kv_cache_config, report, vllm_config
from sim_model import VOCABULARY, DelayedCopies, Rank, Text
from vllm.config import VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheConfig
from vllm.v1.outputs import DraftTokenIds, KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus

from tplayout_vllm.connector import TPLayoutConnector
from tplayout_vllm.metadata import WorkerReport
from tplayout_vllm.metrics import TPLayoutStats


class RankConnector(TPLayoutConnector):
    """The worker's connector around a simulated rank."""

    def __init__(self, config: VllmConfig, kv_config: KVCacheConfig, rank: Rank, report: WorkerReport) -> None:
        self._make_worker = lambda _: rank.side
        super().__init__(config, KVConnectorRole.WORKER, kv_config)
        self._report = report


@dataclass
class _Job:
    """A scheduled step. behind: earlier steps whose results the scheduler did not have. rejected: drafts by request."""

    output: Any
    behind: list["_Job"]
    result: ModelRunnerOutput | None = None
    rejected: dict[str, int] = field(default_factory=dict)


@dataclass
class _Running:
    """A request as the workers know it. known: tokens of its text that exist."""

    text: Text
    tables: tuple[list[int], ...]
    known: int
    drafts: list[int] = field(default_factory=list)


class SimEngine:
    """One server. claims: for each request, (local, external) tokens of each load."""

    def __init__(self, url: str, model_directory: Path, setup: Setup) -> None:
        self.setup, self.model = setup, setup.model
        self.random = np.random.default_rng(7)
        self.accept = 0.6  # of drafts
        kernel = setup.kernel or setup.block
        self.ranks = [
            Rank(setup.model, (setup.tp, rank), setup.block, kernel, setup.blocks, setup.order)
            for rank in range(setup.tp)
        ]
        config, kv_config = vllm_config(model_directory, setup, url), kv_cache_config(setup)
        kind = AsyncScheduler if setup.asynchronous else Scheduler
        reports = {(0, number): report(setup, rank) for number, rank in enumerate(self.ranks)}
        self.scheduler = kind(
            vllm_config=config,
            kv_cache_config=kv_config,
            structured_output_manager=SimpleNamespace(
                should_advance=lambda request: False,
                accept_tokens=lambda request, tokens: True,
                validate_tokens=lambda request, tokens: tokens,
            ),
            block_size=setup.block,
            log_stats=True,
        )
        self.connector = self.scheduler.connector
        self.connector.set_xfer_handshake_metadata_pp_aware(reports)
        # Without the net below it: an error of the connector's own is to be seen here.
        self.side = self.connector._scheduler = self.connector._scheduler._side
        self.stager = self.side._stager
        self._workers = [RankConnector(config, kv_config, rank, reports[0, i]) for i, rank in enumerate(self.ranks)]
        for rank in self.ranks if setup.delayed else ():
            rank.side._copies = DelayedCopies()
        self._aggregator = KVOutputAggregator.from_connector(self.connector, setup.tp)
        self._hasher = get_request_block_hasher(setup.block, sha256)
        self._jobs: list[_Job] = []
        self._running: dict[str, _Running] = {}
        self._texts: dict[str, Text] = {}
        self.requests: dict[str, Request] = {}
        self.claims: dict[str, list[tuple[int, int]]] = {}
        self.failed: set[str] = set()  # requests with a load that failed
        self.steps = 0
        self.reported = TPLayoutStats.of({})
        self._idle: set[int] = set()  # free, and every step has run that was sent while they were not
        self._poisoned: set[int] = set()  # of these, those that hold nothing any more
        self._freed: dict[int, _Job | None] = {}  # idle when that step has run
        self._watch_claims()
        self._look_at_free()

    # -- requests ------------------------------------------------------------------------------------------------

    def add(
        self, text: Text, prompt: int, outputs: int = 4, skip: bool = False, priority: int = 0, **fields: Any
    ) -> str:
        """A request for a text's first `prompt` tokens. skip: it must not read caches, as for prompt log-probabilities.

        fields: what else it has. Returns its name.
        """
        name = f"r{len(self.requests)}"
        params = SamplingParams(max_tokens=outputs, ignore_eos=True, skip_reading_prefix_cache=skip)
        request = Request(
            name,
            list(text.upto(prompt)),
            params,
            None,
            block_hasher=self._hasher if self.setup.caching else None,
            cache_salt=text.salt,
            priority=priority,
        )
        for field_name, value in fields.items():
            setattr(request, field_name, value)
        self._texts[name] = text
        self.requests[name] = request
        self.scheduler.add_request(request)
        return name

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)
        self._look_at_free()

    def finished(self, name: str) -> bool:
        return self.requests[name].is_finished()

    def add_and_load(self, text: Text, prompt: int) -> str:
        """A request whose load has begun and, where copies are delayed, has not ended; its name."""
        name = self.add(text, prompt)
        self.until(lambda: self.loading(name), flush=False)
        return name

    def loading(self, name: str) -> bool:
        return self.requests[name].status == RequestStatus.WAITING_FOR_REMOTE_KVS

    def loaded(self, name: str) -> int:
        """Tokens of a request that came from the store, in all of its loads."""
        return sum(external for _, external in self.claims.get(name, ()))

    def stats(self, name: str, part: str = "counters") -> float:
        """The sum of what was reported to vLLM. part: counters, skips, or gauges (the last one)."""
        return self.reported.data[part].get(name, 0)

    def run(self, text: Text, prompt: int, outputs: int = 4, **more: Any) -> str:
        """A request from start to end, with all saves published."""
        name = self.add(text, prompt, outputs, **more)
        self.until(lambda: self.finished(name))
        self.settle()
        return name

    # -- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> None:
        """One step of the engine's loop; with asynchronous scheduling one is in flight behind it."""
        self.schedule()
        if not self.setup.asynchronous or len(self._jobs) == 2 or not self._jobs[-1].output.num_scheduled_tokens:
            self.execute()
            self.update()

    def until(self, condition: Callable[[], bool], seconds: float = 60.0, flush: bool = True) -> None:
        """Step until it is so. flush: copies that are delayed end with each step."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds} s; {self._describe()}"
            self.step()
            if flush:
                self.flush()

    def _describe(self) -> str:
        requests = [
            f"{r.request_id} {r.status.name} {r.num_computed_tokens}/{r.num_tokens} preempted {r.num_preemptions}"
            for r in self.scheduler.requests.values()
        ]
        free = self.scheduler.kv_cache_manager.block_pool.get_num_free_blocks()
        return f"{self.steps} steps, {free} free blocks, {requests}, {self.stager.snapshot()}"

    def flush(self) -> None:
        """Let the copies end that are delayed."""
        for rank in self.ranks if self.setup.delayed else ():
            rank.side._copies.flush()

    def fail_copies(self, rank: int, times: int, verb: str = "load") -> None:
        """Let the next copies of a rank fail. verb: load or save."""
        copies, real, left = self.ranks[rank].side._copies, getattr(self.ranks[rank].side._copies, verb), [times]

        def failing(*args: Any) -> None:
            left[0] -= 1
            if left[0] == 0:
                setattr(copies, verb, real)
            raise RuntimeError("made up")

        setattr(copies, verb, failing)

    def drain(self) -> None:
        """Run what is left of the requests, and all saves."""
        self.until(lambda: not self.scheduler.has_requests())
        self.settle()

    def settle(self) -> None:
        """Finish the steps in flight and wait until no save or load is under way."""
        while self._jobs:
            self.execute()
            self.update()
        end = time.monotonic() + 60
        self.flush()
        self.stager.poll()
        while self.stager.busy:
            assert time.monotonic() < end, self.stager.snapshot()
            time.sleep(0.001)
            self.stager.poll()

    def schedule(self) -> None:
        self.steps += 1
        output = self.scheduler.schedule()
        # What workers get is a copy, made when the step is sent.
        output.kv_connector_metadata = copy.deepcopy(output.kv_connector_metadata)
        self._jobs.append(_Job(output, list(self._jobs)))
        self._look_at_free()

    def execute(self) -> None:
        """Run the oldest step that has not run: what the workers do."""
        job = next((job for job in self._jobs if job.result is None), None)
        if job is None:
            return
        self.check_free()
        sampled = self._forward(job)
        results = [self._worker_step(worker, job.output, sampled) for worker in self._workers]
        job.result = self._aggregator.aggregate(results)
        self.failed |= job.result.kv_connector_output.failed_recving
        self.check_free()
        self._look_at_free()

    def update(self) -> None:
        """Give the scheduler the oldest step's results."""
        job = self._jobs.pop(0)
        assert job.result is not None
        for outputs in self.scheduler.update_from_output(job.output, job.result).values():
            if outputs.scheduler_stats is not None and outputs.scheduler_stats.kv_connector_stats:
                self.reported.aggregate(TPLayoutStats(data=outputs.scheduler_stats.kv_connector_stats))
        if self.setup.drafts and not self.setup.asynchronous:
            drafts = {name: state.drafts for name, state in self._running.items() if state.drafts}
            self.scheduler.update_draft_token_ids(DraftTokenIds(list(drafts), list(drafts.values())))
        self._look_at_free()

    # -- workers -------------------------------------------------------------------------------------------------

    def _forward(self, job: _Job) -> dict[str, list[int]]:
        output = job.output
        for name in output.finished_req_ids:
            self._running.pop(name, None)
        starts = self._take_new_state(output)
        sampled = {}
        for name, count in output.num_scheduled_tokens.items():
            state = self._running[name]
            unseen = sum(other.rejected.get(name, 0) for other in job.behind)
            start = starts[name] - unseen
            drafts = output.scheduled_spec_decode_tokens.get(name, [])
            fixed = start + count - len(drafts)
            drafts = state.drafts[: len(drafts)] if self.setup.asynchronous else [max(token, 0) for token in drafts]
            drafts += [VOCABULARY + 1] * (start + count - fixed - len(drafts))
            self._check_attended(name, state, start)
            self._write(state, start, fixed, drafts)
            sampled[name] = self._sample(job, name, state, fixed, drafts)
        return sampled

    def _take_new_state(self, output: Any) -> dict[str, int]:
        """What the scheduler sends: block tables and, returned, computed tokens by request."""
        starts = {}
        for new in output.scheduled_new_reqs:
            text = self._texts[new.req_id]
            self._running[new.req_id] = _Running(text, copy.deepcopy(new.block_ids), len(new.prompt_token_ids))
            starts[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for index, name in enumerate(cached.req_ids):
            starts[name] = cached.num_computed_tokens[index]
            blocks = cached.new_block_ids[index]
            if name in cached.resumed_req_ids:
                prompt = self.requests[name].num_prompt_tokens
                known = prompt + cached.num_output_tokens[index]
                self._running[name] = _Running(self._texts[name], copy.deepcopy(blocks), known)
            elif blocks is not None:
                for table, more in zip(self._running[name].tables, blocks, strict=True):
                    table.extend(more)
        return starts

    def _check_attended(self, name: str, state: _Running, start: int) -> None:
        """The pages hold, for all that token `start` and later ones attend to, what the text demands."""
        for layer, window in enumerate(self.model.windows):
            first = 0 if window is None else max(0, start - window + 1)
            history = state.text.history(first, start)
            table = self.model.table_of(layer)
            for number, rank in enumerate(self.ranks):
                wanted = self.model.kv(layer, rank.heads, history)
                found = rank.read(layer, state.tables[table], first, start)
                if not torch.equal(wanted, found):
                    bad = (wanted != found).flatten(1).any(1).nonzero().flatten() + first
                    raise AssertionError(
                        f"{name}, rank {number}, layer {layer}: computing from token {start}, but the KV of tokens "
                        f"{bad.tolist()[:8]}... is wrong ({len(bad)} tokens); claims {self.claims.get(name)}"
                    )

    def _write(self, state: _Running, start: int, fixed: int, drafts: list[int]) -> None:
        history = np.concatenate([state.text.history(start, fixed), state.text.history_with(fixed, drafts)])
        for layer in range(len(self.model.windows)):
            for rank in self.ranks:
                rank.write(layer, state.tables[self.model.table_of(layer)], start, history)

    def _sample(self, job: _Job, name: str, state: _Running, fixed: int, drafts: list[int]) -> list[int]:
        if fixed < state.known:
            return []  # a part of a prefill
        assert fixed == state.known, f"{name}: computed {fixed} tokens of {state.known}"
        true = state.text.upto(fixed + len(drafts) + 1)[fixed:]
        accepted = next((i for i, draft in enumerate(drafts) if draft != true[i]), len(drafts))
        job.rejected[name] = len(drafts) - accepted
        state.known += accepted + 1
        if self.setup.drafts:
            ahead = state.text.upto(state.known + self.setup.drafts)[state.known :]
            state.drafts = [t if self.random.random() < self.accept else (t + 1) % VOCABULARY for t in ahead]
        return true[: accepted + 1]

    def _worker_step(self, worker: RankConnector, output: Any, sampled: dict[str, list[int]]) -> ModelRunnerOutput:
        """The connector's part of a step, in the order of vLLM's model runner.

        With speculation it waits for saves at the very end, and only where tokens are sampled: on the last rank here,
        as if each were a pipeline stage.
        """
        worker.bind_connector_metadata(output.kv_connector_metadata)
        worker.start_load_kv(None)
        if not self.setup.drafts:
            worker.wait_for_save()
        results = worker.get_transfer_results(output.finished_req_ids)
        kv_output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            invalid_block_ids=worker.get_block_ids_with_load_errors(),
            kv_connector_stats=worker.get_kv_connector_stats(),
            kv_connector_worker_meta=worker.build_connector_worker_meta(),
        )
        if self.setup.drafts and worker is self._workers[-1]:
            worker.wait_for_save()
        worker.clear_connector_metadata()
        names = list(sampled)
        return ModelRunnerOutput(
            names, {name: i for i, name in enumerate(names)}, list(sampled.values()), kv_connector_output=kv_output
        )

    # -- free blocks --------------------------------------------------------------------------------------------------

    def _free(self) -> tuple[set[int], set[int]]:
        """Free blocks; and those of them that hold nothing: they are no longer in the engine's prefix cache."""
        free = [b for b in self.scheduler.kv_cache_manager.block_pool.blocks if b.ref_cnt == 0 and not b.is_null]
        return {0} | {b.block_id for b in free}, {0} | {b.block_id for b in free if b.block_hash is None}

    def _look_at_free(self) -> None:
        """Remember what free blocks hold, once the steps have run that were sent while they were in use: poison, where
        nobody can want it any more."""
        free, empty = self._free()
        unrun = [job for job in self._jobs if job.result is None]
        for block in free - self._idle - self._freed.keys():
            self._freed[block] = unrun[-1] if unrun else None
        self._freed = {block: job for block, job in self._freed.items() if block in free}
        fresh = {block for block, job in self._freed.items() if job is None or job.result is not None}
        for block in fresh:
            del self._freed[block]
        self._idle = (self._idle & free) | fresh
        void = (self._idle & empty) - self._poisoned
        for rank in self.ranks:
            rank.poison(void)
            rank.remember(fresh | void)
        self._poisoned = (self._poisoned | void) & self._idle & empty

    def check_free(self) -> None:
        """Nobody has written to a block since it was given back."""
        untouched = self._idle & self._free()[0]
        for number, rank in enumerate(self.ranks):
            touched = rank.changed(untouched)
            assert not touched, f"rank {number}: blocks {touched}, which are free (or null), were written to"

    def _watch_claims(self) -> None:
        real = self.connector.update_state_after_alloc

        def watched(request: Request, blocks: Any, external: int) -> None:
            if external:
                local = self.side._tracked[request.request_id].claim[0]
                self.claims.setdefault(request.request_id, []).append((local, external))
            real(request, blocks, external)

        self.connector.update_state_after_alloc = watched

    def close(self) -> None:
        for worker in self._workers:
            worker.shutdown()
        self.connector.shutdown()
