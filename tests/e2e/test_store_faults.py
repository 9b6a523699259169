"""A store that cannot be reached, hangs, comes back, or holds damaged objects: requests are served all the same.

One engine on a real S3 server, behind a proxy that the test controls. It starts while nothing listens.
"""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from e2e_cases import CHUNK, assert_same, cold_answer, engine_args, external_hits, noise, offload
from e2e_store import objects, stored_prefix, verified, wait_until_stored
from flaky_proxy import Proxy
from s3_server import S3Server
from vllm_engine import Engine, engine

LOAD_DEADLINE_S = 2.0
STORE_TIMEOUT_S = 4.0
MAX_IDLE_STEPS = 250  # a second


@dataclass(frozen=True)
class Setup:
    """The engine, its store's files, and the way between them."""

    engine: Engine
    root: Path
    proxy: Proxy


@pytest.fixture(scope="module")
def setup(tmp_path_factory: pytest.TempPathFactory, logs: Path) -> Iterator[Setup]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server, Proxy(server.port) as proxy:
        proxy.refuse()
        env = {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
            "AWS_ACCESS_KEY_ID": server.key,
            "AWS_SECRET_ACCESS_KEY": server.secret,
            "AWS_DEFAULT_REGION": "us-east-1",
        }
        options = {
            "load_deadline_ms": int(LOAD_DEADLINE_S * 1000),
            "store_timeout_ms": int(STORE_TIMEOUT_S * 1000),
        }
        args = engine_args("llama", 1, block_size=32, **offload(server.url, **options))
        with engine(args, logs / "faults.log", env=env) as running:
            yield Setup(running, server.directory / server.bucket / "kv", proxy)


def forget(running: Engine) -> None:
    assert running.call("reset_prefix_cache", connector=True)


def eventually(what: str, check: Callable[[], bool], within: float = 60) -> None:
    """Wait for something that the connector has to find out by itself."""
    deadline = time.monotonic() + within
    while not check():
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        time.sleep(0.5)


def saves(setup: Setup, seed: int) -> Callable[[], bool]:
    """Whether a new prompt gets into the store. Each call uses another prompt: what was skipped once stays so."""
    seeds = iter(range(seed, seed + 10_000))

    def check() -> bool:
        tokens = noise(CHUNK + 5, next(seeds))
        setup.engine.generate(tokens, 1)
        time.sleep(0.5)
        return stored_prefix(setup.root, tokens) == CHUNK

    return check


def healthy(setup: Setup) -> Callable[[], bool]:
    """Whether both reading and writing are trusted again. The engine needs steps to find that out."""

    def check() -> bool:
        setup.engine.generate(noise(5, 0), 1)
        return setup.engine.metrics()["vllm:tplayout_store_healthy"] == 1

    return check


def test_unreachable_at_start_serves_and_says_so(setup: Setup) -> None:
    output = setup.engine.generate(noise(300, 1))
    assert output.cached == 0
    assert "cannot be used now" in setup.engine.text()
    eventually(
        "the store counts as unhealthy",
        lambda: (
            bool(setup.engine.generate(noise(CHUNK + 9, 2), 1))
            and setup.engine.metrics()["vllm:tplayout_store_healthy"] == 0
        ),
    )


def test_a_store_that_comes_back_is_used(setup: Setup) -> None:
    setup.proxy.pass_()
    eventually("a save reaches the store", saves(setup, 10_000))
    eventually("the store counts as healthy", healthy(setup))
    tokens = noise(2 * CHUNK + 7, 4)
    first = setup.engine.generate(tokens)
    wait_until_stored(setup.root, tokens, 2 * CHUNK)
    forget(setup.engine)
    again = setup.engine.generate(tokens)
    assert again.cached == 2 * CHUNK
    assert_same(again, first)


def test_a_hanging_store_delays_a_request_by_its_deadline_only(setup: Setup) -> None:
    """… within 10 %; two more tries, as something else may run just then."""
    added = []
    while not added or (added[-1] > 1.1 * LOAD_DEADLINE_S and len(added) < 3):
        added.append(added_by_a_hang(setup, noise(2 * CHUNK + 8, 50 + len(added))))
    assert 0.9 * LOAD_DEADLINE_S < added[-1] <= 1.1 * LOAD_DEADLINE_S, added


def added_by_a_hang(setup: Setup, tokens: list[int]) -> float:
    """Seconds by which a hanging store puts off a first token. The engine waits, but it does not spin."""
    running = setup.engine
    setup.proxy.pass_()
    eventually("the store counts as healthy", healthy(setup))
    first = running.generate(tokens)
    wait_until_stored(setup.root, tokens, 2 * CHUNK)
    forget(running)
    setup.proxy.hang()
    begin, steps = time.monotonic(), running.call("steps")
    request = running.submit(tokens)
    time.sleep(LOAD_DEADLINE_S * 0.75)
    waited, waiting_steps = time.monotonic() - begin, running.call("steps") - steps
    output = request.result()
    setup.proxy.pass_()
    assert waiting_steps / waited <= MAX_IDLE_STEPS
    assert waiting_steps > 10  # it did wait, and not asleep for all of the time
    assert output.cached == 0
    assert_same(output, first)
    return output.first_token_s - first.first_token_s


def test_other_requests_run_while_one_waits(setup: Setup) -> None:
    running = setup.engine
    tokens, other = noise(2 * CHUNK + 9, 6), noise(40, 7)
    eventually("the store counts as healthy", healthy(setup))
    first = running.generate(tokens)
    wait_until_stored(setup.root, tokens, 2 * CHUNK)
    forget(running)
    setup.proxy.hang()
    waiting = running.submit(tokens)
    time.sleep(0.1)
    assert running.generate(other, 4).total_s < LOAD_DEADLINE_S / 2
    assert waiting.abort()
    setup.proxy.pass_()
    eventually("the store counts as healthy", healthy(setup))
    forget(running)
    assert_same(running.generate(tokens), first)


def test_damaged_objects_are_misses_and_stay_where_they_are(setup: Setup) -> None:
    """One flipped bit in the second chunk, the third one cut short."""
    running, root = setup.engine, setup.root
    tokens = noise(3 * CHUNK + 5, 8)
    before = set(objects(root))
    first = running.generate(tokens)
    wait_until_stored(root, tokens, 3 * CHUNK)
    by_tokens = {chunk.tokens: chunk.key.hex() for chunk in verified(root)}
    names = [by_tokens[tuple(tokens[i * CHUNK : (i + 1) * CHUNK])] for i in range(3)]
    flipped, cut = (next(root.rglob(f"{name}.*")) for name in names[1:])
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 4
    flipped.write_bytes(data)
    cut.write_bytes(cut.read_bytes()[:-1000])
    failures = running.metrics().get("vllm:tplayout_verification_failures_total", 0.0)
    forget(running)
    supplied = external_hits(running)
    again = running.generate(tokens)
    assert again.cached == external_hits(running) - supplied == CHUNK
    assert_same(again, first)
    assert_same(again, cold_answer(running, tokens))
    assert running.metrics()["vllm:tplayout_verification_failures_total"] > failures
    assert names[1] in running.text()
    assert flipped.exists()
    assert cut.exists()
    assert set(objects(root)) > before
