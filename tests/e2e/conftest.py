"""Fixtures of the end-to-end tests. Every engine in them is a real vLLM with real ranks, one at a time."""

import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent.parent / "tools")]

from e2e_cases import References  # noqa: E402


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
