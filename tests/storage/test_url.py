"""open_store: which URL gives which store, and one clear line for each mistake."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import pytest

from tplayout.errors import ConfigError
from tplayout.storage import open_store, redact
from tplayout.storage.generic import GenericStore
from tplayout.storage.local import LocalStore
from tplayout.storage.s3 import S3Store
from tplayout.storage.url import absolute_url

KEYS = {"key": "k", "secret": "s"}


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("file:///var/cache/kv", "/var/cache/kv"),
        ("file:///var/cache/kv/", "/var/cache/kv"),
        ("local:///var/cache/kv", "/var/cache/kv"),
        ("FILE:///var/cache/kv", "/var/cache/kv"),
        ("file:/var/cache/kv", "/var/cache/kv"),
        ("/var/cache/kv", "/var/cache/kv"),
        ("/var/cache/../kv", "/var/kv"),
        ("/var/a::b", "/var/a::b"),
        ("/var/s3://b", "/var/s3:/b"),
        (Path("/var/blank "), "/var/blank "),
        ("file:///a b/ü%20#?", "/a b/ü%20#?"),
    ],
)
def test_absolute_directories(url: str, path: str) -> None:
    store = open_store(url)
    assert isinstance(store, LocalStore)
    assert store.url == f"file://{path}"


@pytest.mark.parametrize("url", ["cache/kv", "./cache/kv", "./cache//kv/"])
def test_relative_directories_start_at_the_working_directory(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store = open_store(url)
    monkeypatch.chdir("/")
    store.put("k", b"x")
    assert store.url == f"file://{tmp_path}/cache/kv"
    assert (tmp_path / "cache/kv/k").read_bytes() == b"x"


def test_a_local_place_is_the_same_for_a_process_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    places = {"kv": f"file://{tmp_path}/kv", "~/kv": "file:///home/someone/kv", "file:/var/kv": "file:///var/kv"}
    for url, place in places.items():
        assert absolute_url(url) == place == open_store(url).url
    for url in ("s3://bucket/kv", "memory://a", "simplecache::s3://bucket"):
        assert absolute_url(url) == url
    with pytest.raises(ConfigError, match="file:///var"):
        absolute_url("file://var")


def test_path_objects_and_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    assert open_store(Path("/var/cache")).url == "file:///var/cache"
    assert open_store("~/kv").url == "file:///home/someone/kv"


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket", "s3://bucket"),
        ("s3://bucket/", "s3://bucket"),
        ("s3://bucket/a/b/", "s3://bucket/a/b"),
        ("s3a://bucket/a", "s3://bucket/a"),
        ("s3://arn:aws:s3:us-west-2:123456789012:accesspoint/name/kv", None),
    ],
)
def test_s3(url: str, shown: str | None) -> None:
    store = open_store(url, KEYS)
    assert isinstance(store, S3Store)
    assert store.url == (shown or url)


def test_other_file_systems() -> None:
    store = open_store("memory://a/b")
    assert isinstance(store, GenericStore)
    store.put("k", b"x")
    assert open_store("memory://a/b/").get("k") == b"x"
    assert open_store("memory:///a").get("b/k") == b"x"


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("", "empty"),
        ("  ", "empty"),
        (None, "no text"),
        (7, "no text"),
        (b"s3://b", "no text"),
        ("file://", "names no directory"),
        ("file:", "names no directory"),
        ("file://cache/kv", "write file:///cache/kv"),
        ("file://var/cache/kv", "write file:///var/cache/kv"),
        ("FILE://var", "write file:///var"),
        ("local://var", "write file:///var"),
        ("file:var", "write file:///var"),
        ("file://./kv", "plain path './kv'"),
        ("file://~/kv", "plain path '~/kv'"),
        ("~nobody-of-that-name/kv", "no such home"),
        (" file:///var/kv", "blank; remove it"),
        ("s3://bucket/kv ", "blank; remove it"),
        ("/var/kv\u00a0", "blank; remove it"),
        ("s3 ://bucket", "'s3 ' is no scheme"),
        ("://bucket", "'' is no scheme"),
        ("3s://bucket", "'3s' is no scheme"),
        ("s3//bucket", "a colon and two slashes"),
        ("S3:/bucket", "two slashes"),
        ("/tmp/a\0b", "control characters"),
        ("s3://bucket/a\nb", "control characters"),
        ("s3:/bucket/kv", "two slashes"),
        ("s3:bucket", "two slashes"),
        ("s3://", "no bucket name"),
        ("s3:///kv", "no bucket name"),
        ("s3://b!d/kv", "no bucket name"),
        ("s3://bucket/kv?versionId=7", "no query"),
        ("s3://bucket/a//b", "empty"),
        ("s3://bucket/../b", "'..'"),
        ("memory://a/../b", "'..'"),
        ("s3://key:secret-text@bucket/kv", "storage_options"),
        ("simplecache::s3://bucket", "chained"),
        ("filecache://x", "chained"),
        ("zip://x::file:///a.zip", "chained"),
        ("s4://bucket", "did you mean s3://"),
        ("nonsense-protocol://x", "nonsense-protocol"),
        ("gs://", "gcsfs"),
    ],
)
def test_a_wrong_url_is_one_clear_line(url: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url)
    text = str(caught.value)
    assert says in text
    assert "\n" not in text
    assert "secret-text" not in text


@pytest.mark.parametrize(
    ("url", "module", "package"),
    [
        ("gs://bucket/x", "gcsfs", "gcsfs"),
        ("az://container/x", "adlfs", "adlfs"),
        ("sftp://host/x", "paramiko", "paramiko"),
        ("smb://host/x", "smbclient", "smbprotocol"),
    ],
)
def test_a_missing_driver_names_its_package(
    url: str, module: str, package: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(ConfigError, match=f"pip install {package}"):
        open_store(url)


@pytest.mark.parametrize(
    ("url", "options", "says"),
    [
        ("/tmp/x", {"mode": 1}, "'mode' is unknown"),
        ("s3://bucket", {"endpoint": "http://h"}, "did you mean 'endpoint_url'"),
        ("s3://bucket", {"bananas": 1}, "known: anon"),
        ("s3://bucket", {"use_listings_cache": True}, "set by tplayout"),
        ("s3://bucket", {"asynchronous": True}, "set by tplayout"),
        ("s3://bucket", {"client_kwargs": "x"}, "must be a table"),
        ("s3://bucket", {"endpoint_url": "localhost:9000"}, "must be http"),
        ("s3://bucket", {"endpoint_url": "http://"}, "must be http"),
        ("s3://bucket", {"endpoint_url": "http://h:port"}, "must be http"),
        ("s3://bucket", {"endpoint_url": 7}, "must be http"),
        ("s3://bucket", {"endpoint_url": "http://u:secret-text@h"}, "credentials"),
        ("s3://bucket", {"key": "k", "username": "secret-text"}, "not both"),
        ("memory://a", {"bananas": 1}, "'bananas' is unknown"),
        ("s3://bucket", ["key"], "table"),
        ("s3://bucket", {1: 2}, "table"),
    ],
)
def test_a_wrong_option_is_one_clear_line(url: str, options: Any, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_store(url, options)
    text = str(caught.value)
    assert says in text
    assert "\n" not in text
    assert "secret-text" not in text


@pytest.mark.parametrize("seconds", [0, -1, "5", None, float("nan"), True, 1e9])
def test_a_wrong_timeout(seconds: Any) -> None:
    with pytest.raises(ConfigError, match="timeout_s"):
        open_store("/tmp/x", timeout_s=seconds)


@pytest.mark.parametrize("nbytes", ["1GiB", -1, True, 1.5, None])
def test_a_wrong_limit(nbytes: Any) -> None:
    with pytest.raises(ConfigError, match=r"^max_bytes .*must be a whole number of bytes, 0 for no limit"):
        open_store("/tmp/x", max_bytes=nbytes)


def test_opening_touches_nothing(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}/x", "s3://bucket/x", "memory://nothing"):
        open_store(url, {"endpoint_url": "http://127.0.0.1:1"} if url.startswith("s3") else None)
    assert os.listdir(tmp_path) == []


def test_options_are_not_changed() -> None:
    options = {"config_kwargs": {"read_timeout": 1}, **KEYS}
    open_store("s3://bucket", options)
    assert options == {"config_kwargs": {"read_timeout": 1}, **KEYS}


def test_a_generic_url_is_shown_without_its_password(monkeypatch: pytest.MonkeyPatch) -> None:
    from fsspec.implementations.memory import MemoryFileSystem

    class Remote(MemoryFileSystem):  # type: ignore[misc]
        protocol = "tplayout-remote"
        cachable = False

        def __init__(self, username: str = "", password: str = "", host: str = "", **kwargs: Any) -> None:
            super().__init__(**kwargs)

        @classmethod
        def _strip_protocol(cls, path: str) -> str:
            return "/" + path.partition("://")[2].partition("/")[2]

        def cat_file(self, path: str, **kwargs: Any) -> bytes:
            raise OSError(f"login as user-name with pass-word failed for {path}")

    import fsspec

    fsspec.register_implementation("tplayout-remote", Remote, clobber=True)
    store = open_store("tplayout-remote://user-name:pass-word@host/kv")
    assert store.url == "tplayout-remote://***@host/kv"
    with pytest.raises(Exception, match="login") as caught:
        store.get("k")
    assert "pass-word" not in str(caught.value)
    assert "user-name" not in str(caught.value)
    assert "pass-word" not in repr(store)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("s3://bucket/a", "s3://bucket/a"),
        ("sftp://user:pw@host:22/a", "sftp://***@host:22/a"),
        ("sftp://user:p@w@host/a", "sftp://***@host/a"),
        ("https://h/a?sig=abc&x=1#f", "https://h/a?***"),
        ("az://c/a?sas=abc", "az://c/a?***"),
        ("x://h?token=1", "x://h?***"),
        ("file:///a?b#c@d", "file:///a?b#c@d"),
        ("/plain/path?x", "/plain/path?x"),
    ],
)
def test_redact(url: str, shown: str) -> None:
    assert redact(url) == shown
