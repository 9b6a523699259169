"""What `doctor` does with a store: settings that bite, rights, and a round trip of every verb, timed.

What it writes lies under tplayout-doctor/ and is deleted again, whatever happens.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import urlsplit

from tplayout.admin.diagnosis import Finding, Level
from tplayout.errors import Forbidden, NotFound, StorageError, StorageErrorKind, StorageFull, StorageTimeout
from tplayout.storage.base import RESERVED, Store

T = TypeVar("T")

DIRECTORY = f"{RESERVED}doctor"
LARGE_BYTES = 16 << 20

_SMALL_BYTES = 4096
_REPEATS = 5
_SKEW_S = 60.0  # S3 refuses signatures that are 15 minutes off
_FREE_SHARE = 0.05


class Unreachable(Exception):
    """The store did not answer; `finding` says so."""

    def __init__(self, finding: Finding) -> None:
        super().__init__(finding.text)
        self.finding = finding


def settings(url: str, options: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> list[Finding]:
    """Findings about a URL and its options; nothing is connected."""
    scheme, _, rest = url.partition("://")
    if scheme.lower() in ("s3", "s3a"):
        return list(_s3_settings(rest.partition("/")[0], options, environ))
    if scheme.lower() in ("file", "local") or "://" not in url:
        return list(_directory(os.path.abspath(os.path.expanduser(rest if "://" in url else url))))
    return [Finding("store", Level.WARN, f"{scheme}:// is used through fsspec", "file:// and s3:// are tested most")]


def round_trip(store: Store, write: bool = True, large_bytes: int = LARGE_BYTES) -> Iterator[Finding]:
    """Findings of trying the store's verbs; write: put and delete too. Raises Unreachable if it does not answer."""
    yield _first_contact(store)
    if not write:
        yield Finding("write", Level.OK, "not tried")
        return
    key = f"{DIRECTORY}/{secrets.token_hex(8)}"
    made = _missing_directories(store.url)
    try:
        yield from _tried(_small(store, key), "write")
        yield from _tried(_large(store, f"{key}-large", large_bytes), "large object")
    finally:
        with contextlib.suppress(StorageError):  # the findings have said it
            store.delete([key, f"{key}-large"])
        for directory in made:  # a wrong path is not to look like a store afterwards
            with contextlib.suppress(OSError):
                os.rmdir(directory)


def _missing_directories(url: str) -> list[str]:
    """Directories that a write to a local store will make, the deepest first."""
    if not url.startswith("file://"):
        return []
    missing, path = [], f"{url.removeprefix('file://')}/{DIRECTORY}"
    while not os.path.exists(path):
        missing.append(path)
        path = os.path.dirname(path)
    return missing


def _s3_settings(bucket: str, options: Mapping[str, Any], environ: Mapping[str, str]) -> Iterator[Finding]:
    config = options.get("config_kwargs") or {}
    endpoint = options.get("endpoint_url") or (options.get("client_kwargs") or {}).get("endpoint_url")
    endpoint = endpoint or environ.get("AWS_ENDPOINT_URL_S3") or environ.get("AWS_ENDPOINT_URL") or ""
    strict = [
        name
        for name in ("request_checksum_calculation", "response_checksum_validation")
        if config.get(name, "when_required") != "when_required"
    ]
    if strict:
        remedy = (
            "leave it out: tplayout sets when_required, since some servers answer a range with the whole's checksum"
        )
        yield Finding("s3 checksums", Level.WARN, f"{', '.join(strict)} is set to {config[strict[0]]}", remedy)
    else:
        yield Finding("s3 checksums", Level.OK, "when_required; tplayout's own digests check the content")
    yield Finding("s3 listing cache", Level.OK, "off: what other servers write is seen at once")
    style = (config.get("s3") or {}).get("addressing_style", "auto")
    use_path = "--storage-option config_kwargs.s3.addressing_style=path (storage_options of the servers too)"
    if style != "path" and "." in bucket and not endpoint.startswith("http://"):
        text = f"bucket {bucket!r} has a dot: with host-style addresses TLS certificates do not match"
        yield Finding("s3 addressing", Level.WARN, text, use_path)
    elif style == "virtual" and endpoint:
        text = f"virtual with {endpoint}: the bucket becomes part of the host name, which needs DNS for it"
        yield Finding("s3 addressing", Level.WARN, text, use_path)
    else:
        yield Finding("s3 addressing", Level.OK, style)
    host = urlsplit(endpoint).hostname or "" if endpoint else ""
    if endpoint.startswith("http://") and not _is_loopback(host):
        text = f"{endpoint} is not encrypted: prompts and KV travel in clear"
        yield Finding("s3 endpoint", Level.WARN, text, "use https://, or a network that you trust")
    proxies = [name for name in ("HTTPS_PROXY", "https_proxy", "HTTP_PROXY", "http_proxy") if environ.get(name)]
    if proxies:
        text = f"{proxies[0]} is set: requests may go through a proxy"
        yield Finding("s3 proxy", Level.WARN, text, f"NO_PROXY={host or 's3.amazonaws.com'} where the proxy is slow")


def _is_loopback(host: str) -> bool:
    return host in ("localhost", "::1") or host.startswith("127.")


def _directory(path: str) -> Iterator[Finding]:
    """Rights and room of a local store."""
    there = path
    while not os.path.exists(there):
        there = os.path.dirname(there)
    if there != path:
        text = f"{path} does not exist yet, below {there}; the first server makes it"
        yield Finding("directory", Level.WARN, text, "check the spelling, and that the disk is mounted")
    else:
        info = os.stat(path)
        mode = stat.S_IMODE(info.st_mode)
        if not stat.S_ISDIR(info.st_mode):
            yield Finding("directory", Level.FAIL, f"{path} is no directory", "give another URL")
            return
        if mode & 0o077:
            text = f"{path} has mode {mode:04o}: others on this machine may list or read it, prompts included"
            yield Finding("permissions", Level.WARN, text, f"chmod 700 {path}")
        else:
            yield Finding("permissions", Level.OK, f"{path} has mode {mode:04o}")
    room = os.statvfs(there)
    free, share = room.f_frsize * room.f_bavail, room.f_bavail / max(1, room.f_blocks)
    text = f"{free / 2**30:.1f} GiB free ({share:.0%})"
    low = share < _FREE_SHARE
    remedy = "tplayout gc URL --max-bytes N, or another disk" if low else ""
    yield Finding("space", Level.WARN if low else Level.OK, text, remedy)
    if room.f_files and room.f_favail / room.f_files < _FREE_SHARE:
        yield Finding(
            "inodes", Level.WARN, f"{room.f_favail} of {room.f_files} inodes left", "larger chunk_tokens, or gc"
        )


def _first_contact(store: Store) -> Finding:
    try:
        _, seconds = _timed(lambda: next(iter(store.list("")), None))
    except StorageError as error:
        raise Unreachable(Finding("reach", Level.FAIL, str(error), _remedy(error))) from None
    return Finding("reach", Level.OK, f"{store.url} answers (list)", seconds=seconds)


def _small(store: Store, key: str) -> Iterator[Finding]:
    """Latencies, visibility, clock."""
    first, second = secrets.token_bytes(_SMALL_BYTES), secrets.token_bytes(_SMALL_BYTES)
    before = time.time()
    _, seconds = _median(lambda: store.put(key, first))
    yield Finding("write", Level.OK, "put of 4 KiB", seconds=seconds)
    there, seconds = _median(lambda: store.exists([key])[0])
    yield _expect(there, "exists", "what was written is there at once", "the store is not consistent", seconds)
    data, seconds = _median(lambda: store.get(key))
    yield _expect(data == first, "read", "get of 4 KiB", "another content came back than was written", seconds)
    part = store.get_range(key, 100, 50)
    yield _expect(part == first[100:150], "range", "ranged get", "a ranged get returned other bytes")
    info, seconds = _median(lambda: next((one for one in store.list(f"{DIRECTORY}/") if one.key == key), None))
    listed = info is not None and info.size == _SMALL_BYTES
    yield _expect(listed, "list", "what was written is listed at once", "the listing lags behind", seconds)
    if info is not None and info.modified is not None:
        yield _skew(info.modified, before, time.time())
    store.put(key, second)
    yield _expect(store.get(key) == second, "replace", "a new content is read at once", "a cache returns old content")
    _, seconds = _timed(lambda: store.delete([key]))
    gone = not store.exists([key])[0]
    yield _expect(gone, "delete", "what was deleted is gone", "what was deleted is still there", seconds)


def _large(store: Store, key: str, nbytes: int) -> Iterator[Finding]:
    """Rates of one object as large as a chunk."""
    data = secrets.token_bytes(1 << 20) * (nbytes >> 20 or 1)
    size = f"{len(data) >> 20} MiB"
    _, seconds = _timed(lambda: store.put(key, data))
    yield Finding("write rate", Level.OK, f"put of {size}", "", seconds, len(data) / seconds)
    buf = bytearray(len(data))
    length, seconds = _timed(lambda: store.get_into(key, buf))
    good = length == len(data) and buf == data
    finding = _expect(good, "read rate", f"get of {size}", "another content came back than was written", seconds)
    yield Finding(finding.topic, finding.level, finding.text, finding.remedy, seconds, len(data) / seconds)
    store.delete([key])


def _skew(modified: float, before: float, after: float) -> Finding:
    """Whether the store's clock and ours agree; stores may round to a second."""
    off = modified - before if modified < before - 1 else max(0.0, modified - after - 1)
    text = f"the store's clock is {abs(off):.0f} s {'behind' if off < 0 else 'ahead'}" if off else "clocks agree"
    if abs(off) > _SKEW_S:
        return Finding("clock", Level.WARN, text, "run an NTP client: S3 refuses 15 minutes, and ages in gc are wrong")
    return Finding("clock", Level.OK, text)


def _tried(findings: Iterator[Finding], topic: str) -> Iterator[Finding]:
    """The findings up to the first error, which is the last one."""
    try:
        yield from findings
    except StorageError as error:
        yield Finding(topic, Level.FAIL, str(error), _remedy(error))


def _remedy(error: StorageError) -> str:
    if isinstance(error, Forbidden):
        return "check credentials and the policy: list, get, put and delete on the prefix; or the directory's owner"
    if isinstance(error, NotFound):
        return "create the bucket, or correct the URL"
    if isinstance(error, StorageFull):
        return "free space: tplayout gc URL --max-bytes N"
    if isinstance(error, StorageTimeout):
        return "is the endpoint right, is a proxy in the way? A slow store needs --timeout"
    if error.kind is StorageErrorKind.SHORT_READ:
        return "the server truncates: look at proxies between"
    return "check endpoint_url, network and the server"


def _expect(good: bool, topic: str, text: str, wrong: str, seconds: float | None = None) -> Finding:
    if good:
        return Finding(topic, Level.OK, text, "", seconds)
    return Finding(topic, Level.FAIL, wrong, "servers would miss or recompute; use a consistent store without caches")


def _timed(call: Callable[[], T]) -> tuple[T, float]:
    start = time.perf_counter()
    result = call()
    return result, max(time.perf_counter() - start, 1e-9)


def _median(call: Callable[[], T]) -> tuple[T, float]:
    """The last result and the median time of some calls."""
    timed = [_timed(call) for _ in range(_REPEATS)]
    return timed[-1][0], sorted(seconds for _, seconds in timed)[_REPEATS // 2]
