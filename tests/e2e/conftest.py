"""Fixtures of the end-to-end tests. Every engine in them is a real vLLM with real ranks, one at a time."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "tools")]

from e2e_cases import References  # noqa: E402
from e2e_one_process import OneProcess  # noqa: E402
from e2e_plain import PlainEngines  # noqa: E402
from e2e_tp_runs import Run, run  # noqa: E402


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All that is here needs vLLM."""
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.vllm)


@pytest.fixture(scope="session")
def logs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where engines' logs go."""
    return tmp_path_factory.mktemp("logs")


@pytest.fixture(scope="session")
def references(tmp_path_factory: pytest.TempPathFactory) -> References:
    return References(tmp_path_factory.mktemp("references"))


@pytest.fixture(scope="session")
def one_process(logs: Path) -> Iterator[OneProcess]:
    """A process for engines one after another."""
    holder = OneProcess(logs / "one-process.log")
    yield holder
    holder.close()


@pytest.fixture(scope="session")
def plain(one_process: OneProcess) -> PlainEngines:
    """Engines without the connector, for reference answers."""
    return PlainEngines(one_process)


# Each of the following is one engine in fresh processes. It reads what the earlier ones wrote and writes for the later.


@pytest.fixture(scope="session")
def tp_root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tp-store")


@pytest.fixture(scope="session")
def tp4(tp_root: Path, logs: Path) -> Run:
    return run(tp_root, logs / "tp4.log", "smollm2", 4, 64, "kv_producer", read="", write="a")


@pytest.fixture(scope="session")
def tp2(tp_root: Path, logs: Path, tp4: Run) -> Run:
    return run(tp_root, logs / "tp2.log", "smollm2", 2, 32, "kv_both", read="a", write="b")


@pytest.fixture(scope="session")
def tp1(tp_root: Path, logs: Path, tp2: Run) -> Run:
    return run(tp_root, logs / "tp1.log", "smollm2", 1, 128, "kv_both", read="ab", write="c")


@pytest.fixture(scope="session")
def tp4_reads(tp_root: Path, logs: Path, tp1: Run) -> Run:
    return run(tp_root, logs / "tp4-reads.log", "smollm2", 4, 64, "kv_consumer", read="bc", write="")
