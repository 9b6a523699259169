"""TPLayoutConnector: vLLM's KV-connector interface, passed on to one of two sides.

Top of the connector. Here is only what vLLM's contract needs; deciding is scheduler.py's, copying worker.py's.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorRole,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from tplayout_vllm.discovery import discover_worker, watches
from tplayout_vllm.guard import Guarded
from tplayout_vllm.metadata import StepMetadata, WorkerNews, WorkerReport
from tplayout_vllm.metrics import TPLayoutStats, prom_metrics
from tplayout_vllm.opening import check_setup, open_scheduler_side
from tplayout_vllm.options import parse_options
from tplayout_vllm.worker import WorkerSide

if TYPE_CHECKING:
    import torch
    from vllm.config import VllmConfig
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

logger = logging.getLogger("vllm.tplayout")


class TPLayoutConnector(KVConnectorBase_V1, SupportsHMA):
    """Saves KV in tplayout's canonical layout and reloads it, whatever TP size wrote it."""

    def __init__(self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._options = parse_options(self._kv_transfer_config.kv_connector_extra_config)
        check_setup(vllm_config)
        # A load that fails must cost time, never a request.
        if self._kv_transfer_config.kv_load_failure_policy != "recompute":
            self._kv_transfer_config.kv_load_failure_policy = "recompute"
            if role is KVConnectorRole.SCHEDULER:
                logger.info("tplayout: kv_load_failure_policy is set to recompute")
        self._scheduler: Guarded | None = None
        self._worker: WorkerSide | None = None
        self._report: WorkerReport | None = None
        self._saved: StepMetadata | None = None  # the last step whose saves were made
        if role is KVConnectorRole.WORKER:
            self._worker = self._make_worker(vllm_config)

    @property
    def requires_kv_delivery(self) -> bool:
        """False: this is a cache, what is not saved is computed again."""
        return False

    # -- worker side ---------------------------------------------------------------------------------------------

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        assert self._worker is not None
        self._report, found = discover_worker(self._vllm_config, self._kv_cache_config, kv_caches)
        self._worker.register(found, *watches(self._vllm_config, found))

    def get_handshake_metadata(self) -> KVConnectorHandshakeMetadata | None:
        return self._report

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        assert self._worker is not None
        self._worker.load(self._step())

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Loads are asynchronous: no forward pass ever waits for one."""

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Layers are saved together, after the forward pass."""

    def wait_for_save(self) -> None:
        assert self._worker is not None
        step = self._step()
        if step is not self._saved:
            self._saved = step
            self._worker.save(step)

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        assert self._worker is not None
        # With speculation vLLM waits for saves behind the draft model only, which a pipeline stage that is not the last
        # never gets to. What is saved is complete here: nothing of the draft model's.
        self.wait_for_save()
        finished, failed = self._worker.take_results()
        return KVConnectorTransferResults(finished_recving=finished, failed_recving=failed)

    def build_connector_worker_meta(self) -> KVConnectorWorkerMetadata | None:
        return None if self._worker is None else self._worker.take_news(self._step().timed)

    def _step(self) -> StepMetadata:
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StepMetadata)
        return metadata

    @staticmethod
    def _make_worker(vllm_config: VllmConfig) -> WorkerSide:
        from vllm.distributed.parallel_state import get_pp_group, get_tp_group

        tp = get_tp_group()
        return WorkerSide((tp.world_size, tp.rank_in_group), get_pp_group().rank_in_group)

    # -- scheduler side ------------------------------------------------------------------------------------------

    def set_xfer_handshake_metadata_pp_aware(
        self, metadata: dict[tuple[int, int], KVConnectorHandshakeMetadata]
    ) -> None:
        """All workers' reports are here: open the namespace and the staging region, or refuse to start."""
        reports = {rank: report for rank, report in metadata.items() if isinstance(report, WorkerReport)}
        side = open_scheduler_side(
            self._vllm_config, self._kv_cache_config, self._kv_cache_manager, self._options, reports
        )
        self._scheduler = Guarded(side)

    def on_new_request(self, request: Request) -> None:
        self._side.add(request, self._local_tokens)

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int | None, bool]:
        external = self._side.matched(request, num_computed_tokens)
        return external, bool(external)

    def get_loaded_kv_cache_group_ids(self, request: Request) -> tuple[int, ...]:
        return self._side.filled(request.request_id)

    def update_state_after_alloc(self, request: Request, blocks: Any, num_external_tokens: int) -> None:
        self._side.allocated(request, blocks.get_block_ids(), num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> KVConnectorMetadata:
        return self._side.step(scheduler_output)

    def update_connector_output(self, connector_output: Any) -> None:
        news = connector_output.kv_connector_worker_meta
        timed = news.timed if isinstance(news, WorkerNews) else None
        finished, failed = connector_output.finished_recving or set(), connector_output.failed_recving or set()
        self._side.step_ended(finished, failed, timed)
        if isinstance(news, WorkerNews):
            self._side.given_up(news.given_up)
            if news.weights_changed:
                self._side.stop("weights-changed")

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        # Never True: what is to be saved was copied in the step that computed it.
        self._side.finish(request.request_id)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished(request, [])

    def reset_cache(self) -> bool | None:
        self._side.reset()
        return True

    @property
    def _side(self) -> Guarded:
        if self._scheduler is None:
            raise RuntimeError("TPLayoutConnector: the workers' reports never came; this executor is not supported")
        return self._scheduler

    def _local_tokens(self, request: Request) -> int:
        """Tokens of a request that the engine's own prefix cache holds now."""
        if self._kv_cache_manager is None:
            return 0
        return int(self._kv_cache_manager.get_computed_blocks(request)[1])

    # -- both sides ----------------------------------------------------------------------------------------------

    def shutdown(self) -> None:
        if self._scheduler is not None:
            self._scheduler.close()
        if self._worker is not None:
            self._worker.close()

    def get_kv_connector_stats(self) -> TPLayoutStats | None:
        if self._worker is not None:
            stats = TPLayoutStats.of(self._worker.take_counters())
        elif self._scheduler is not None:
            stats = self._scheduler.take_stats()
        else:
            return None
        return None if stats.is_empty() else stats

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TPLayoutStats:
        return TPLayoutStats(data=data) if data is not None else TPLayoutStats.of({})

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> Any:
        return prom_metrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """False: no work is done within the forward pass. vLLM asks early, so wrong options are refused early."""
        parse_options(extra_config)
        return False
