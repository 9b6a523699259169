"""A store that is slower than computing costs nothing: first tokens come as soon as without it."""

import statistics
from pathlib import Path

import pytest
from e2e_cases import ANSWER, STORY_TOKENS, assert_same, engine_args, offload, story
from e2e_store import wait_until_stored
from flaky_proxy import Proxy
from s3_server import S3Server
from vllm_engine import Engine, Output, engine

CHUNKS = STORY_TOKENS // 256 * 256
PAIRS = 5
SLOW_BYTES_S = 1e6  # a chunk of this model has 15 MB and takes about a second to compute
MARGIN = 1.05


def forgotten(running: Engine) -> Output:
    """An answer for which nothing is held but by the store."""
    assert running.call("reset_prefix_cache", connector=True)
    return running.generate(story("a"), ANSWER)


@pytest.mark.slow
def test_a_slow_store_costs_no_time_and_a_fast_one_is_used_again(tmp_path: Path) -> None:
    with S3Server(tmp_path / "s3") as server, Proxy(server.port) as proxy:
        options = {**server.storage_options, "endpoint_url": f"http://127.0.0.1:{proxy.port}"}
        args = engine_args("smollm2", 1, **offload(server.url, storage_options=options, never_slower=True))
        with engine(args, tmp_path / "engine.log") as running:
            cold = running.generate(story("a"), ANSWER)
            wait_until_stored(server.directory / server.bucket / "kv", story("a"), CHUNKS)
            assert_same(forgotten(running), cold)  # from a store that is fast
            supplied = forgotten(running)
            assert supplied.cached == CHUNKS
            assert supplied.first_token_s < cold.first_token_s / 2

            proxy.bytes_per_s = SLOW_BYTES_S
            forgotten(running)  # learns it, and may wait as long as computing takes
            ratios = []
            for turn in range(PAIRS):
                reference = running.generate(story("a"), ANSWER, salt=f"{turn}")
                answer = forgotten(running)
                assert reference.cached == 0
                assert_same(answer, cold)
                ratios.append(answer.first_token_s / reference.first_token_s)
            assert statistics.median(ratios) < MARGIN, ratios

            proxy.bytes_per_s = None
            answers = [forgotten(running) for _ in range(20)]
            assert answers[-1].cached == CHUNKS, [answer.cached for answer in answers]
