"""The scheduler's side with a net below it: an error of ours costs a hit or a save, never the engine.

Layer: between connector.py and scheduler.py. vLLM calls the connector from its scheduler's loop, where any exception
ends every request of the server.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from tplayout.staging.log_limit import LogLimit
from tplayout_vllm.blocks import BlockTables
from tplayout_vllm.metadata import ChunkCopy, StepMetadata
from tplayout_vllm.metrics import TPLayoutStats
from tplayout_vllm.placement import Rank
from tplayout_vllm.scheduler import SchedulerSide

logger = logging.getLogger("vllm.tplayout")


class Guarded:
    """The methods of SchedulerSide, each with what the engine can go on with when it fails."""

    def __init__(self, side: SchedulerSide) -> None:
        self._side = side
        self._limit = LogLimit()

    def add(self, request: Any, local_tokens: Callable[[Any], int]) -> None:
        """On an error the request is served without the cache."""
        with self._net("a new request", request.request_id):
            self._side.add(request, local_tokens)

    def matched(self, request: Any, local: int) -> int | None:
        """On an error: nothing is found, and the request is served without the cache."""
        with self._net("looking up", request.request_id):
            return self._side.matched(request, local)
        return 0

    def filled(self, request_id: str) -> tuple[int, ...]:
        """On an error the engine zeroes all blocks before the load."""
        with self._net("looking up"):
            return self._side.filled(request_id)
        return ()

    def allocated(self, request: Any, tables: BlockTables, external: int) -> None:
        """On an error the load is reported as failed: the engine waits for its end, and recomputes."""
        queued = False
        with self._net("loading", request.request_id):
            queued = self._side.allocated(request, tables, external)
        if external and not queued:
            self._side.fail_load(request.request_id)

    def step(self, output: Any) -> StepMetadata:
        """On an error what was planned before it is kept."""
        with self._net("planning a step"):
            return self._side.step(output)
        return self._side.planned()

    def step_ended(self, finished: set[str], failed: set[str], timed: int | None) -> None:
        """On an error their slots stay pinned."""
        with self._net("ending loads"):
            self._side.step_ended(finished, failed, timed)

    def stop(self, reason: str) -> None:
        """On an error the workers go on refusing by themselves."""
        with self._net("stopping"):
            self._side.stop(reason)

    def given_up(self, parts: Mapping[Rank, Sequence[ChunkCopy]]) -> None:
        """On an error their slots stay in use."""
        with self._net("ending saves"):
            self._side.given_up(parts)

    def finish(self, request_id: str) -> None:
        """On an error its slots stay pinned."""
        with self._net("finishing a request"):
            self._side.finish(request_id)

    def take_stats(self) -> TPLayoutStats:
        """On an error: no statistics."""
        with self._net("statistics"):
            return self._side.take_stats()
        return TPLayoutStats.of({})

    def reset(self) -> None:
        """As SchedulerSide's: the caller wants to know whether it worked."""
        self._side.reset()

    def close(self) -> None:
        """On an error the I/O processes find out by themselves that the engine is gone."""
        with self._net("closing"):
            self._side.close()

    @contextlib.contextmanager
    def _net(self, what: str, request_id: str | None = None) -> Iterator[None]:
        try:
            yield
        except Exception:
            more = self._limit.allow(what)
            if more is not None:
                logger.exception("tplayout: an error of its own in %s; the engine goes on without it%s", what, more)
            if request_id is not None:
                with contextlib.suppress(Exception):
                    self._side.finish(request_id)
