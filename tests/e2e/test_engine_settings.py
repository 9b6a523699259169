"""Settings of an engine that are in no name and no byte of the store: engines that differ in them read each other's.

A server of several processes begins; each further engine reads what the one before it wrote.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from e2e_cases import CHUNK, assert_same, engine_args, noise, offload
from e2e_chain import LENGTH, Chain, References
from e2e_one_process import OneProcess, forget, supplied
from vllm_engine import Engine, engine

SETTINGS: dict[str, dict[str, Any]] = {
    "one process": {},
    "prefix caching off": {"enable_prefix_caching": False},
    "token budget of 77": {"max_num_batched_tokens": 77, "max_num_seqs": 8},
    "not eager": {"enforce_eager": False},
    "prefix caching off, token budget of 211, blocks of 96": {
        "enable_prefix_caching": False,
        "max_num_batched_tokens": 211,
        "block_size": 96,
    },
    "token budget of 1": {"max_num_batched_tokens": 1, "max_num_seqs": 1},
}
FAST = ("one process", "prefix caching off", "token budget of 77")


@pytest.fixture(scope="module")
def chain(one_process: OneProcess, tmp_path_factory: pytest.TempPathFactory) -> Chain:
    references = References(one_process)
    references.learn(range(1, len(SETTINGS) + 2))
    return Chain(tmp_path_factory.mktemp("store"), CHUNK, references)


@pytest.fixture(scope="module")
def server(chain: Chain, logs: Path) -> Iterator[Engine]:
    """Engine, scheduler and worker in processes of their own: it has written the first prompt and read it again."""
    args = engine_args("llama", 1, block_size=64, **offload(f"file://{chain.root}"))
    with engine(args, logs / "settings.log") as running:
        chain.turn(running)
        yield running


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                pytest.mark.row("Chunked prefill and engine settings", name),
                *([] if name in FAST else [pytest.mark.slow]),
            ],
        )
        for name in SETTINGS
    ],
)
def test_setting(one_process: OneProcess, chain: Chain, server: Engine, name: str) -> None:
    chain.turn(one_process.offloading(chain.root, **SETTINGS[name]))


def loads(running: Engine) -> float:
    """Chunks that were read from the store, not found in host memory."""
    return running.metrics()["vllm:tplayout_loads_total"]


@pytest.mark.row("Cache reset", "reset_prefix_cache with and without reset_connector")
def test_reset(server: Engine, chain: Chain) -> None:
    tokens, wanted = noise(LENGTH, 1), chain.references.known[1]
    forget(server)
    supplied(server, tokens)
    for connector in (False, True):
        before = loads(server)
        assert server.call("reset_prefix_cache", connector=connector)
        answer, count = supplied(server, tokens)
        assert count == chain.full
        assert_same(answer, wanted)
        # Without the connector its host memory still holds the chunks.
        assert loads(server) - before == (chain.full // CHUNK if connector else 0)


@pytest.mark.row("Sleep mode", "sleep at levels 1 and 2, then wake up (on the CPU weights and KV stay in memory)")
@pytest.mark.parametrize("level", [1, 2])
def test_sleep(server: Engine, chain: Chain, level: int) -> None:
    """Sleeping empties vLLM's prefix cache; what was stored is there when it wakes up."""
    tokens, wanted = noise(LENGTH, 1), chain.references.known[1]
    server.generate(tokens)
    server.call("sleep", level=level)
    server.call("wake_up")
    answer, count = supplied(server, tokens)
    assert count == chain.full
    assert_same(answer, wanted)


def test_every_chunk_verifies(server: Engine, chain: Chain) -> None:
    """Last in the file."""
    chain.check()
