"""Text without secrets: URLs and error messages as they may be logged.

Knows no backend. What is a secret is judged by the name of the option that carries it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

HIDDEN = "***"

_SECRET_NAME = re.compile(
    r"key|secret|token|password|passwd|passphrase|credential|username|auth|sas|connection_string", re.I
)
_SHORTEST = 4  # shorter values are replaced nowhere: they would hit innocent text
_LONGEST_TEXT = 300


def redact(url: str) -> str:
    """The URL with user, password, query and fragment replaced by "***". Plain paths are returned as they are."""
    scheme, separator, rest = url.partition("://")
    if not separator:
        return url
    authority, slash, path = rest.partition("/")
    if "@" in authority:
        authority = HIDDEN + "@" + authority.rpartition("@")[2]
    if scheme in ("file", "local"):  # any character is part of the path
        return f"{scheme}://{authority}{slash}{path}"
    for mark in "?#":
        authority, found, _ = authority.partition(mark)
        if found:
            return f"{scheme}://{authority}{mark}{HIDDEN}"
        path, found, _ = path.partition(mark)
        if found:
            return f"{scheme}://{authority}{slash}{path}{mark}{HIDDEN}"
    return f"{scheme}://{authority}{slash}{path}"


class Scrubber:
    """Removes the secrets of one store from texts that libraries wrote. Its repr holds none of them."""

    def __init__(self, options: Mapping[str, Any], url: str = "") -> None:
        """options: storage options; url: as the user wrote it, with a password perhaps."""
        found = {*_secrets(options, ""), *_url_secrets(url)}
        self._secrets = sorted((text for text in found if len(text) >= _SHORTEST), key=len, reverse=True)

    def __call__(self, text: object) -> str:
        """The text on one line, without secrets, and not endless."""
        line = " ".join(str(text).split())
        for secret in self._secrets:
            line = line.replace(secret, HIDDEN)
        return line if len(line) <= _LONGEST_TEXT else line[: _LONGEST_TEXT - 3] + "..."

    def __repr__(self) -> str:
        return "Scrubber()"


def _secrets(value: object, name: str) -> Iterator[str]:
    """The texts in nested options that are, or are below, an option with the name of a secret."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secrets(item, name if _SECRET_NAME.search(name) else str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secrets(item, name)
    elif isinstance(value, str) and _SECRET_NAME.search(name):
        yield value


def _url_secrets(url: str) -> Iterator[str]:
    try:
        parts = urlsplit(url)
        if parts.password:
            yield parts.password
        if parts.username and "@" in parts.netloc:
            yield parts.username
    except ValueError:
        return
    for pair in parts.query.split("&"):
        yield pair.partition("=")[2]
