"""The closed set of errors that tplayout raises.

Every error is a `TPLayoutError`. A damaged or foreign object carries a `Reason`, a failed store operation a
`StorageErrorKind`, so that callers count and decide by value and never by parsing a message. No message
contains a secret, and this module imports nothing of the project.
"""

from enum import StrEnum
from typing import Any, ClassVar


class TPLayoutError(Exception):
    """Base of every error of this package."""


class ConfigError(TPLayoutError):
    """A wrong option or argument; the message names it and the way out."""


class GeometryError(TPLayoutError):
    """An impossible geometry or sharding; the message names the field and its value."""


class Reason(StrEnum):
    """Why an object is not what its name says. One value a defect; the values are stable (metrics, logs)."""

    TRUNCATED = "truncated"  # the object ends before its content does
    TRAILING = "trailing"  # bytes follow the content
    NOT_SAFETENSORS = "not-safetensors"  # no safetensors header at the start
    NOT_A_CHUNK = "not-a-chunk"  # valid safetensors that tplayout did not write
    TOO_LARGE = "too-large"  # header or document over its cap
    NOT_UTF8 = "not-utf8"
    NOT_JSON = "not-json"
    TOO_DEEP = "too-deep"  # JSON nested deeper than the format ever is
    DUPLICATE_NAME = "duplicate-name"  # a JSON object names one member twice
    BAD_HEADER = "bad-header"  # right content, but not the header bytes the format prescribes
    BAD_TENSOR = "bad-tensor"  # a tensor entry that is no {dtype, shape, data_offsets}
    BAD_OFFSETS = "bad-offsets"  # negative, overlapping, with holes, or not what the geometry gives
    BAD_DTYPE = "bad-dtype"
    BAD_SHAPE = "bad-shape"
    BAD_METADATA = "bad-metadata"  # __metadata__ missing a field, or a field of the wrong form
    BAD_PADDING = "bad-padding"  # padding that is not zero
    BAD_TOKENS = "bad-tokens"  # a token id outside 0 .. 2**31-1
    BAD_NAME = "bad-name"  # an object name that the key tree does not have
    BAD_NAMESPACE = "bad-namespace"  # namespace.json of the wrong form
    WRONG_VERSION = "wrong-version"
    WRONG_GEOMETRY = "wrong-geometry"
    WRONG_GROUP = "wrong-group"
    WRONG_KEY = "wrong-key"  # content that belongs under another name or namespace
    WRONG_NAMESPACE = "wrong-namespace"  # namespace.json whose identity does not hash to its directory
    WRONG_DIGEST = "wrong-digest"  # a known digest, but not the one of the namespace
    WRONG_SECRET = "wrong-secret"  # secret missing, different, or not used by this object
    WRONG_ENCRYPTION_KEY = "wrong-encryption-key"  # encryption key missing, different, or not used by this object
    WRONG_CODEC = "wrong-codec"  # a known codec, but not the one of the namespace
    BAD_LENGTHS = "bad-lengths"  # a stored length that no plane can have
    BAD_PLANE = "bad-plane"  # stored bytes that are no packed plane of a cell
    BAD_TAG = "bad-tag"  # encrypted bytes that were not written in that place with that key
    DIGEST_MISMATCH = "digest-mismatch"  # a cell's bytes are not those that were written there
    UNSUPPORTED_CODEC = "unsupported-codec"
    UNSUPPORTED_DIGEST = "unsupported-digest"


class FormatError(TPLayoutError):
    """A damaged, foreign or misplaced object. `where` names it if the raiser knew (see `at`)."""

    def __init__(self, reason: Reason, detail: str = "", where: str = "") -> None:
        super().__init__(reason, detail, where)
        self.reason = reason
        self.detail = detail
        self.where = where

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        return f"{place}{self.reason}" + (f": {self.detail}" if self.detail else "")

    def at(self, where: str) -> "FormatError":
        """The same error with the object's name, for callers that know it."""
        return FormatError(self.reason, self.detail, where)


class StorageErrorKind(StrEnum):
    """What went wrong in a store operation. The values are stable (metrics, logs)."""

    NOT_FOUND = "not-found"
    TIMEOUT = "timeout"
    FORBIDDEN = "forbidden"
    FULL = "full"
    LIMIT = "limit"  # no more room below the limit that we keep to, `max_bytes`
    UNAVAILABLE = "unavailable"
    EXISTS = "exists"
    TOO_LARGE = "too-large"  # the object does not fit the buffer it is read into
    SHORT_READ = "short-read"  # fewer bytes than asked for
    INVALID_NAME = "invalid-name"


class StorageError(TPLayoutError):
    """A store operation that failed. Subclasses fix `kind`; messages hold no credentials."""

    kind: StorageErrorKind
    default_kind: ClassVar[StorageErrorKind] = StorageErrorKind.UNAVAILABLE

    def __init__(self, detail: str, kind: StorageErrorKind | None = None) -> None:
        super().__init__(detail, kind)
        self.kind = self.default_kind if kind is None else kind
        self.detail = detail

    def __str__(self) -> str:
        return f"{self.kind}: {self.detail}"


class NotFound(StorageError):
    """The object does not exist."""

    default_kind = StorageErrorKind.NOT_FOUND


class StorageTimeout(StorageError):
    """The deadline passed before the operation ended."""

    default_kind = StorageErrorKind.TIMEOUT


class Forbidden(StorageError):
    """The store refuses these credentials, or the file system this user."""

    default_kind = StorageErrorKind.FORBIDDEN


class StorageFull(StorageError):
    """No space, no inodes, or over quota."""

    default_kind = StorageErrorKind.FULL


class OverLimit(StorageError):
    """Storing this would exceed the store's limit. nbytes: of what was to be stored."""

    default_kind = StorageErrorKind.LIMIT

    def __init__(self, detail: str, kind: StorageErrorKind | None = None, nbytes: int = 0) -> None:
        super().__init__(detail, kind)
        self.nbytes = nbytes


class Unavailable(StorageError):
    """The store cannot be reached, or answers with a fault of its own."""

    default_kind = StorageErrorKind.UNAVAILABLE


class Unusable(Unavailable):
    """The place itself can hold no store, a file say, and that lasts until a person changes it or the URL."""


def as_damage(error: StorageError, name: str = "", too_large: Reason = Reason.TRAILING) -> StorageError | FormatError:
    """An object of the wrong length is a damaged one, whatever noticed it first; other errors are what they are.

    name: of the object. too_large: what one is called that does not fit.
    """
    if error.kind is StorageErrorKind.TOO_LARGE:
        return FormatError(too_large, error.detail, name)
    if error.kind is StorageErrorKind.SHORT_READ:
        return FormatError(Reason.TRUNCATED, error.detail, name)
    return error


class NamespaceMismatch(TPLayoutError):
    """Two identities that must be one: `field` is a dotted path, `ours` and `theirs` its two values."""

    def __init__(self, field: str, ours: Any, theirs: Any) -> None:
        super().__init__(field, ours, theirs)
        self.field = field
        self.ours = ours
        self.theirs = theirs

    def __str__(self) -> str:
        return f"namespace differs in {self.field}: ours {_short(self.ours)}, theirs {_short(self.theirs)}"


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 200 else text[:197] + "..."
