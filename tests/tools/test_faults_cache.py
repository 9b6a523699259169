"""Thousands of faults under the Python API: no wrong byte, no untyped error. And a cache that lies is found out."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "tools"))

import faults_cache
from faults_log import RequestLog, judge

from tplayout.cache import cache as cache_module

SLOWEST_S = 60.0


def test_no_fault_gives_a_wrong_byte(tmp_path: Path) -> None:
    log = RequestLog(tmp_path / "log")
    assert faults_cache.run(log, 300, seed=5) >= 300
    verdict = judge(log.read(), faults_cache.cold_answers(), SLOWEST_S)
    assert verdict.requests > 300
    assert verdict.cached_tokens > 400
    assert not verdict.wrong
    assert not verdict.failed


def test_without_digests_the_verdict_is_red(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "verify_shard", lambda *args: None)
    log = RequestLog(tmp_path / "log")
    faults_cache.run(log, 300, seed=5)
    assert judge(log.read(), faults_cache.cold_answers(), SLOWEST_S).wrong
