"""The metrics' names are a promise; reports add up; vLLM's log and /metrics show them."""

from functools import partial
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from sim_store import Sim
from vllm.distributed.kv_transfer.kv_connector.v1.metrics import KVConnectorLogging, KVConnectorProm

from tplayout_vllm.metrics import COUNTERS, GAUGES, TPLayoutStats, prom_metrics

# Dashboards and alerts are built on these: a name may be added, never changed.
NAMES = {
    "vllm:tplayout_loads_total",
    "vllm:tplayout_load_bytes_total",
    "vllm:tplayout_load_seconds_total",
    "vllm:tplayout_load_failures_total",
    "vllm:tplayout_host_hits_total",
    "vllm:tplayout_misses_total",
    "vllm:tplayout_saves_total",
    "vllm:tplayout_save_bytes_total",
    "vllm:tplayout_save_seconds_total",
    "vllm:tplayout_verification_failures_total",
    "vllm:tplayout_evictions_total",
    "vllm:tplayout_io_restarts_total",
    "vllm:tplayout_load_copy_bytes_total",
    "vllm:tplayout_load_copy_seconds_total",
    "vllm:tplayout_save_copy_bytes_total",
    "vllm:tplayout_save_copy_seconds_total",
    "vllm:tplayout_idle_steps_total",
    "vllm:tplayout_skips_total",
    "vllm:tplayout_staging_slots",
    "vllm:tplayout_staging_used",
    "vllm:tplayout_staging_clean",
    "vllm:tplayout_store_healthy",
}


def exposed(registry: CollectorRegistry) -> dict[str, float]:
    """What /metrics would show: "name{labels}" -> value."""
    lines = generate_latest(registry).decode().splitlines()
    rows = [line.rpartition(" ") for line in lines if not line.startswith("#") and "_created" not in line]
    return {name: float(value) for name, _, value in rows}


class Registered:
    """The metrics of two engines in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        types = {kind: partial(kind, registry=self.registry) for kind in (Gauge, Counter, Histogram)}
        config = SimpleNamespace(kv_transfer_config=None)
        self.metrics = prom_metrics(config, types, ["model_name", "engine"], {0: ["m", "0"], 1: ["m", "1"]})


def test_names_are_stable() -> None:
    registered = Registered()
    registered.metrics.observe(TPLayoutStats.of({}, {"save-no-slot": 1}, dict.fromkeys(GAUGES, 1.0)).data)
    assert {name.partition("{")[0] for name in exposed(registered.registry)} == NAMES


def test_counters_are_there_before_the_first_event() -> None:
    shown = exposed(Registered().registry)
    for name in COUNTERS:
        for engine in ("0", "1"):
            assert shown[f'vllm:tplayout_{name}_total{{engine="{engine}",model_name="m"}}'] == 0


def test_reports_are_added_up_by_engine() -> None:
    registered = Registered()
    for engine in (0, 0, 1):
        stats = TPLayoutStats.of({"loads": 2}, {"save-no-slot": 3}, {"staging_used": 4 + engine})
        registered.metrics.observe(stats.to_dict(), engine)
    shown = exposed(registered.registry)
    assert shown['vllm:tplayout_loads_total{engine="0",model_name="m"}'] == 4
    assert shown['vllm:tplayout_loads_total{engine="1",model_name="m"}'] == 2
    assert shown['vllm:tplayout_skips_total{engine="0",model_name="m",reason="save-no-slot"}'] == 6
    assert shown['vllm:tplayout_staging_used{engine="1",model_name="m"}'] == 5


def test_names_of_a_newer_worker_are_left_out() -> None:
    registered = Registered()
    before = exposed(registered.registry)
    registered.metrics.observe({"counters": {"new": 1}, "gauges": {"newer": 2}, "newest": {}})
    assert exposed(registered.registry) == before


def test_reports_of_ranks_and_scheduler_become_one() -> None:
    stats = TPLayoutStats.of({"load_copy_bytes": 10}).aggregate(TPLayoutStats.of({"load_copy_bytes": 5}))
    stats = stats.aggregate(TPLayoutStats.of({"loads": 1}, {"request-lora": 1}, {"staging_used": 3}))
    stats = stats.aggregate(TPLayoutStats.of({"load_seconds": 0.12345}, {"request-lora": 1}, {"staging_used": 2}))
    assert stats.reduce() == {
        "load_copy_bytes": 15,
        "loads": 1,
        "load_seconds": 0.123,
        "skipped (request-lora)": 2,
        "staging_used": 2,
    }
    assert not stats.is_empty()
    stats.reset()
    assert stats.is_empty()


def test_nothing_is_sent_of_nothing() -> None:
    assert TPLayoutStats.of({"loads": 0}, {"x": 0}).is_empty()


def test_an_engine_s_reports_reach_log_and_metrics(sim: Sim, monkeypatch: pytest.MonkeyPatch) -> None:
    """Through vLLM's own classes, from both sides of the connector."""
    text = sim.text(1)
    sim.engine().run(text, 300, 1)
    engine = sim.engine(tp=2)
    engine.fail_copies(0, 1)
    engine.run(text, 300, 1)
    engine.scheduler.reset_prefix_cache()
    engine.run(sim.text(2, text, 256), 300, 1)
    engine.step()
    registry = CollectorRegistry()
    for kind, name in ((Gauge, "_gauge_cls"), (Counter, "_counter_cls"), (Histogram, "_histogram_cls")):
        monkeypatch.setattr(KVConnectorProm, name, partial(kind, registry=registry))
    # vLLM looks the types up by class: the partials stand for them.
    types = {Gauge: KVConnectorProm._gauge_cls, Counter: KVConnectorProm._counter_cls, Histogram: None}
    metrics = type(engine.connector).build_prom_metrics(engine.scheduler.vllm_config, types, ["engine"], {0: ["0"]})
    metrics.observe(engine.reported.to_dict())
    shown = exposed(registry)

    def value(name: str) -> float:
        return shown[f'vllm:tplayout_{name}{{engine="0"}}']

    layer_bytes = engine.model.heads * 2 * engine.model.dim * 4
    assert value("load_failures_total") == 1
    assert value("loads_total") == 4
    assert value("host_hits_total") == 4
    assert value("load_copy_bytes_total") >= 256 * 2 * layer_bytes
    assert value("staging_slots") == engine.stager.plan.slots
    assert value("store_healthy") == 1
    lines: list[str] = []
    log = KVConnectorLogging(engine.scheduler.vllm_config.kv_transfer_config)
    log.observe(engine.reported.to_dict())
    log.log(lambda text, *args: lines.append(text % args))
    assert len(lines) == 1
    assert "loads=4" in lines[0]
    assert "load_failures=1" in lines[0]
