"""The options of `kv_connector_extra_config`: parsed once, strictly, into one frozen record.

Layer: bottom of the connector; knows neither vLLM nor torch. Every refusal is one line that names the option.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NoReturn

from tplayout.arguments import SIZE_EXAMPLES, parse_size
from tplayout.errors import ConfigError
from tplayout.format.encryption_key import EncryptionKey
from tplayout.key_files import (
    ENCRYPTION_KEY_ENV,
    SECRET_ENV,
    check_secret,
    exposure,
    key_in_environment,
    read_key_file,
)
from tplayout.storage.url import NOT_LOCAL, absolute_url


@dataclass(frozen=True)
class Options:
    """What a user may set. Sizes are bytes, times are seconds.

    url:               where chunks live: file:///dir, s3://bucket/prefix, or any fsspec URL.
    storage_options:   passed to the store's file system (fsspec's own names), may hold credentials.
    max_bytes:         what all files of a local store may have together; None: no limit.
    chunk_tokens:      tokens a stored chunk; servers share only chunks of one size. None: the model's default.
    staging_bytes:     host memory for chunks on their way; None: sized from the machine.
    io_processes:      processes that read, write and verify; None: sized from the machine.
    load_deadline:     how long a request waits for its prefix before it is computed instead.
    store_timeout:     how long one store operation may take.
    never_slower:      take only what loads faster than the engine computes it.
    strict:            refuse to start when the store cannot be reached.
    weights_label:     names the weights where they have no files (`--load-format dummy`).
    secret:            authenticates what is stored; from the file of `secret_key_file` or from the environment.
    encryption_key:    encrypts what is stored; from the file of `encryption_key_file` or from the environment.
    warnings:          what to tell the operator once, at start.
    """

    url: str
    storage_options: Mapping[str, Any] = field(default_factory=dict, repr=False)
    max_bytes: int | None = None
    chunk_tokens: int | None = None
    staging_bytes: int | None = None
    io_processes: int | None = None
    load_deadline: float = 3.0
    store_timeout: float = 30.0
    never_slower: bool = True
    strict: bool = False
    weights_label: str | None = None
    secret: bytes | None = field(default=None, repr=False)
    encryption_key: EncryptionKey | None = None
    warnings: tuple[str, ...] = ()

    def __reduce__(self) -> NoReturn:
        raise TypeError("options are not pickled, since they hold secrets; vLLM sends what they were parsed from")


_NAMES = (
    "url",
    "storage_options",
    "max_bytes",
    "chunk_tokens",
    "staging_bytes",
    "io_processes",
    "load_deadline_ms",
    "store_timeout_ms",
    "never_slower",
    "strict",
    "weights_label",
    "secret_key_file",
    "encryption_key_file",
)


def parse_options(extra: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Options:
    """Check and convert `kv_connector_extra_config`. Raises ConfigError naming the first wrong option."""
    for name in extra:
        if name not in _NAMES:
            close = difflib.get_close_matches(str(name), _NAMES, n=1)
            hint = f"did you mean {close[0]!r}?" if close else f"known are {', '.join(_NAMES)}"
            raise _wrong(name, f"is no option of TPLayoutConnector; {hint}")
    url = extra.get("url")
    if not isinstance(url, str) or not url.strip():
        raise _wrong("url", "is required: where to keep KV, for example file:///var/cache/kv or s3://bucket/prefix")
    try:
        local = absolute_url(url).startswith("file://")  # where that is, is said at start
    except ConfigError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from None
    max_bytes = _size(extra, "max_bytes")
    if max_bytes is not None and not local:
        raise ConfigError(f"kv_connector_extra_config: {NOT_LOCAL}")
    storage = extra.get("storage_options", {})
    if not isinstance(storage, Mapping):
        # Not what it is: that would be credentials.
        raise _wrong("storage_options", f"must be an object of the file system's options, not {type(storage).__name__}")
    return Options(
        url=url,
        storage_options=dict(storage),
        max_bytes=max_bytes,
        chunk_tokens=_integer(extra, "chunk_tokens", None, 16, 65536),
        staging_bytes=_size(extra, "staging_bytes"),
        io_processes=_integer(extra, "io_processes", None, 1, 64),
        load_deadline=_integer(extra, "load_deadline_ms", 3000, 1, 3_600_000) / 1000,
        store_timeout=_integer(extra, "store_timeout_ms", 30_000, 1, 3_600_000) / 1000,
        never_slower=_boolean(extra, "never_slower", True),
        strict=_boolean(extra, "strict", False),
        weights_label=_text(extra, "weights_label"),
        secret=_secret(extra, environ),
        encryption_key=_encryption_key(extra, environ),
        warnings=tuple(_exposed(extra)),
    )


def _wrong(name: str, what: str) -> ConfigError:
    return ConfigError(f"kv_connector_extra_config: {name!r} {what}")


def _kind(value: Any) -> str:
    return f"{type(value).__name__} {str(value)[:40]!r}"


def _integer(extra: Mapping[str, Any], name: str, default: Any, low: int, high: int) -> Any:
    value = extra.get(name)
    if value is None:
        return default
    if type(value) is not int or not low <= value <= high:
        raise _wrong(name, f"must be a whole number from {low} to {high}, not {_kind(value)}")
    return value


def _boolean(extra: Mapping[str, Any], name: str, default: bool) -> bool:
    value = extra.get(name, default)
    if type(value) is not bool:
        raise _wrong(name, f"must be true or false, not {_kind(value)}")
    return value


def _text(extra: Mapping[str, Any], name: str) -> str | None:
    value = extra.get(name)
    if value is not None and (not isinstance(value, str) or not value.strip()):
        raise _wrong(name, f"must be a non-empty string, not {_kind(value)}")
    if value is not None and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _wrong(name, f"is no text: {value!r}") from None
    return value


def _size(extra: Mapping[str, Any], name: str) -> int | None:
    value = extra.get(name)
    if value is None:
        return None
    if isinstance(value, str):
        with suppress(ValueError):
            value = parse_size(value)
    if type(value) is not int or value <= 0:
        raise _wrong(name, f"must be a number of bytes or a size such as {SIZE_EXAMPLES}, not {_kind(value)}")
    return value


def _secret(extra: Mapping[str, Any], environ: Mapping[str, str]) -> bytes | None:
    data, source = _key(extra, "secret_key_file", SECRET_ENV, environ)
    try:
        return None if data is None else check_secret(data, source)
    except ConfigError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from None


def _encryption_key(extra: Mapping[str, Any], environ: Mapping[str, str]) -> EncryptionKey | None:
    text, source = _key(extra, "encryption_key_file", ENCRYPTION_KEY_ENV, environ)
    try:
        return None if text is None else EncryptionKey.parse(text, source)
    except ConfigError as error:
        raise ConfigError(f"kv_connector_extra_config: {error}") from None


def _exposed(extra: Mapping[str, Any]) -> Iterator[str]:
    """A line for each key file that others can read. Whether they are paths was checked."""
    for name in ("secret_key_file", "encryption_key_file"):
        if extra.get(name) is not None and (line := exposure(extra[name])):
            yield f"{name}: {line}"


def _key(extra: Mapping[str, Any], name: str, variable: str, environ: Mapping[str, str]) -> tuple[bytes | None, str]:
    """What the file that an option names holds, else the environment variable; and which of the two that was."""
    path = _text(extra, name)
    if path is None:
        return key_in_environment(variable, environ), variable
    try:
        return read_key_file(path), repr(name)
    except ConfigError as error:
        raise ConfigError(f"kv_connector_extra_config: {name!r}: {error}") from None
