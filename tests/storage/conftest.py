"""Real S3 servers for the storage tests, one of each kind per run, and the test helpers' import paths."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
for _path in (ROOT / "tests" / "support", ROOT / "tools"):
    if str(_path) not in sys.path:
        sys.path.insert(0, str(_path))

from ceph_server import CephServer, missing_programs  # noqa: E402
from s3_server import S3Server  # noqa: E402


@pytest.fixture(scope="session")
def rclone_server() -> Iterator[S3Server]:
    with S3Server() as server:
        yield server


@pytest.fixture(scope="session")
def ceph_server() -> Iterator[CephServer]:
    missing = missing_programs()
    if missing:
        pytest.fail(f"Ceph is not installed ({', '.join(missing)}): run tools/setup_ceph.sh, or deselect -m 'not ceph'")
    with CephServer() as server:
        yield server
