"""What an interrupted verification has done already: a local file of JSON lines, one for each finished piece.

The first line says what is verified; a journal of another store or depth is refused. A last line that was cut off when
the process died is ignored, and that piece is done again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from tplayout.errors import ConfigError

_VERSION = 1


class Journal:
    """Finished pieces by name. Opened with `open`; `finish` removes the file."""

    def __init__(self, path: Path, done: dict[str, Any], stream: IO[str]) -> None:
        self.done = done
        self._path = path
        self._stream = stream

    @classmethod
    def open(cls, path: str | Path, task: Mapping[str, Any]) -> Journal:
        """Go on with the journal at path, or begin one. task: JSON values that say what is done.

        Raises ConfigError for a file that is none, or of another task.
        """
        path, head = Path(path), {"tplayout_journal": _VERSION, **task}
        done: dict[str, Any] = {}
        good = b""
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            data = b""
        for number, line in enumerate(data.splitlines(keepends=True)):
            entry = _parsed(line)
            if entry is None:
                break
            if number == 0:
                _check_head(path, entry, head)
            else:
                done[str(entry.get("piece"))] = entry.get("result")
            good += line
        if data and not good:
            raise ConfigError(f"{path} is no journal of a verification; name another file, or remove it")
        fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        os.ftruncate(fd, len(good))
        stream = os.fdopen(fd, "a", encoding="utf-8")
        stream.seek(0, os.SEEK_END)
        journal = cls(path, done, stream)
        if not good:
            journal._write(head)
        return journal

    def add(self, piece: str, result: Any) -> None:
        """Record a finished piece."""
        self._write({"piece": piece, "result": result})

    def close(self) -> None:
        """Keep the file for the next run."""
        self._stream.close()

    def finish(self) -> None:
        """Everything is done: remove the file."""
        self.close()
        self._path.unlink(missing_ok=True)

    def _write(self, entry: Mapping[str, Any]) -> None:
        self._stream.write(json.dumps(entry, separators=(",", ":")) + "\n")
        self._stream.flush()


def _parsed(line: bytes) -> dict[str, Any] | None:
    """One complete line, None if it is none."""
    if not line.endswith(b"\n"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) else None


def _check_head(path: Path, found: Mapping[str, Any], wanted: Mapping[str, Any]) -> None:
    for name, value in wanted.items():
        if found.get(name) != value:
            raise ConfigError(
                f"the journal {path} is of another verification ({name} is {found.get(name)!r}, now {value!r}); "
                "repeat that one, or name another file"
            )
