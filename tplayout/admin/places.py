"""The places that a verb reads and writes, by their names, before anything is written: one place twice, one within the
other, a file where a directory belongs, a directory that is not there.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from tplayout.errors import ConfigError, Forbidden, Unavailable
from tplayout.format.keys import is_namespace
from tplayout.storage.base import Store
from tplayout.storage.url import absolute_url

_FILE = "file://"


def path_of(url: str) -> Path | None:
    """The absolute path that a local URL names; None for another store's. Raises ConfigError for no URL."""
    place = absolute_url(url)
    return Path(place.removeprefix(_FILE)) if place.startswith(_FILE) else None


def check_separate(source: str, target: str) -> None:
    """ConfigError if two URLs name one place, or one within the other, links followed: a source is never changed."""
    ours, theirs = _resolved(source), _resolved(target)
    if ours == theirs:
        raise ConfigError(f"SRC and DST are one place, {ours}: give another DST")
    for inner, outer in ((ours, theirs), (theirs, ours)):
        if inner.startswith(f"{outer.rstrip('/')}/"):
            raise ConfigError(f"{inner} lies within {outer}: give a place beside it")


def _resolved(url: str) -> str:
    path = path_of(url)
    return absolute_url(url).rstrip("/") if path is None else f"{_FILE}{os.path.realpath(path)}"


def check_source(path: Path) -> None:
    """Unavailable if there is nothing at a path, Forbidden if that cannot be told."""
    try:
        path.stat()
    except PermissionError as error:
        raise Forbidden(f"{path}: {error.strerror}") from None
    except OSError:
        raise Unavailable(f"{path}: no such path; is it right, and mounted?") from None


def check_store(store: Store) -> None:
    """Unavailable or ConfigError if a store that is to be read is a directory that is not there, a file, or one of a
    store's namespaces.

    An empty answer about a mistyped path, or one that is not mounted, would look like a fact about the store.
    """
    above, _, name = store.url.rpartition("/")
    if store.url.startswith(_FILE):
        path = Path(store.url.removeprefix(_FILE))
        try:
            mode = path.stat().st_mode
        except PermissionError as error:
            raise Forbidden(f"{store.url}: {error.strerror}") from None
        except OSError:
            raise Unavailable(f"{store.url}: there is no such directory; is the path right, and mounted?") from None
        if not stat.S_ISDIR(mode):
            raise ConfigError(f"{path} is a file; a store is a directory; `tplayout import` reads what export wrote")
    if is_namespace(name) and store.exists(["namespace.json"])[0]:
        raise ConfigError(f"{store.url} is a namespace of the store {above}: name that, and {name} as its namespace")


def check_directory(path: Path) -> None:
    """ConfigError if a directory cannot be at a path since it, or what should hold it, is a file."""
    there = path
    while not os.path.lexists(there) and there != there.parent:
        there = there.parent
    if not there.is_dir():
        what = "is a file" if there.exists() else "is a link to nothing"
        which = "it" if there == path else there
        raise ConfigError(f"{path}: {which} {what}, and a directory belongs there: name another place")


def check_file(path: Path) -> None:
    """ConfigError if a file cannot be written to a path: stdout, a directory, or in one that is not there."""
    if str(path) == "-":
        raise ConfigError("-: the file appears when it is complete, and cannot be written to stdout: name a file")
    if path.is_dir():
        raise ConfigError(f"{path} is a directory: name a file in it")
    if not path.parent.is_dir():
        raise ConfigError(f"{path}: there is no directory {path.parent}: make it first")
