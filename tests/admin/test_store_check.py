"""What `doctor` says of stores: sound ones, and ones with each fault that it looks for."""

import os
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tplayout.admin.diagnosis import Finding, Level
from tplayout.admin.store_check import Unreachable, round_trip, settings
from tplayout.errors import Forbidden, NotFound, Unavailable
from tplayout.storage.base import Store
from tplayout.storage.url import open_store

SIZE = 1 << 20


@pytest.fixture(params=["file", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    place = tmp_path / "store"
    return open_store(place if request.param == "file" else f"memory://{str(place).strip('/')}")


def levels(findings: list[Finding]) -> dict[str, Level]:
    return {finding.topic: finding.level for finding in findings}


def test_a_sound_store(store):
    findings = list(round_trip(store, large_bytes=SIZE))
    assert {finding.level for finding in findings} == {Level.OK}
    assert {"reach", "write", "read", "range", "list", "replace", "delete", "read rate"} <= levels(findings).keys()
    assert all(finding.bytes_per_second for finding in findings if finding.topic.endswith("rate"))
    assert list(store.list()) == []


def test_nothing_is_written_if_that_is_not_wanted(store):
    def refuse(*arguments: object, **options: object) -> None:
        raise AssertionError("written")

    store.put = refuse
    assert [finding.topic for finding in round_trip(store, write=False)] == ["reach", "write"]


@pytest.mark.parametrize("error", [Unavailable("gone"), Forbidden("no"), NotFound("no bucket")])
def test_a_store_that_does_not_answer(store, error):
    def fail(*arguments: object, **options: object) -> None:
        raise error

    store.list = fail
    with pytest.raises(Unreachable) as caught:
        list(round_trip(store))
    assert (caught.value.finding.level, bool(caught.value.finding.remedy)) == (Level.FAIL, True)


def test_a_store_that_may_only_be_read(store):
    def refuse(*arguments: object, **options: object) -> None:
        raise Forbidden("put is not allowed")

    store.put = refuse
    findings = [finding for finding in round_trip(store) if finding.level is Level.FAIL]
    assert [finding.topic for finding in findings] == ["write", "large object"]
    assert "credentials" in findings[0].remedy


def test_faults_of_consistency_are_named(store):
    get, put, known = store.get, store.put, {}

    def stale(key, **options):
        return known.setdefault(key, get(key, **options))  # a cache

    store.get = stale
    assert levels(list(round_trip(store, large_bytes=SIZE)))["replace"] is Level.FAIL
    store.get = get
    store.put = lambda key, data, **options: put(key, bytes(data)[:-1] + bytes([data[-1] ^ 1]), **options)
    found = levels(list(round_trip(store, large_bytes=SIZE)))
    assert (found["read"], found["read rate"]) == (Level.FAIL, Level.FAIL)


def test_what_is_not_deleted_and_not_listed_is_told(store):
    store.list = lambda *arguments, **options: iter(())
    store.delete = lambda *arguments, **options: None
    found = levels(list(round_trip(store, large_bytes=SIZE)))
    assert (found["list"], found["delete"]) == (Level.FAIL, Level.FAIL)


@pytest.mark.parametrize(("offset", "level"), [(0, Level.OK), (-30, Level.OK), (300, Level.WARN), (-300, Level.WARN)])
def test_clocks(store, offset, level):
    listing = store.list

    def shifted(prefix="", **options):
        return (replace(info, modified=time.time() + offset) for info in listing(prefix, **options))

    store.list = shifted
    assert levels(list(round_trip(store, large_bytes=SIZE)))["clock"] is level


def test_a_directory_that_others_may_read(tmp_path):
    tmp_path.chmod(0o755)
    (finding,) = [one for one in settings(str(tmp_path), {}) if one.topic == "permissions"]
    assert (finding.level, finding.remedy) == (Level.WARN, f"chmod 700 {tmp_path}")
    tmp_path.chmod(0o700)
    assert levels(settings(f"file://{tmp_path}", {}))["permissions"] is Level.OK
    assert levels(settings(str(tmp_path / "a" / "b"), {}))["directory"] is Level.WARN
    (tmp_path / "file").touch()
    assert levels(settings(str(tmp_path / "file"), {}))["directory"] is Level.FAIL


def test_little_room(tmp_path, monkeypatch):
    room = SimpleNamespace(f_frsize=4096, f_blocks=1000, f_bavail=10, f_files=1000, f_favail=3)
    monkeypatch.setattr(os, "statvfs", lambda path: room)
    found = levels(settings(str(tmp_path), {}))
    assert (found["space"], found["inodes"]) == (Level.WARN, Level.WARN)


@pytest.mark.parametrize(
    ("url", "options", "environ", "topic"),
    [
        ("s3://b/x", {"config_kwargs": {"response_checksum_validation": "when_supported"}}, {}, "s3 checksums"),
        ("s3://my.bucket/x", {}, {}, "s3 addressing"),
        (
            "s3://b/x",
            {"endpoint_url": "https://s3.example.org", "config_kwargs": {"s3": {"addressing_style": "virtual"}}},
            {},
            "s3 addressing",
        ),
        ("s3://b/x", {"endpoint_url": "http://s3.example.org"}, {}, "s3 endpoint"),
        ("s3://b/x", {"client_kwargs": {"endpoint_url": "http://s3.example.org"}}, {}, "s3 endpoint"),
        ("s3://b/x", {}, {"AWS_ENDPOINT_URL": "http://s3.example.org"}, "s3 endpoint"),
        ("s3://b/x", {}, {"HTTPS_PROXY": "http://proxy"}, "s3 proxy"),
        ("gs://b/x", {}, {}, "store"),
    ],
)
def test_settings_that_bite(url, options, environ, topic):
    warned = [finding for finding in settings(url, options, environ) if finding.level is not Level.OK]
    assert [finding.topic for finding in warned] == [topic]
    assert warned[0].remedy


@pytest.mark.parametrize(
    ("url", "options"),
    [
        ("s3://bucket/x", {}),
        ("s3://bucket/x", {"endpoint_url": "http://127.0.0.1:9000"}),
        ("s3://my.bucket", {"config_kwargs": {"s3": {"addressing_style": "path"}}}),
    ],
)
def test_settings_that_are_fine(url, options):
    assert {finding.level for finding in settings(url, options, {})} == {Level.OK}
