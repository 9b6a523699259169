"""Stores that an operator restricts, under real vLLM: encrypted with a key, or limited in what they may hold."""

import secrets
import time
from contextlib import suppress
from pathlib import Path

import pytest
from e2e_cases import CHUNK, assert_same, engine_args, noise, offload
from e2e_one_process import OneProcess, forget, supplied, wait_until_objects
from e2e_store import objects, stored_prefix
from vllm_engine import Output, engine

from tplayout.admin.catalog import Secrets
from tplayout.admin.verify import verify_store
from tplayout.format.encryption_key import EncryptionKey
from tplayout.storage import open_store
from tplayout.storage.capped import DIRECTORY

FULL = 2 * CHUNK


@pytest.fixture(scope="module")
def prompt() -> list[int]:
    return noise(FULL + 11, 81)


@pytest.fixture(scope="module")
def wanted(one_process: OneProcess, prompt: list[int]) -> Output:
    """What vLLM answers without the connector."""
    return one_process.plain().generate(prompt)


def test_an_encrypted_store_serves_another_tp_size_and_nobody_without_its_key(
    one_process: OneProcess, tmp_path: Path, logs: Path, prompt: list[int], wanted: Output
) -> None:
    root, key = tmp_path / "store", secrets.token_hex(32)
    ours, theirs = ({"encryption_key_file": str(tmp_path / name)} for name in ("ours", "theirs"))
    (tmp_path / "ours").write_text(key)
    (tmp_path / "theirs").write_text(secrets.token_hex(32))
    for file in tmp_path.iterdir():
        file.chmod(0o600)
    log = logs / "encrypted-tp2.log"
    with engine(engine_args("llama", 2, **offload(f"file://{root}", **ours)), log) as running:
        running.generate(prompt)
        wait_until_objects(root, FULL // CHUNK)
    running = one_process.offloading(root, options=ours)
    answer, count = supplied(running, prompt)
    assert count == FULL
    assert_same(answer, wanted)
    before = objects(root)
    for options in (theirs, {}):
        running = one_process.offloading(root, options=options)
        answer, count = supplied(running, prompt)
        assert count == 0
        assert_same(answer, wanted)
    assert objects(root) == before
    with open_store(root) as store:
        report = verify_store(store, secrets=Secrets(None, EncryptionKey.parse(key.encode(), "the test")))
    assert not report.damage
    assert key not in running.text() + log.read_text()
    token_ids = b"".join(token.to_bytes(4, "little") for token in prompt[:8])
    assert not any(token_ids in data or bytes.fromhex(key) in data for data in before.values())


def test_a_limited_store_makes_room_for_what_is_new(
    one_process: OneProcess, tmp_path: Path, prompt: list[int], wanted: Output
) -> None:
    """Ten prompts into room for three and a half: at no moment is there more, and the last one is served."""
    root = tmp_path / "store"
    one_process.offloading(root).generate(prompt)
    wait_until_objects(root, FULL // CHUNK)
    limit = 7 * used(root) // 2
    running = one_process.offloading(root, options={"max_bytes": limit})
    most = 0
    for seed in range(10):
        tokens = noise(FULL + 11, 90 + seed)
        answer = running.generate(tokens)
        end = time.monotonic() + 20
        while stored_prefix(root, tokens) < FULL:
            most = max(most, used(root))
            assert time.monotonic() < end, "what is new was not stored"
        most = max(most, used(root))
    assert limit // 2 < most <= limit
    assert running.metrics()["vllm:tplayout_evictions_total"] > 0
    forget(running)
    again, count = supplied(running, tokens)
    assert count == FULL
    assert_same(again, answer)


def used(root: Path) -> int:
    """Bytes of all files that the limit counts. One that goes meanwhile is not there."""
    total = 0
    for path in root.rglob("*"):
        with suppress(FileNotFoundError):
            total += path.stat().st_size if path.is_file() and DIRECTORY not in path.parts else 0
    return total
