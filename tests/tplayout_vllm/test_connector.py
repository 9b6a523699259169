"""The connector as vLLM sees it: which answers never change, what is refused early, and that nothing is left behind."""

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sim_config import Setup, kv_cache_config, vllm_config
from sim_store import Sim
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole, SupportsHMA

import tplayout_vllm.connector
from tplayout.errors import ConfigError
from tplayout_vllm.connector import TPLayoutConnector
from tplayout_vllm.metadata import StepMetadata, WorkerReport
from tplayout_vllm.metrics import TPLayoutStats
from tplayout_vllm.worker import WorkerSide


def connector(directory: Path, role: KVConnectorRole, url: str = "file:///nowhere", **options: Any) -> Any:
    setup = Setup(options=options)
    return TPLayoutConnector(vllm_config(directory, setup, url), role, kv_cache_config(setup))


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """This process is rank 1 of TP=2."""
    groups = {"get_tp_group": SimpleNamespace(world_size=2, rank_in_group=1)}
    groups["get_pp_group"] = SimpleNamespace(world_size=1, rank_in_group=0)
    for name, group in groups.items():
        monkeypatch.setattr(f"vllm.distributed.parallel_state.{name}", lambda group=group: group)


def test_load_failures_cost_time_and_no_request(model_directory: Path) -> None:
    made = connector(model_directory, KVConnectorRole.SCHEDULER)
    assert made._kv_transfer_config.kv_load_failure_policy == "recompute"


def test_it_is_a_cache(model_directory: Path) -> None:
    made = connector(model_directory, KVConnectorRole.SCHEDULER)
    assert made.requires_kv_delivery is False
    assert made.get_finished_count() is None  # all ranks report
    assert not made.has_pending_push_work()
    assert TPLayoutConnector.requires_piecewise_for_cudagraph({"url": "file:///x"}) is False
    assert issubclass(TPLayoutConnector, SupportsHMA)
    assert KVConnectorFactory.supports_hma_config(made._kv_transfer_config)


def test_wrong_options_are_refused_before_the_model_is_loaded(model_directory: Path) -> None:
    """By what vLLM asks the class for first, and by every process that makes one."""
    with pytest.raises(ConfigError, match=r"'chunk_token' .*did you mean 'chunk_tokens'"):
        TPLayoutConnector.requires_piecewise_for_cudagraph({"url": "file:///x", "chunk_token": 3})
    with pytest.raises(ConfigError, match=r"'chunk_token' .*did you mean 'chunk_tokens'"):
        connector(model_directory, KVConnectorRole.SCHEDULER, chunk_token=3)


def test_without_the_workers_reports_it_says_what_is_wrong(model_directory: Path) -> None:
    made = connector(model_directory, KVConnectorRole.SCHEDULER)
    assert made.get_kv_connector_stats() is None
    with pytest.raises(RuntimeError, match="the workers' reports never came"):
        made.build_connector_meta(SimpleNamespace())
    made.shutdown()


def test_a_refusal_at_opening_leaves_no_process(model_directory: Path, tmp_path: Path) -> None:
    made = connector(model_directory, KVConnectorRole.SCHEDULER, f"file://{tmp_path}")
    with pytest.raises(ConfigError, match="no worker reported an attention layer"):
        made.set_xfer_handshake_metadata_pp_aware({(0, 0): WorkerReport(())})
    made.shutdown()


@pytest.mark.usefixtures("ranks")
def test_a_worker_reports_once_its_caches_are_there(model_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = connector(model_directory, KVConnectorRole.WORKER)
    assert isinstance(made._worker, WorkerSide)
    assert made._worker._tp == (2, 1)
    assert made.get_handshake_metadata() is None
    report = WorkerReport(())
    monkeypatch.setattr(tplayout_vllm.connector, "discover_worker", lambda *args: (report, []))
    made.register_kv_caches({})
    assert made.get_handshake_metadata() is report


@pytest.mark.usefixtures("ranks")
def test_a_worker_s_step_without_work(model_directory: Path) -> None:
    made = connector(model_directory, KVConnectorRole.WORKER)
    made.bind_connector_metadata(StepMetadata())
    made.start_load_kv(None)
    made.wait_for_layer_load("any")
    made.save_kv_layer("any", None, None)
    made.wait_for_save()
    results = made.get_transfer_results(set())
    assert not results.finished_recving
    assert not results.failed_recving
    assert made.get_block_ids_with_load_errors() == set()
    assert made.get_kv_connector_stats() is None
    made.clear_connector_metadata()
    made.shutdown()
    made.shutdown()


def test_stats_are_made_from_what_vllm_sends(model_directory: Path) -> None:
    assert TPLayoutConnector.build_kv_connector_stats().is_empty()
    data = TPLayoutStats.of({"loads": 1}).to_dict()
    assert TPLayoutConnector.build_kv_connector_stats(data).reduce() == {"loads": 1}


def test_a_finished_request_never_holds_its_blocks(sim: Sim) -> None:
    """What is to be saved was copied in the step that computed it; holding an aborted one would kill the engine."""
    engine = sim.engine()
    name = engine.add(sim.text(1), 100)
    engine.step()
    request = engine.requests[name]
    assert engine.connector.request_finished(request, [1]) == (False, None)
    assert engine.connector.request_finished_all_groups(request, ([1],)) == (False, None)
    engine.abort(name)


def test_the_start_line_says_where_chunks_are_kept(
    sim: Sim, monkeypatch: pytest.MonkeyPatch, log: pytest.LogCaptureFixture
) -> None:
    """And I/O processes that are started later go there too, wherever the engine is by then."""
    (sim.store.parent / "here").mkdir()
    monkeypatch.chdir(sim.store.parent / "here")
    sim.url = "../store"
    engine = sim.engine()
    assert f"tplayout: file://{sim.store}, namespace " in log.text
    monkeypatch.chdir("/")
    assert engine.stager.plan.url == f"file://{sim.store}"
    text = sim.text(9)
    engine.run(text, 200, 1)
    assert all(sim.stored(text, 192))


def test_memory_that_cannot_be_had_is_refused_with_the_way_out(sim: Sim) -> None:
    """A limit on the size of files holds for a memory file too."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, before[1]))
    try:
        with pytest.raises(ConfigError, match=r"staging region of \d+ bytes.*lower 'staging_bytes'.*ulimit -f"):
            sim.engine()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_an_idle_engine_publishes_what_it_saved(sim: Sim) -> None:
    """Nothing steps any more: the I/O process needs nobody for it."""
    engine = sim.engine()
    text = sim.text(2)
    name = engine.add(text, 200, 1)
    engine.until(lambda: engine.finished(name))
    sim.wait(lambda: all(sim.stored(text, 192)))


def test_shutting_down_publishes_what_is_complete(sim: Sim) -> None:
    engine = sim.engine()
    text = sim.text(3)
    name = engine.add(text, 200, 1)
    engine.until(lambda: engine.finished(name))
    engine.close()
    engine.close()
    sim.wait(lambda: all(sim.stored(text, 192)))
    sim.check_store()


def test_an_engine_that_goes_on_after_the_shutdown_has_no_cache(sim: Sim) -> None:
    engine = sim.engine()
    engine.run(sim.text(4), 200, 1)
    text = sim.text(5)
    running = engine.add(text, 200, 20)
    engine.step()
    waiting = engine.add(sim.text(4), 200, 1)
    engine.connector.shutdown()
    engine.until(lambda: engine.finished(running) and engine.finished(waiting))
    assert engine.loaded(waiting) == 0
    assert engine.connector.reset_cache()
    engine.step()
