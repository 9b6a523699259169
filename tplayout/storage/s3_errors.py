"""What S3 servers and their client libraries report, as errors of the closed set.

Pure: looks at exceptions and builds others. An unknown failure is Unavailable.
"""

from __future__ import annotations

from botocore.exceptions import (
    ClientError,
    CredentialRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    TokenRetrievalError,
)

from tplayout.errors import Forbidden, NotFound, StorageError, StorageErrorKind, StorageFull, Unavailable
from tplayout.storage.redact import Scrubber

_CREDENTIALS = (
    CredentialRetrievalError,
    NoCredentialsError,
    PartialCredentialsError,
    ProfileNotFound,
    TokenRetrievalError,
)
_CHECK_CREDENTIALS = (
    "check the credentials (storage_options key and secret, AWS_* variables, instance role) and the bucket's policy"
)
_CHECK_SERVER = "check endpoint_url, the network and the server"


class Misconfigured(Unavailable):
    """Unavailable until somebody changes something: another attempt does not cure it."""


_NOT_FOUND = {"404", "NoSuchKey", "NoSuchVersion", "NotFound"}
_FULL = {
    "507",
    "InsufficientStorage",
    "QuotaExceeded",
    "StorageFull",
    "XMinioStorageFull",
    "XMinioAdminBucketQuotaExceeded",
}
_REDIRECTED = {
    "301",
    "307",
    "AuthorizationHeaderMalformed",
    "IllegalLocationConstraintException",
    "PermanentRedirect",
    "TemporaryRedirect",
}
_FORBIDDEN = {
    "401",
    "403",
    "405",
    "AccessDenied",
    "AccountProblem",
    "AllAccessDisabled",
    "ExpiredToken",
    "InvalidAccessKeyId",
    "InvalidSecurity",
    "InvalidToken",
    "MethodNotAllowed",
    "RequestTimeTooSkewed",
    "SignatureDoesNotMatch",
    "TokenRefreshRequired",
}


def from_exception(what: str, exc: BaseException, scrub: Scrubber) -> StorageError:
    """The error for an exception that s3fs, botocore or aiohttp raised. what: verb, key and URL."""
    for cause in _causes(exc):
        if isinstance(cause, ClientError):
            error = cause.response.get("Error", {})
            status = cause.response.get("ResponseMetadata", {}).get("HTTPStatusCode", 0)
            return from_code(what, str(error.get("Code") or status), int(status), scrub(error.get("Message") or ""))
        if isinstance(cause, _CREDENTIALS):
            return Forbidden(f"{what}: {scrub(cause)}; {_CHECK_CREDENTIALS}")
    text = scrub(exc) or "no details"
    return Unavailable(f"{what}: {type(exc).__name__}: {text}; {_CHECK_SERVER}")


def from_code(what: str, code: str, status: int, message: str) -> StorageError:
    """The error for S3's error code and HTTP status (0: unknown). message: the server's, without secrets."""
    said = f"{what}: the server says {code}" + (f" ({message})" if message and message != code else "")
    names = {code, str(status)}
    if code == "NoSuchBucket":
        return Misconfigured(f"{said}; create the bucket")
    if names & _FULL:
        return StorageFull(f"{said}; free space, raise the quota, or remove old chunks with `tplayout gc`")
    if names & _NOT_FOUND:
        return NotFound(said)
    if names & {"416", "InvalidRange"}:
        return StorageError(said, StorageErrorKind.SHORT_READ)
    if names & {"413", "EntityTooLarge"}:
        return StorageError(f"{said}; use smaller chunks (chunk_tokens)", StorageErrorKind.TOO_LARGE)
    if names & _REDIRECTED:
        return Misconfigured(f"{said}; set the bucket's region: client_kwargs region_name")
    if code == "RequestTimeTooSkewed":
        return Forbidden(f"{said}; set this machine's clock")
    if names & _FORBIDDEN:
        missing = " (which must allow s3:ListBucket, else S3 answers so for a missing object)"
        return Forbidden(f"{said}; {_CHECK_CREDENTIALS}{missing if names & {'AccessDenied', '403'} else ''}")
    passing = not 400 <= status < 500 or status in (408, 425, 429) or code == "RequestTimeout"
    return (Unavailable if passing else Misconfigured)(f"{said}; {_CHECK_SERVER}")


def _causes(exc: BaseException | None) -> list[BaseException]:
    """The exception and what caused it, s3fs's translation undone."""
    found: list[BaseException] = []
    while exc is not None and exc not in found:
        found.append(exc)
        exc = exc.__cause__ or exc.__context__
    return found
