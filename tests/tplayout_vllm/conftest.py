"""Fixtures for tests that drive vLLM's own scheduler, with the connector and real I/O processes but no model."""

import logging
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE)]

from sim_config import Setup, make_model_directory, vllm_config  # noqa: E402
from sim_store import Sim  # noqa: E402

from tools.faulty_files import FaultyFiles  # noqa: E402


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that is only a configuration."""
    return make_model_directory(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def quiet() -> Iterator[None]:
    """For tests in which much fails on purpose: else each failure logs its traceback."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture, model_directory: Path) -> Iterator[pytest.LogCaptureFixture]:
    """What the connector logs, each line once, whatever vLLM makes of its loggers."""
    vllm_config(model_directory, Setup(), "memory://")  # the first one sets up logging, and takes off our handlers
    logger = logging.getLogger("vllm.tplayout")
    before = logger.level, logger.propagate
    logger.addHandler(caplog.handler)
    logger.setLevel(logging.INFO)
    logger.propagate = False
    yield caplog
    logger.removeHandler(caplog.handler)
    logger.level, logger.propagate = before


@pytest.fixture
def sim(tmp_path: Path, model_directory: Path) -> Iterator[Sim]:
    """A store on disk, and the engines that a test starts on it."""
    sim = Sim(tmp_path, model_directory)
    yield sim
    sim.close()


@pytest.fixture
def faults(sim: Sim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FaultyFiles:
    """Engines of `sim` have a store that obeys it; they leave it alone for shorter, so that more of its calls fail."""
    faults = FaultyFiles(tmp_path / "faults")
    monkeypatch.setattr("tplayout.staging.breaker._FIRST_S", 0.02)
    monkeypatch.setattr("tplayout.staging.breaker._LONGEST_S", 0.2)
    for name, value in faults.environment().items():
        monkeypatch.setenv(name, value)
    sim.url = f"faulty+file://{sim.store}"
    return faults
