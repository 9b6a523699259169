"""Messages between the scheduler and an I/O process: what they say, and how they are written.

Layer: pure text. A message is one line of JSON with a "type"; `encode` and `decode` convert, `LineReader`
splits a byte stream. Nothing here reads a socket, keeps state about jobs or knows what a message causes.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, get_type_hints

from tplayout.errors import TPLayoutError

NAMESPACE_DIFFERS = "namespace-differs"  # kind of an error: the store's namespace.json is not ours
MAX_LINE = 4 * 2**20  # a geometry with scales is the longest content


class ProtocolError(TPLayoutError):
    """The peer sent something that is no message; the connection cannot be used any more."""


@dataclass(frozen=True)
class Config:
    """The first message to an I/O process: all it has to know. Never in a log, argv or environment.

    namespace, secret, encryption_key: hex. geometry: `Geometry.to_json()`. region_bytes, region_token: of the inherited
    descriptor. document: the text of namespace.json, "" to leave it to others; agreed: as in `StagingPlan`; codec: the
    one it states. max_bytes: see `StagingPlan`. Times are seconds.
    """

    url: str
    storage_options: dict[str, Any] = field(repr=False)
    timeout_s: float
    max_bytes: int
    secret: str | None = field(repr=False)
    encryption_key: str | None = field(repr=False)
    namespace: str
    geometry: dict[str, Any]
    digest: str
    document: str
    agreed: bool
    codec: str
    region_bytes: int
    region_token: str
    load_threads: int
    save_threads: int
    save_wait_s: float
    drain_s: float


@dataclass(frozen=True)
class Load:
    """Fetch and verify the objects of one chunk into a slot. key: hex."""

    job: int
    slot: int
    groups: tuple[int, ...]
    key: str


@dataclass(frozen=True)
class Save:
    """Once all writers have marked `generation`: digest and publish.

    replace: put over an object that is there, too. sealed: the slot is complete already, only publish.
    """

    job: int
    slot: int
    generation: int
    groups: tuple[int, ...]
    key: str
    replace: bool
    sealed: bool


@dataclass(frozen=True)
class Use:
    """A chunk's objects are used without being read: tell the store, for whoever prunes it. key: hex. Not answered."""

    groups: tuple[int, ...]
    key: str


@dataclass(frozen=True)
class Cancel:
    """A job's result is not wanted any more: it is skipped if it has not begun. It is answered either way."""

    job: int


@dataclass(frozen=True)
class Probe:
    """Try whether the store answers reads."""

    job: int


@dataclass(frozen=True)
class Ping:
    """Whether the process runs: answered at once, whatever its jobs do."""


@dataclass(frozen=True)
class Pong:
    """The answer to a ping."""


@dataclass(frozen=True)
class Hello:
    """The I/O process is up: its own pid (it is nobody's child)."""

    pid: int


@dataclass(frozen=True)
class Loaded:
    """The end of a load. outcome: ready, miss, damaged, error or cancelled.

    groups: those that are verified in the slot. kind: a `StorageErrorKind` or a `Reason` where outcome is
    error or damaged. nbytes and seconds: what was fetched, in what time.
    """

    job: int
    outcome: str
    groups: tuple[int, ...]
    kind: str
    detail: str
    nbytes: int
    seconds: float


@dataclass(frozen=True)
class Sealed:
    """The slot now holds the complete objects of a save, not published yet."""

    job: int


@dataclass(frozen=True)
class Saved:
    """The end of a save.

    outcome: saved, void (a writer gave up), late (not marked in time), error or cancelled. stored: groups
    that are in the store now. written: bytes put by us (0 where the object was there already). evicted: chunks
    removed to make room, for this save and others.
    """

    job: int
    outcome: str
    stored: tuple[int, ...]
    kind: str
    detail: str
    written: int
    seconds: float
    evicted: int = 0


@dataclass(frozen=True)
class Probed:
    """The answer to a probe; kind: "" or the `StorageErrorKind`."""

    job: int
    kind: str
    detail: str


@dataclass(frozen=True)
class Stuck:
    """A store operation did not return at its deadline: this process takes no more jobs, and exits."""

    detail: str


@dataclass(frozen=True)
class Note:
    """A line for the scheduler's log."""

    level: str
    text: str


Request = Config | Load | Save | Use | Cancel | Probe | Ping
Event = Hello | Pong | Loaded | Sealed | Saved | Probed | Stuck | Note
Message = Request | Event

_TYPES: Mapping[str, type[Message]] = {
    cls.__name__.lower(): cls
    for cls in (Config, Load, Save, Use, Cancel, Probe, Ping, Hello, Pong, Loaded, Sealed, Saved, Probed, Stuck, Note)
}
_HINTS = {cls: get_type_hints(cls) for cls in _TYPES.values()}


def encode(message: Message) -> bytes:
    """One line, newline included. Raises ProtocolError for what JSON cannot hold or the peer would refuse."""
    try:
        text = json.dumps({"type": type(message).__name__.lower(), **vars(message)}, separators=(",", ":"))
    except (TypeError, ValueError) as error:
        raise ProtocolError(f"{type(message).__name__} cannot be written as JSON: {error}") from None
    if len(text) > MAX_LINE:
        raise ProtocolError(f"{type(message).__name__} of {len(text)} bytes, at most {MAX_LINE} are allowed")
    return text.encode() + b"\n"


def decode(line: bytes) -> Message:
    """The inverse of `encode`. Raises ProtocolError unless the fields and their types are exactly right."""
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):
        raise ProtocolError(f"not JSON: {line[:40]!r}") from None
    if not isinstance(value, dict) or not isinstance(value.get("type"), str) or value["type"] not in _TYPES:
        raise ProtocolError(f"no known message type: {line[:40]!r}")
    cls = _TYPES[value.pop("type")]
    if value.keys() != {item.name for item in fields(cls)}:
        raise ProtocolError(f"{cls.__name__} with the fields {sorted(value)}")
    return cls(**{name: _checked(cls, name, _HINTS[cls][name], item) for name, item in value.items()})


def _checked(cls: type[Message], name: str, hint: Any, value: Any) -> Any:
    """`value` as the field's type; JSON has no tuples, and writes whole floats as they are."""
    if hint is float and type(value) is int:
        return float(value)
    if hint == tuple[int, ...] and isinstance(value, list) and all(type(item) is int for item in value):
        return tuple(value)
    if hint in (int, float, str, bool) and type(value) is hint:
        return value
    if hint == (str | None) and (value is None or isinstance(value, str)):
        return value
    if hint == dict[str, Any] and isinstance(value, dict):
        return value
    raise ProtocolError(f"{cls.__name__}.{name} is {type(value).__name__}")


class LineReader:
    """Splits a byte stream into lines. Keeps the unfinished one, up to `limit` bytes."""

    def __init__(self, limit: int = MAX_LINE) -> None:
        """limit: bytes of the longest line that is accepted."""
        self._limit = limit
        self._tail = b""

    def feed(self, data: bytes) -> list[bytes]:
        """The lines that `data` completes, without their newline. Raises ProtocolError for a longer one."""
        *lines, self._tail = (self._tail + data).split(b"\n")
        if len(self._tail) > self._limit or any(len(line) > self._limit for line in lines):
            raise ProtocolError(f"a line of more than {self._limit} bytes")
        return lines
