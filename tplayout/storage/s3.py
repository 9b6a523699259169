"""s3://: a bucket, through s3fs's session and credentials.

Requests are made one by one here, not through s3fs's file methods: those keep a listing cache, join and copy whole
objects, and multiply retries. One PUT publishes an object; S3 shows it whole or not at all. Large objects are read
as parallel ranges straight into the caller's buffer. Checksums are left to the digests in the objects: servers
differ in them, and a flipped bit passes them anyway.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import contextlib
import copy
import os
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from s3fs import S3FileSystem

from tplayout.errors import StorageError, StorageErrorKind, Unavailable
from tplayout.storage.base import DEFAULT_TIMEOUT_S, Bools, ObjectInfo, Store, is_key, is_stranger
from tplayout.storage.bounded import Deadline, Lease
from tplayout.storage.redact import Scrubber
from tplayout.storage.s3_errors import Misconfigured, from_code, from_exception

T = TypeVar("T")
Keep = Callable[[int, bytes], None]  # takes (offset, bytes) of an object that is being read

PART = 16 << 20  # bytes of one ranged GET; an object of up to two parts is read in one request
MAX_PUT = 5 << 30  # S3's limit for one PUT
CONNECTIONS = 64  # of one store; further requests wait for one
ATTEMPTS = 5
_BACKOFF_S = 0.1  # before the second attempt; doubles
_CLOSE_S = 1.0
_READ_PIECE = 1 << 20
_UPLOAD_PIECE = 256 << 10
_DELETE_BATCH = 1000  # S3's limit

# What a user's config_kwargs change one by one, nested tables included.
DEFAULT_CONFIG: dict[str, Any] = {
    "connect_timeout": 5,
    "read_timeout": 15,
    "max_pool_connections": CONNECTIONS,
    "retries": {"total_max_attempts": 1},  # attempts are made here, within the deadline
    "request_checksum_calculation": "when_required",
    "response_checksum_validation": "when_required",  # some servers answer a range with the whole's checksum
    "s3": {"payload_signing_enabled": False},  # halves the CPU time of a PUT; TLS or the digests guard the body
}


class S3Store(Store):
    """The objects below bucket/prefix. Nothing is connected before the first verb; safe to use from many threads."""

    def __init__(
        self, bucket: str, prefix: str, options: Mapping[str, Any], timeout_s: float = DEFAULT_TIMEOUT_S
    ) -> None:
        """prefix: without slashes at its ends. options: of s3fs.S3FileSystem, checked by the caller."""
        super().__init__(f"s3://{bucket}" + (f"/{prefix}" if prefix else ""), timeout_s)
        self._bucket = bucket
        self._root = f"{prefix}/" if prefix else ""
        config = merged(DEFAULT_CONFIG, options.get("config_kwargs") or {})
        self._fs = S3FileSystem(
            **{**options, "config_kwargs": config, "use_listings_cache": False, "skip_instance_cache": True}
        )
        self._fs.retries = 1
        ambient = {name: value for name, value in os.environ.items() if name.startswith(("AWS_", "FSSPEC_S3"))}
        self._scrub = Scrubber({**options, "ambient": ambient})
        self._client: Any = None

    def _get(self, key: str, max_bytes: int | None, deadline: Deadline) -> bytes:
        async def read() -> bytes:
            pieces: list[bytes] = []
            await self._read_whole("get", key, max_bytes, lambda _, piece: pieces.append(piece))
            return b"".join(pieces)

        return self._run("get", key, read, deadline)

    def _get_into(self, key: str, view: memoryview, deadline: Deadline) -> int:
        lease = Lease(view)

        async def read() -> int:
            if lease.nbytes > 2 * PART:
                with contextlib.suppress(_RangesIgnored):
                    return await self._read_parts(key, lease)
            return await self._read_whole("get_into", key, lease.nbytes, lease.write)

        try:
            return self._run("get_into", key, read, deadline)
        finally:
            lease.end()

    def _get_range(self, key: str, start: int, length: int, deadline: Deadline) -> bytes:
        async def read() -> bytes:
            pieces: list[bytes] = []
            try:
                part = await self._read_part(
                    "get_range", key, start, length, None, lambda _, piece: pieces.append(piece)
                )
            except _RangesIgnored:
                raise Unavailable(
                    f"get_range {key!r} on {self.url}: the server ignores Range headers; use one that knows them"
                ) from None
            if part is None or part.length < length:
                raise self._short("get_range", key, start + length, part.total if part else start)
            return b"".join(pieces)

        return self._run("get_range", key, read, deadline)

    def _put(self, key: str, view: memoryview, deadline: Deadline) -> None:
        if view.nbytes > MAX_PUT:
            raise StorageError(
                f"put {key!r} on {self.url}: {view.nbytes} bytes, and S3 takes {MAX_PUT} in one request; "
                "use smaller chunks (chunk_tokens)",
                StorageErrorKind.TOO_LARGE,
            )
        lease = Lease(view)

        async def write() -> None:
            await self._request("put", key, "put_object", Body=_Upload(lease) if lease.nbytes else b"")

        try:
            self._run("put", key, write, deadline)
        finally:
            lease.end()

    def _exists(self, keys: Sequence[str], deadline: Deadline) -> Bools:
        async def head(key: str) -> bool:
            try:
                await self._request("exists", key, "head_object")
            except StorageError as exc:
                if exc.kind is StorageErrorKind.NOT_FOUND:
                    return False
                raise
            return True

        async def heads() -> Bools:
            return await _gather([head(key) for key in keys])

        return self._run("exists", keys[0], heads, deadline)

    def _list(self, prefix: str, deadline: Deadline) -> Iterator[ObjectInfo]:
        return (info for info in self._find("list", prefix, deadline) if is_key(info.key))

    def _strangers(self, deadline: Deadline) -> Iterator[ObjectInfo]:
        return (info for info in self._find("strangers", "", deadline) if is_stranger(info.key))

    def _find(self, verb: str, prefix: str, deadline: Deadline) -> Iterator[ObjectInfo]:
        """Everything below the root whose name starts with prefix; each page has its own deadline."""
        more: dict[str, str] = {}

        async def page() -> Any:
            return await self._call(verb, prefix, "list_objects_v2", Prefix=self._root + prefix, **more)

        while True:
            answer = self._run(verb, prefix, page, deadline.again())
            for entry in answer.get("Contents") or []:
                key = str(entry["Key"]).removeprefix(self._root)
                yield ObjectInfo(key, int(entry["Size"]), entry["LastModified"].timestamp())
            if not answer.get("IsTruncated"):
                return
            more = {"ContinuationToken": answer["NextContinuationToken"]}

    def _delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        async def batch(names: Sequence[str]) -> None:
            objects = {"Objects": [{"Key": self._root + name} for name in names], "Quiet": True}
            answer = await self._call("delete", names[0], "delete_objects", Delete=objects)
            for fault in answer.get("Errors") or []:
                if fault.get("Code") != "NoSuchKey":
                    key = str(fault.get("Key", "")).removeprefix(self._root)
                    raise from_code(
                        self._what("delete", key), str(fault.get("Code")), 0, self._scrub(fault.get("Message", ""))
                    )

        async def batches() -> None:
            await _gather([batch(keys[i : i + _DELETE_BATCH]) for i in range(0, len(keys), _DELETE_BATCH)])

        self._run("delete", keys[0], batches, deadline)

    def _close(self) -> None:
        if self._client is not None:
            future = asyncio.run_coroutine_threadsafe(self._client.close(), self._fs.loop)
            with contextlib.suppress(Exception):
                future.result(_CLOSE_S)

    def _run(self, verb: str, key: str, make: Callable[[], Coroutine[Any, Any, T]], deadline: Deadline) -> T:
        """make() on fsspec's loop thread, tried again while it pays and there is time."""
        attempts = self._attempts(verb, key, make, deadline)
        future = asyncio.run_coroutine_threadsafe(attempts, self._fs.loop)
        try:
            return future.result(deadline.left())  # the loop may be late: making a client blocks it for a moment
        except (TimeoutError, concurrent.futures.CancelledError):
            self._timed_out(verb, key, deadline)
        finally:
            future.cancel()

    async def _attempts(self, verb: str, key: str, make: Callable[[], Coroutine[Any, Any, T]], deadline: Deadline) -> T:
        pause = _BACKOFF_S
        async with asyncio.timeout(deadline.left()):
            for left in reversed(range(ATTEMPTS)):
                try:
                    return await make()
                except StorageError as exc:
                    error = exc
                except Exception as exc:  # a body that broke off, a library's surprise
                    error = from_exception(self._what(verb, key), exc, self._scrub)
                passing = error.kind is StorageErrorKind.UNAVAILABLE and not isinstance(error, Misconfigured)
                if not passing or not left or pause > deadline.left():
                    break
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
                pause *= 2
        raise error

    async def _read_whole(self, verb: str, key: str, room: int | None, keep: Keep) -> int:
        """The object in one request, handed piece by piece to keep; its length."""
        response = await self._request(verb, key, "get_object")
        with _closing(response) as body:
            size = int(response["ContentLength"])
            if room is not None and size > room:
                raise self._too_large(verb, key, size, room)
            done = await _pump(body, size, keep)
        if done != size:
            raise self._broken(verb, key, size, done)
        return size

    async def _read_parts(self, key: str, lease: Lease) -> int:
        """The object in parallel ranges that cover the buffer; its length."""
        starts = range(0, lease.nbytes, PART)
        parts = await _gather(
            [
                self._read_part("get_into", key, start, min(PART, lease.nbytes - start), lease.nbytes, lease.write)
                for start in starts
            ]
        )
        there = [part for part in parts if part is not None]
        if len({(part.total, part.version) for part in there}) > 1:
            raise Unavailable(f"{self._what('get_into', key)}: it was replaced while it was read; read it again")
        size = there[0].total if there else 0
        for start, part in zip(starts, parts, strict=True):
            got = part.length if part else 0
            if got != max(0, min(PART, size - start)):
                raise self._short("get_into", key, size, start + got)
        return size

    async def _read_part(
        self, verb: str, key: str, start: int, length: int, room: int | None, keep: Keep
    ) -> _Part | None:
        """One ranged GET, handed piece by piece to keep; None if the object ends before start."""
        try:
            response = await self._request(verb, key, "get_object", Range=f"bytes={start}-{start + length - 1}")
        except StorageError as exc:
            if exc.kind is StorageErrorKind.SHORT_READ:  # S3's InvalidRange
                return None
            raise
        with _closing(response) as body:
            size = int(response["ContentLength"])
            total = _total(response.get("ContentRange"), start, size)
            if total is None or size > length:
                raise _RangesIgnored
            if room is not None and total > room:
                raise self._too_large(verb, key, total, room)
            done = await _pump(body, size, keep, start)
        if done != size:
            raise self._broken(verb, key, size, done)
        return _Part(done, total, (response.get("ETag"), response.get("VersionId")))

    async def _request(self, verb: str, key: str, method: str, **arguments: Any) -> Any:
        """One request about one object."""
        return await self._call(verb, key, method, Key=self._root + key, **arguments)

    async def _call(self, verb: str, key: str, method: str, **arguments: Any) -> Any:
        """One request to the bucket; errors in the store's terms."""
        if self._closed:
            raise Misconfigured(f"{self._what(verb, key)}: the store was closed meanwhile")
        try:
            await self._fs.set_session()
            client = await self._fs.get_s3(self._bucket)
            if client is not self._client:
                client.meta.events.register("request-created.s3.PutObject", _without_expect)
                self._client = client
            return await self._fs._call_s3(method, Bucket=self._bucket, **arguments)
        except Exception as exc:
            raise from_exception(self._what(verb, key), exc, self._scrub) from None

    def _broken(self, verb: str, key: str, size: int, done: int) -> Unavailable:
        return Unavailable(f"{self._what(verb, key)}: the answer broke off after {done} of {size} bytes")

    def _what(self, verb: str, key: str) -> str:
        return f"{verb} {key!r} on {self.url}"


class _RangesIgnored(Exception):
    """The server answered a ranged GET with something else."""


@dataclass(frozen=True, slots=True)
class _Part:
    """What one ranged GET brought: bytes read, the whole object's size, and what tells its version."""

    length: int
    total: int
    version: tuple[str | None, str | None]


class _Upload:
    """A request body that reads the caller's buffer in small copies, so that none of it is read after the call.

    botocore wants a seekable file to sign and to send again; aiohttp sends an asynchronous iterator without
    copying the whole."""

    def __init__(self, lease: Lease) -> None:
        self._lease = lease
        self._position = 0

    def __len__(self) -> int:
        return self._lease.nbytes

    def read(self, count: int | None = -1) -> bytes:
        count = self._lease.nbytes if count is None or count < 0 else count
        piece = self._lease.read(self._position, count)
        self._position += len(piece)
        return piece

    def seek(self, offset: int, whence: int = 0) -> int:
        self._position = offset + (0, self._position, self._lease.nbytes)[whence]
        return self._position

    def tell(self) -> int:
        return self._position

    async def __aiter__(self) -> AsyncIterator[bytes]:
        while piece := self.read(_UPLOAD_PIECE):
            yield piece


def merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """base with changes put over it, tables merged member by member; shares no table with either."""
    out = copy.deepcopy(dict(base))
    for name, value in changes.items():
        old = out.get(name)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        out[name] = merged(old, value) if both else copy.deepcopy(value)  # type: ignore[arg-type]
    return out


def _without_expect(request: Any, **_: Any) -> None:
    """botocore asks for "100 Continue" before each file body: a round trip, and servers that never send it."""
    with contextlib.suppress(KeyError):
        del request.headers["Expect"]


@contextlib.contextmanager
def _closing(response: Mapping[str, Any]) -> Iterator[Any]:
    """The response's body; a connection whose body was not read to its end is closed, not reused."""
    body = response["Body"]
    try:
        yield body
    finally:
        body.close()


async def _pump(body: Any, size: int, keep: Keep, start: int = 0) -> int:
    """Hand at most size bytes of body, those from start on of the object, to keep; how many there were."""
    done = 0
    while done < size:
        piece = await body.read(min(_READ_PIECE, size - done))
        if not piece:
            break
        keep(start + done, piece)
        done += len(piece)
    return done


def _total(content_range: str | None, start: int, size: int) -> int | None:
    """The object's size from "bytes first-last/total"; None unless it describes size bytes from start on."""
    unit, _, rest = (content_range or "").partition(" ")
    span, _, total = rest.partition("/")
    if unit != "bytes" or span != f"{start}-{start + size - 1}" or not total.isdecimal():
        return None
    return int(total)


async def _gather(coroutines: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """The results in order; on the first error the others are cancelled, and ended, before it is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
