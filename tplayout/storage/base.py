"""The store's contract: few verbs, names checked first, a deadline on each, errors from a closed set.

Public verbs are final; they check their arguments and hand a Deadline to the underscored method that a backend
implements. Semantics every backend keeps (tests/storage/test_contract.py):

- an object becomes visible complete, or not at all; replacing one is atomic; no verb repairs, deletes on read, or
  caches anything, so another process's object is seen at once;
- objects of one key are interchangeable: whoever loses a race to write one has succeeded;
- no verb outlasts its deadline, and once a verb has returned, nothing touches the caller's buffer;
- no message, repr or attribute text contains a secret, and a store is not pickled.
"""

from __future__ import annotations

import os
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, NoReturn

from tplayout.errors import StorageError, StorageErrorKind, StorageTimeout, Unavailable
from tplayout.storage.bounded import Deadline

Bools = list[bool]
Buffer = bytes | bytearray | memoryview

DEFAULT_TIMEOUT_S = 30.0
RESERVED = "tplayout-"  # a first component that begins so is a tool's
TEMPORARY_AGE_S = 3600.0  # a writer that still lives has long finished
MAX_KEY_BYTES = 1024  # S3's limit
MAX_COMPONENT_BYTES = 200  # NAME_MAX is 255, and a temporary's name is longer than its object's

# Characters that mean themselves in a URL, a glob, a shell and every file system. No component starts with a dot:
# that rules out "..", hides nothing, and keeps temporaries apart from objects.
_COMPONENT = re.compile(rf"[A-Za-z0-9_=@+-][A-Za-z0-9_.=@+-]{{0,{MAX_COMPONENT_BYTES - 1}}}", re.ASCII)
_TEMPORARY = re.compile(r"\.[A-Za-z0-9_=@+-][A-Za-z0-9_.=@+-]*\.[0-9]+\.[0-9a-f]{16}\.tmp", re.ASCII)


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One listed object. size: bytes. modified: seconds since the epoch, None where the store does not say.

    used: when it was written or last touched, None where the store does not note that (see `Store.notes_use`).
    """

    key: str
    size: int
    modified: float | None
    used: float | None = None


class Store(ABC):
    """A flat set of named, immutable byte strings. notes_use: whether `touch` does something."""

    notes_use: ClassVar[bool] = False

    def __init__(self, url: str, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        """url: without secrets. timeout_s: the deadline of a verb whose caller names none."""
        self.url = url
        self.timeout_s = timeout_s
        self._closed = False
        self._pid = os.getpid()

    def get(self, key: str, *, deadline: float | None = None, max_bytes: int | None = None) -> bytes:
        """The whole object. NotFound; kind TOO_LARGE, before its body is read, if it has more than max_bytes."""
        check_key(key)
        return self._get(key, max_bytes, self._deadline("get", key, deadline))

    def get_into(self, key: str, buf: memoryview | bytearray, *, deadline: float | None = None) -> int:
        """Read the whole object to the start of buf and return its length. NotFound; kind TOO_LARGE if it does not
        fit. On an error buf's content is undefined."""
        check_key(key)
        view = memoryview(buf).cast("B")
        if view.readonly:
            raise ValueError(f"get_into of {key!r} needs a writable buffer")
        return self._get_into(key, view, self._deadline("get_into", key, deadline))

    def get_range(self, key: str, start: int, length: int, *, deadline: float | None = None) -> bytes:
        """Exactly `length` bytes from `start` on. NotFound; kind SHORT_READ if the object ends before."""
        check_key(key)
        if start < 0 or length < 0:
            raise ValueError(f"get_range of {key!r}: start {start} and length {length} must not be negative")
        limit = self._deadline("get_range", key, deadline)
        return self._get_range(key, start, length, limit) if length else b""

    def put(self, key: str, data: Buffer, *, deadline: float | None = None) -> None:
        """Store the whole object; visible complete or not at all. An object of that name is replaced atomically."""
        check_key(key)
        self._put(key, memoryview(data).cast("B"), self._deadline("put", key, deadline))

    def exists(self, keys: Sequence[str], *, deadline: float | None = None) -> Bools:
        """For each key, in order, whether its object is there now."""
        for key in keys:
            check_key(key)
        limit = self._deadline("exists", "", deadline)
        return self._exists(keys, limit) if keys else []

    def list(self, prefix: str = "", *, deadline: float | None = None) -> Iterator[ObjectInfo]:
        """The objects whose key starts with prefix (a string prefix, not a directory), in no promised order.

        Lazy; the deadline counts anew for each page. Objects written or deleted meanwhile may be listed or not.
        Files that no key can name, temporaries among them, are left out."""
        check_prefix(prefix)
        return self._list(prefix, self._deadline("list", prefix, deadline))

    def delete(self, keys: Iterable[str], *, deadline: float | None = None) -> None:
        """Delete the objects; a missing one is fine."""
        names = [check_key(key) for key in keys]
        limit = self._deadline("delete", "", deadline)
        if names:
            self._delete(names, limit)

    def touch(self, keys: Iterable[str], *, deadline: float | None = None) -> None:
        """Note that these objects are used now, for whoever prunes the store. A missing one is fine, and so is one that
        belongs to somebody else. Does nothing where the store cannot note it; content and `modified` stay."""
        names = [check_key(key) for key in keys]
        limit = self._deadline("touch", "", deadline)
        if names:
            self._touch(names, limit)

    def temporaries(self, *, deadline: float | None = None) -> Iterator[ObjectInfo]:
        """What writers that died left behind, and what living writers are writing just now: judge by `modified`.

        Their keys are no object keys; only remove_temporaries takes them. Object stores have none."""
        return self._temporaries(self._deadline("temporaries", "", deadline))

    def remove_temporaries(self, keys: Iterable[str], *, deadline: float | None = None) -> None:
        """Delete what `temporaries` listed; a missing one is fine. Never deletes an object."""
        names = [check_temporary(key) for key in keys]
        limit = self._deadline("remove_temporaries", "", deadline)
        if names:
            self._remove_temporaries(names, limit)

    def strangers(self, *, deadline: float | None = None) -> Iterator[ObjectInfo]:
        """Files that no key can name and no writer of ours left, as far as the store tells. Lazy, like `list`.

        Their names are no object keys, and may hold any character: no verb takes them."""
        return self._strangers(self._deadline("strangers", "", deadline))

    def close(self) -> None:
        """Let go of connections. Other verbs raise Unavailable afterwards; closing again does nothing."""
        if not self._closed:
            self._closed = True
            self._close()

    @abstractmethod
    def _get(self, key: str, max_bytes: int | None, deadline: Deadline) -> bytes: ...

    @abstractmethod
    def _get_into(self, key: str, view: memoryview, deadline: Deadline) -> int: ...

    @abstractmethod
    def _get_range(self, key: str, start: int, length: int, deadline: Deadline) -> bytes: ...

    @abstractmethod
    def _put(self, key: str, view: memoryview, deadline: Deadline) -> None: ...

    @abstractmethod
    def _exists(self, keys: Sequence[str], deadline: Deadline) -> Bools: ...

    @abstractmethod
    def _list(self, prefix: str, deadline: Deadline) -> Iterator[ObjectInfo]: ...

    @abstractmethod
    def _delete(self, keys: Sequence[str], deadline: Deadline) -> None: ...

    def _touch(self, keys: Sequence[str], deadline: Deadline) -> None:
        return

    def _temporaries(self, deadline: Deadline) -> Iterator[ObjectInfo]:
        return iter(())

    def _remove_temporaries(self, keys: Sequence[str], deadline: Deadline) -> None:
        return

    def _strangers(self, deadline: Deadline) -> Iterator[ObjectInfo]:
        return iter(())

    def _close(self) -> None:
        return

    def _deadline(self, verb: str, key: str, seconds: float | None) -> Deadline:
        """The call's deadline, once it is sure that the store may be used here and now."""
        if self._closed:
            raise Unavailable(f"{verb} {key!r} on {self.url}: the store is closed; open it again")
        if os.getpid() != self._pid:
            raise Unavailable(
                f"{verb} {key!r} on {self.url}: the store was opened in another process; open it after the fork"
            )
        limit = Deadline(self.timeout_s if seconds is None else seconds)
        if limit.seconds <= 0:
            self._timed_out(verb, key, limit)
        return limit

    def _timed_out(self, verb: str, key: str, deadline: Deadline) -> NoReturn:
        raise StorageTimeout(
            f"{verb} {key!r} on {self.url}: not done after {deadline.seconds:g} s; the store is slow or hangs "
            "(a longer timeout_s waits longer)"
        )

    def _too_large(self, verb: str, key: str, size: int, room: int) -> StorageError:
        return StorageError(
            f"{verb} {key!r} on {self.url}: the object has {size} bytes, {room} were expected at most; "
            "it was not written with this geometry",
            StorageErrorKind.TOO_LARGE,
        )

    def _short(self, verb: str, key: str, expected: int, got: int) -> StorageError:
        return StorageError(
            f"{verb} {key!r} on {self.url}: the object ended after {got} bytes, {expected} were expected",
            StorageErrorKind.SHORT_READ,
        )

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.url!r})"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a store is not pickled, since it holds credentials; open it from its URL where it is used")

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def check_key(key: str) -> str:
    """key, or StorageError of kind INVALID_NAME. Applied to every name before any backend sees it."""
    fault = _fault(key)
    if fault:
        raise StorageError(f"object name {_short(key)}: {fault}", StorageErrorKind.INVALID_NAME)
    return key


def check_prefix(prefix: str) -> str:
    """prefix, or StorageError of kind INVALID_NAME: the beginning of a key, empty and ending in "/" included."""
    if not isinstance(prefix, str) or (prefix and _fault(prefix.removesuffix("/"))):
        raise StorageError(f"prefix {_short(prefix)}: not the beginning of a key", StorageErrorKind.INVALID_NAME)
    return prefix


def check_temporary(key: str) -> str:
    """key, or StorageError of kind INVALID_NAME unless it names a temporary."""
    parent, _, name = key.rpartition("/")
    if not is_temporary(name) or (parent and _fault(parent)):
        raise StorageError(f"{_short(key)} does not name a temporary", StorageErrorKind.INVALID_NAME)
    return key


def is_key(text: str) -> bool:
    """True if text can name an object."""
    return not _fault(text)


def is_temporary(name: str) -> bool:
    """True if name, a last component, is that of a file being written."""
    return _TEMPORARY.fullmatch(name) is not None


def is_stranger(path: str) -> bool:
    """True if path is neither an object's name nor a temporary's."""
    return not is_key(path) and not is_temporary(path.rpartition("/")[2])


def temporary_name(name: str) -> str:
    """A name nobody else uses, for writing the object `name` beside its place: `.<name>.<pid>.<random>.tmp`."""
    return f".{name}.{os.getpid()}.{os.urandom(8).hex()}.tmp"


def target_of(temporary: str) -> str:
    """The object that is written under a temporary name, as `Store.temporaries` lists it."""
    parent, slash, name = temporary.rpartition("/")
    return parent + slash + name.removeprefix(".").rsplit(".", 3)[0]


def _fault(key: object) -> str:
    """What is wrong with an object name; empty if nothing is."""
    if not isinstance(key, str):
        return "not a string"
    if not key:
        return "empty"
    if len(key) > MAX_KEY_BYTES:
        return f"longer than {MAX_KEY_BYTES} bytes"
    for component in key.split("/"):
        if not _COMPONENT.fullmatch(component):
            return (
                f"component {_short(component)} is not 1 to {MAX_COMPONENT_BYTES} of A-Z a-z 0-9 _ . = @ + - "
                "with no dot first"
            )
    return ""


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 100 else text[:97] + "..."
