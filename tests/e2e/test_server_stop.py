"""Real OpenAI servers that are stopped by SIGTERM, with work in staging or a request in flight, and started again."""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import demo
import demo_models
import pytest
from e2e_cases import CHUNK, PATIENT
from e2e_store import objects, temporary_files, verified
from flaky_proxy import Proxy
from s3_server import S3Server
from vllm_server import Answer, ServerError, VLLMServer, transfer_config

MODEL_ARGS = ("--dtype", "float32", "--enforce-eager", "--max-model-len", "4096")
ENDED_S = 25.0  # an I/O process that outlives its server ends within the drain time and one more store operation
WORDS = 8


@pytest.fixture(scope="module")
def s3(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with S3Server(tmp_path_factory.mktemp("s3")) as server:
        yield server


@pytest.fixture(scope="module")
def proxy(s3: S3Server) -> Iterator[Proxy]:
    with Proxy(s3.port) as way:
        yield way


def new_server(s3: S3Server, proxy: Proxy, log: Path, tp: int, *args: str) -> VLLMServer:
    """A server of the real model, not started, whose store is reached through the proxy."""
    env = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{proxy.port}",
        "AWS_ACCESS_KEY_ID": s3.key,
        "AWS_SECRET_ACCESS_KEY": s3.secret,
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    more = (*MODEL_ARGS, "--kv-transfer-config", transfer_config(s3.url, **PATIENT), *args)
    return VLLMServer(demo_models.ensure("smollm2"), tp, log, more, env)


class Later(threading.Thread):
    """A chat request in the background; `answer` or `error` is set at its end."""

    def __init__(self, server: VLLMServer, prompt: str, words: int) -> None:
        super().__init__(daemon=True)
        self.server, self.prompt, self.words = server, prompt, words
        self.answer: Answer | None = None
        self.error: ServerError | None = None
        self.start()

    def run(self) -> None:
        try:
            self.answer = self.server.chat(self.prompt, self.words)
        except ServerError as error:
            self.error = error


@pytest.fixture(scope="module")
def first(s3: S3Server, proxy: Proxy, logs: Path) -> Answer:
    """TP=2 without --shutdown-timeout: its store stands still while it answers, so that all is still in staging when
    SIGTERM comes; the store goes on after the server has ended."""
    server = new_server(s3, proxy, logs / "stop-at-once.log", 2)
    try:
        server.start()
        proxy.hang()
        answer = server.chat(demo.read_prompts().story, WORDS)
        assert answer.cached_tokens == 0
        assert server.stop() < 10
        assert not objects(s3.directory)
        assert any("io_process" in line for line in server.processes().values())
        proxy.pass_()
        assert server.settle(ENDED_S)
    finally:
        proxy.pass_()
        server.stop()
        server.settle(0)
    assert not [path for path in Path("/dev/shm").iterdir() if "tplayout" in path.name]
    return answer


def test_what_was_in_staging_is_published_after_sigterm(s3: S3Server, first: Answer) -> None:
    chunks = verified(s3.directory / s3.bucket / "kv")
    assert len(chunks) == first.prompt_tokens // CHUNK


def test_a_new_server_reloads_it_and_drains_on_sigterm(s3: S3Server, proxy: Proxy, logs: Path, first: Answer) -> None:
    """TP=1 with --shutdown-timeout: a request in flight at SIGTERM is answered to its end, and saved."""
    root = s3.directory / s3.bucket / "kv"
    server = new_server(s3, proxy, logs / "drain.log", 1, "--shutdown-timeout", "30")
    try:
        server.start()
        answer = server.chat(demo.read_prompts().story, WORDS)
        assert answer.text == first.text
        assert answer.cached_tokens == demo.full_chunks(answer.prompt_tokens)
        metrics = server.metrics()
        assert metrics["vllm:external_prefix_cache_hits_total"] == answer.cached_tokens
        assert metrics["vllm:tplayout_loads_total"] == answer.cached_tokens // CHUNK
        assert metrics["vllm:tplayout_staging_slots"] > 0

        begun = len(objects(root))
        request = Later(server, demo.read_prompts().other, 40)
        time.sleep(0.7)
        server.stop()
        request.join(30)
        assert request.answer is not None, request.error
        assert server.settle(ENDED_S)
        # Half of this prompt was in the store already.
        assert begun < len(objects(root)) == len(verified(root))
        assert (
            len(objects(root)) >= begun + request.answer.prompt_tokens // CHUNK - answer.prompt_tokens // CHUNK // 2 - 1
        )
    finally:
        server.stop()
        server.settle(0)
    assert temporary_files(s3.directory) == []
