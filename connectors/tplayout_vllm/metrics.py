"""The connector's numbers on their way to vLLM's log and to /metrics.

Layer: below connector.py. The scheduler's side reports what changed since its last report; workers report what
they copied. Nothing is measured here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from prometheus_client import Counter, Gauge
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorPromMetrics, KVConnectorStats

# name -> documentation. Every counter ends in what it counts; Prometheus adds "_total".
COUNTERS = {
    "loads": "Chunks read from the store and verified.",
    "load_bytes": "Bytes read from the store.",
    "load_seconds": "Seconds spent reading and verifying, summed over parallel reads.",
    "load_failures": "Requests whose KV could not be copied into the engine; they were computed instead.",
    "host_hits": "Chunks found in host memory, so that the store was not asked.",
    "misses": "Chunks looked up that the store does not hold; a lookup ends soon after the first.",
    "saves": "Chunks written to the store.",
    "save_bytes": "Bytes written to the store.",
    "save_seconds": "Seconds spent digesting and writing, summed over parallel writes.",
    "evictions": "Chunks removed from the store to keep it below max_bytes.",
    "verification_failures": "Chunks found damaged, misnamed or foreign; they were not used.",
    "io_restarts": "I/O processes that died, or hung and were killed, and were replaced.",
    "load_copy_bytes": "Bytes copied from host memory into KV pages, summed over ranks.",
    "load_copy_seconds": "Seconds of these copies, summed over ranks.",
    "save_copy_bytes": "Bytes copied from KV pages into host memory, summed over ranks.",
    "save_copy_seconds": "Seconds of these copies, summed over ranks.",
    "idle_steps": "Engine steps that had nothing to do but wait for the store.",
}
GAUGES = {
    "staging_slots": "Chunks that fit into host staging memory.",
    "staging_used": "Chunks in host staging memory that are being saved, loaded or used.",
    "staging_clean": "Chunks kept in host staging memory as a cache.",
    "store_healthy": "1 while the store works, 0 while it is left alone after errors.",
}
SKIPS = "skips"
_PREFIX = "vllm:tplayout_"


class TPLayoutStats(KVConnectorStats):
    """data: {"counters": name -> increase, "skips": reason -> increase, "gauges": name -> value}."""

    @classmethod
    def of(
        cls,
        counters: Mapping[str, float],
        skips: Mapping[str, float] | None = None,
        gauges: Mapping[str, float] | None = None,
    ) -> TPLayoutStats:
        """Only what is not zero is sent; gauges always."""
        parts = {"counters": counters, SKIPS: skips or {}}
        data: dict[str, Any] = {part: {k: v for k, v in values.items() if v} for part, values in parts.items()}
        return cls(data={**data, "gauges": dict(gauges or {})})

    def reset(self) -> None:
        self.data: dict[str, Any] = {"counters": {}, SKIPS: {}, "gauges": {}}

    def aggregate(self, other: KVConnectorStats) -> KVConnectorStats:
        """Add up what was counted; of gauges the later report holds."""
        for part in ("counters", SKIPS):
            mine = self.data.setdefault(part, {})
            for name, value in other.data.get(part, {}).items():
                mine[name] = mine.get(name, 0) + value
        self.data.setdefault("gauges", {}).update(other.data.get("gauges", {}))
        return self

    def reduce(self) -> dict[str, int | float]:
        """One flat row for vLLM's periodic log line."""
        skips = {f"skipped ({reason})": count for reason, count in self.data.get(SKIPS, {}).items()}
        rows = {**self.data.get("counters", {}), **skips, **self.data.get("gauges", {})}
        return {name: round(value, 3) for name, value in rows.items()}

    def is_empty(self) -> bool:
        return not any(self.data.values())


class TPLayoutPromMetrics(KVConnectorPromMetrics):
    """Registers the metrics once and feeds them with reports."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._counters = {
            name: self._counter_cls(name=_PREFIX + name, documentation=text, labelnames=self._labelnames)
            for name, text in COUNTERS.items()
        }
        self._gauges = {
            name: self._gauge_cls(
                name=_PREFIX + name,
                documentation=text,
                labelnames=self._labelnames,
                multiprocess_mode="mostrecent",
            )
            for name, text in GAUGES.items()
        }
        self._skips = self._counter_cls(
            name=_PREFIX + SKIPS,
            documentation="Chunks or requests that were not saved or loaded, by reason.",
            labelnames=[*self._labelnames, "reason"],
        )
        for labels in self.per_engine_labelvalues.values():
            for counter in self._counters.values():
                counter.labels(*labels).inc(0)  # a rate needs the zero before the first event

    def observe(self, transfer_stats_data: dict[str, Any], engine_idx: int = 0) -> None:
        """Add one report. Names that this version does not know (a newer worker's) are left out."""
        labels = self.per_engine_labelvalues[engine_idx]
        for name, value in transfer_stats_data.get("counters", {}).items():
            if name in self._counters:
                self._counters[name].labels(*labels).inc(value)
        for reason, value in transfer_stats_data.get(SKIPS, {}).items():
            self._skips.labels(*labels, reason).inc(value)
        for name, value in transfer_stats_data.get("gauges", {}).items():
            if name in self._gauges:
                self._gauges[name].labels(*labels).set(value)


def prom_metrics(vllm_config: Any, metric_types: Any, labelnames: Any, per_engine: Any) -> TPLayoutPromMetrics:
    """What `build_prom_metrics` returns; the types are checked so that another metrics backend fails at start."""
    assert Gauge in metric_types
    assert Counter in metric_types
    return TPLayoutPromMetrics(vllm_config, metric_types, labelnames, per_engine)
