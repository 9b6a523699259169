"""The connector, with a clock around everything that vLLM calls in a step: for `steps.py`, named to vLLM by its module.

Each process of the engine appends a line a step to a file of its own, in the directory that TIMES names.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole

from bench.steps import TIMES, Clock, Step
from tplayout_vllm.connector import TPLayoutConnector

# A step ends in the scheduler when its metadata are built, in a worker when they are cleared. What the scheduler's side
# is told later, the step's results, counts as the next step's.
SCHEDULER = (
    "on_new_request",
    "get_num_new_matched_tokens",
    "get_loaded_kv_cache_group_ids",
    "get_external_cache_hit_sources",
    "update_state_after_alloc",
    "build_connector_meta",
    "update_connector_output",
    "request_finished",
    "request_finished_all_groups",
    "has_pending_push_work",
    "take_events",
)
WORKER = (
    "bind_connector_metadata",
    "handle_preemptions",
    "start_load_kv",
    "wait_for_layer_load",
    "save_kv_layer",
    "wait_for_save",
    "get_transfer_results",
    "get_block_ids_with_load_errors",
    "get_kv_connector_kv_cache_events",
    "build_connector_worker_meta",
    "clear_connector_metadata",
)
BOTH = ("get_kv_connector_stats",)


class TimedConnector(TPLayoutConnector):
    """The connector itself; its methods are wrapped below."""

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        self._clock = Clock()
        side = "scheduler" if role is KVConnectorRole.SCHEDULER else "worker"
        path = Path(os.environ[TIMES]) / f"{side}-{os.getpid()}.jsonl"
        self._file = path.open("a", buffering=1)  # line by line: engines are killed
        super().__init__(vllm_config, role, kv_cache_config)

    def _write(self, step: Step) -> None:
        self._file.write(json.dumps(asdict(step)) + "\n")


def _timed(name: str) -> Callable[..., Any]:
    def call(self: TimedConnector, *args: Any, **kwargs: Any) -> Any:
        with self._clock.of(name):
            result = getattr(super(TimedConnector, self), name)(*args, **kwargs)
        if name == "build_connector_meta":
            (output,) = args
            self._write(self._clock.step(output.total_num_scheduled_tokens, bool(result.loads or result.saves)))
        elif name == "clear_connector_metadata":
            self._write(self._clock.step())
        return result

    return call


for _name in (*SCHEDULER, *WORKER, *BOTH):
    if hasattr(TPLayoutConnector, _name):  # releases of vLLM differ in some
        setattr(TimedConnector, _name, _timed(_name))
