"""From a URL and options to a Store. Checks everything that can be checked without connecting.

A mistake is a ConfigError of one line that names the option and the way out, and holds no secret.
"""

from __future__ import annotations

import difflib
import inspect
import os
import re
from collections.abc import Iterable, Mapping
from typing import Any
from urllib.parse import urlsplit

from tplayout.arguments import check_type
from tplayout.errors import ConfigError
from tplayout.storage.base import DEFAULT_TIMEOUT_S, Store
from tplayout.storage.redact import Scrubber, redact

__all__ = ["absolute_url", "open_store", "redact"]

S3_OPTIONS = (
    "anon",
    "cache_regions",
    "client_kwargs",
    "config_kwargs",
    "endpoint_url",
    "key",
    "password",
    "profile",
    "requester_pays",
    "s3_additional_kwargs",
    "secret",
    "token",
    "use_ssl",
    "username",
)
_TABLES = ("client_kwargs", "config_kwargs", "s3_additional_kwargs")
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://(.*)", re.DOTALL)
_TYPO = re.compile(r"(s3a?|gs|gcs|az|abfss?|sftp|memory|https?)(:/?[^/]|//)", re.IGNORECASE)
_FILE = ("file", "local")
_BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{1,253}[A-Za-z0-9]|arn:[A-Za-z0-9:/_-]+")
_CACHES = ("blockcache", "cached", "filecache", "simplecache")
NOT_LOCAL = (
    "max_bytes holds for file:// stores only: leave it out, and bound the bucket by its lifecycle rules, or run "
    "`tplayout gc --max-bytes` now and then"
)
# Options of fsspec itself that would bring back what a store must not have.
_OURS = ("asynchronous", "loop", "use_listings_cache", "listings_expiry_time", "max_paths", "skip_instance_cache")


def open_store(
    url: str | os.PathLike[str],
    storage_options: Mapping[str, Any] | None = None,
    timeout_s: float = DEFAULT_TIMEOUT_S,
    max_bytes: int = 0,
) -> Store:
    """The store at a URL: file:///path or a plain path, s3://bucket/prefix, or any other fsspec URL.

    storage_options: as fsspec takes them, credentials among them. timeout_s: the deadline of each operation.
    max_bytes: what all files of a local store may have together, see `CappedStore`; 0 for no limit. Nothing is evicted:
    a full store refuses every put (OverLimit, kind LIMIT). Servers make room, and so does `tplayout gc`.
    Nothing is connected, created or checked on the other side before the first operation. ConfigError."""
    text = _checked_text(url)
    options = _checked_options(storage_options)
    if isinstance(timeout_s, bool) or not isinstance(timeout_s, int | float) or not 0 < timeout_s < 86400:
        raise ConfigError(f"timeout_s {timeout_s!r} must be a number of seconds above 0 and below 86400")
    check_type("max_bytes", max_bytes, int, "a whole number of bytes, 0 for no limit")
    if max_bytes < 0:
        raise ConfigError(f"max_bytes {max_bytes} must be a whole number of bytes, 0 for no limit")
    scheme, rest = _split_scheme(text)
    if scheme in _CACHES or _is_chained(scheme, text):
        raise ConfigError(
            f"url {redact(text)!r}: chained URLs and fsspec's file caches are unsafe under concurrency; "
            "name the store itself"
        )
    if scheme in ("", *_FILE):
        return _open_local(_local_root(scheme, rest, text), text, options, timeout_s, max_bytes)
    if max_bytes:
        raise ConfigError(NOT_LOCAL)
    if scheme in ("s3", "s3a"):
        return _open_s3(rest, text, options, timeout_s)
    return _open_generic(scheme, text, options, timeout_s)


def absolute_url(url: str | os.PathLike[str]) -> str:
    """The same place for a process with another working directory or home: a local one as file:///path.

    ConfigError, though not for all that `open_store` refuses.
    """
    text = _checked_text(url)
    scheme, rest = _split_scheme(text)
    local = scheme in ("", *_FILE) and not _is_chained(scheme, text)
    return f"file://{_local_root(scheme, rest, text)}" if local else text


def _checked_text(url: str | os.PathLike[str]) -> str:
    text = os.fspath(url) if isinstance(url, os.PathLike) else url
    if not isinstance(text, str) or not text.strip():
        raise ConfigError(f"url {text!r} is empty or no text; give file:///path, s3://bucket/prefix or an fsspec URL")
    if any(ord(character) < 32 or ord(character) == 127 for character in text):
        raise ConfigError(f"url {redact(text)!r} contains control characters")
    if text != text.strip() and url is text:
        raise ConfigError(f"url {redact(text)!r} begins or ends with a blank; remove it")
    return text


def _split_scheme(text: str) -> tuple[str, str]:
    """The scheme in lower case, empty for a plain path, and what is behind its "://"."""
    found = _SCHEME.fullmatch(text)
    if found:
        return found[1].lower(), found[2]
    before, separator, _ = text.partition("://")
    if separator and "::" not in before and not before.startswith(("/", ".", "~")):
        raise ConfigError(
            f"url {redact(text)!r}: {before!r} is no scheme; write s3://bucket/prefix, or ./ in front of a directory "
            "that is really called so"
        )
    return "", text


def _is_chained(scheme: str, text: str) -> bool:
    """True for fsspec's a::b://c and a://b::c://d. A plain path, and an ARN, may contain two colons."""
    return "::" in text and "://" in text and scheme not in (*_FILE, "s3", "s3a")


def _local_root(scheme: str, rest: str, text: str) -> str:
    """The absolute path of a local store. A plain path may be relative; a file URL that is one is a slash short."""
    if not scheme:
        if _TYPO.match(text):
            raise ConfigError(
                f"url {redact(text)!r}: write a colon and two slashes, as in s3://bucket/prefix "
                "(or ./ in front of a directory that is really called so)"
            )
        scheme, colon, rest = text.partition(":")
        if not colon or scheme.lower() not in _FILE:
            scheme, rest = "", os.path.expanduser(text)
            if rest.startswith("~"):
                raise ConfigError(f"url {text!r}: there is no such home directory; write file:///absolute/path")
    if not rest:
        raise ConfigError(f"url {text!r} names no directory; write file:///absolute/path or a plain path")
    if scheme and not rest.startswith("/"):
        raise ConfigError(
            f"url {text!r} is not absolute: write file:///{rest} for a directory below the root, or the plain path "
            f"{rest!r} for one below the working directory"
        )
    return os.path.abspath(rest)


def _open_local(root: str, text: str, options: dict[str, Any], timeout_s: float, max_bytes: int) -> Store:
    from tplayout.storage.capped import CappedStore
    from tplayout.storage.local import LocalStore

    _check_names(options, (), text)
    return CappedStore(root, max_bytes, timeout_s) if max_bytes else LocalStore(root, timeout_s)


def _open_s3(rest: str, text: str, options: dict[str, Any], timeout_s: float) -> Store:
    if "@" in rest.partition("/")[0]:
        raise ConfigError(
            f"url {redact(text)!r}: credentials do not belong in the URL; use storage_options key and secret, "
            "or AWS_* variables"
        )
    if "?" in rest or "#" in rest:
        raise ConfigError(f"url {redact(text)!r}: an s3 URL has no query; options go to storage_options")
    bucket, prefix = _split_bucket(rest)
    if not _BUCKET.fullmatch(bucket):
        raise ConfigError(f"url {redact(text)!r}: {bucket!r} is no bucket name; write s3://bucket/prefix")
    _check_path(prefix, text)
    _check_names(options, S3_OPTIONS, text)
    for name in _TABLES:
        if not isinstance(options.get(name, {}), Mapping):
            raise ConfigError(f"storage_options {name} must be a table of options")
    _check_endpoint(options.get("endpoint_url"))
    try:
        from tplayout.storage.s3 import S3Store
    except ImportError as exc:
        raise ConfigError(f"s3:// needs a package that is not installed ({exc}): pip install s3fs") from None
    try:
        return S3Store(bucket, prefix, options, timeout_s)
    except (KeyError, TypeError, ValueError) as exc:
        raise ConfigError(f"storage_options for {redact(text)!r}: {Scrubber(options)(exc)}") from None


def _open_generic(scheme: str, text: str, options: dict[str, Any], timeout_s: float) -> Store:
    import fsspec

    from tplayout.storage.generic import PUBLISH_WHOLE, GenericStore

    try:
        kind = fsspec.get_filesystem_class(scheme)
    except ValueError:
        near = difflib.get_close_matches(scheme, ["file", "s3", "memory", *fsspec.available_protocols()], 1, 0.5)
        hint = f"; did you mean {near[0]}://?" if near else ""
        raise ConfigError(f"url {redact(text)!r}: no file system is called {scheme}://{hint}") from None
    except ImportError as exc:
        raise ConfigError(
            f"{scheme}:// needs a package that is not installed: pip install {_package(scheme)} ({exc})"
        ) from None
    _check_names(options, _parameters(kind), text)
    scrub = Scrubber(options, text)
    try:
        from_url = kind._get_kwargs_from_urls(text)
        root = kind._strip_protocol(text)
    except Exception as exc:
        raise ConfigError(f"url {redact(text)!r} is malformed: {scrub(exc)}") from None
    if not isinstance(root, str) or (scheme in PUBLISH_WHOLE - {"memory"} and not root.strip("/")):
        raise ConfigError(f"url {redact(text)!r} names no bucket or container; write {scheme}://bucket/prefix")
    _check_path(root.strip("/"), text)
    arguments = {**from_url, **options, "use_listings_cache": False, "skip_instance_cache": True}
    return GenericStore(redact(text), lambda: kind(**arguments), root, scheme, scrub, timeout_s)


def _checked_options(options: Mapping[str, Any] | None) -> dict[str, Any]:
    if options is None:
        return {}
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise ConfigError('storage_options must be a table of named options, as in {"endpoint_url": "https://…"}')
    return dict(options)


def _check_names(options: Mapping[str, Any], known: Iterable[str] | None, text: str) -> None:
    """Refuse options that the store would ignore. known: None if the file system takes any name."""
    for name in options:
        if name in _OURS:
            raise ConfigError(f"storage_options {name!r} is set by tplayout itself; remove it")
        if known is None or name in known:
            continue
        near = difflib.get_close_matches(name, sorted(known), 1)
        allowed = ", ".join(sorted(known))
        hint = f"did you mean {near[0]!r}?" if near else f"known: {allowed}" if allowed else "there are none"
        raise ConfigError(f"storage_options {name!r} is unknown for {redact(text)!r}; {hint}")


def _check_endpoint(endpoint: object) -> None:
    if endpoint is None:
        return
    try:
        parts = urlsplit(endpoint) if isinstance(endpoint, str) else None
        good = parts is not None and parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        parts, good = None, False
    if parts is not None and "@" in parts.netloc:
        raise ConfigError("storage_options endpoint_url must not hold credentials; use key and secret")
    if not good:
        raise ConfigError(f"storage_options endpoint_url {endpoint!r} must be http://host:port or https://host")


def _check_path(path: str, text: str) -> None:
    if any(component in ("", ".", "..") for component in path.split("/")) and path:
        raise ConfigError(f"url {redact(text)!r}: the path has an empty, '.' or '..' component; write it plainly")


def _split_bucket(rest: str) -> tuple[str, str]:
    """Bucket and prefix; an access point's ARN, which contains slashes, is split by s3fs."""
    if rest.startswith("arn:"):
        try:
            from s3fs import S3FileSystem
        except ImportError:
            raise ConfigError("s3:// needs a package that is not installed: pip install s3fs") from None
        bucket, prefix = S3FileSystem(skip_instance_cache=True)._find_bucket_key(rest)
    else:
        bucket, _, prefix = rest.partition("/")
    return bucket, prefix.strip("/")


def _parameters(kind: type) -> set[str] | None:
    """The option names that a file-system class takes; None if it hands unknown ones on to its driver."""
    names: set[str] = set()
    for cls in kind.__mro__:
        if "__init__" not in vars(cls) or cls.__module__ == "builtins":
            continue
        for parameter in inspect.signature(vars(cls)["__init__"]).parameters.values():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                if parameter.name not in ("kwargs", "storage_options"):
                    return None
            elif parameter.kind is not inspect.Parameter.VAR_POSITIONAL:
                names.add(parameter.name)
    return names - {"self", *_OURS}


def _package(scheme: str) -> str:
    """The pip package of a protocol's driver, as far as fsspec's registry tells."""
    from fsspec.registry import known_implementations

    entry = known_implementations.get(scheme, {})
    package = str(entry.get("class", scheme)).partition(".")[0]
    quoted = re.search(r'"([a-z0-9-]+)"', str(entry.get("err", "")))
    return quoted[1] if package == "fsspec" and quoted else package
