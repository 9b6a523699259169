"""The connector, with a note of when each part of a reload begins and ends: for `timeline.py`, named to vLLM by module.

Its I/O processes are `traced_io.py`'s.
"""

from __future__ import annotations

import functools
import sys
import time
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from bench.timeline import Trace
from tplayout.staging.stager import Stager
from tplayout_vllm import opening
from tplayout_vllm.connector import TPLayoutConnector

IO_COMMAND = (sys.executable, "-P", "-m", "bench.traced_io")


class TracedConnector(TPLayoutConnector):
    """The connector itself, and its notes."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._trace = Trace("scheduler" if role is KVConnectorRole.SCHEDULER else "rank")
        self._since = 0.0  # when a wait or a step began
        super().__init__(vllm_config, role, kv_cache_config)
        if role is KVConnectorRole.SCHEDULER:
            opening.Stager = functools.partial(Stager, command=IO_COMMAND)  # type: ignore[misc, assignment]

    # -- scheduler side ------------------------------------------------------------------------------------------

    def on_new_request(self, request: Any) -> None:
        with self._trace.span("lookup"):
            super().on_new_request(request)
        self._since = time.monotonic()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int | None, bool]:
        found = super().get_num_new_matched_tokens(request, num_computed_tokens)
        if found[0]:
            self._trace.note("wait", self._since)
        return found

    def build_connector_meta(self, scheduler_output: Any) -> Any:
        meta = super().build_connector_meta(scheduler_output)
        self._since = time.monotonic() if meta.loads or scheduler_output.num_scheduled_tokens else self._since
        return meta

    def update_connector_output(self, connector_output: Any) -> None:
        if connector_output.finished_recving:
            self._trace.note("load step", self._since)
        super().update_connector_output(connector_output)

    # -- worker side ---------------------------------------------------------------------------------------------

    def bind_connector_metadata(self, connector_metadata: Any) -> None:
        super().bind_connector_metadata(connector_metadata)
        self._since = time.monotonic()

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        if self._step().loads:
            with self._trace.span("permute"):
                super().start_load_kv(forward_context, **kwargs)
        else:  # it comes behind the forward pass
            self._trace.note("compute", self._since)
            super().start_load_kv(forward_context, **kwargs)
