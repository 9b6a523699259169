"""Without root's right to ignore permissions, under which tests may run."""

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

NOBODY = 65534


@contextlib.contextmanager
def unprivileged(path: Path) -> Iterator[None]:
    """Be nobody for a while, if this is root. path: a place below pytest's own that nobody shall reach."""
    if os.geteuid() != 0:
        yield
        return
    way = [path, *path.parents]
    top = next((depth for depth, directory in enumerate(way) if directory.name.startswith("pytest-of")), -1)
    for directory in way[: top + 1]:
        directory.chmod(0o755)
    os.seteuid(NOBODY)
    try:
        yield
    finally:
        os.seteuid(0)
