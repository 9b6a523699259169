"""Files that appear complete: with and without a name while they are written."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tplayout.admin import local_files
from tplayout.admin.local_files import NewFile, os_errors
from tplayout.errors import StorageFull, Unavailable


def failing(number: int):
    """A system call that fails so."""

    def fail(*args: object) -> None:
        raise OSError(number, os.strerror(number))

    return fail


@pytest.fixture(params=["no name", "a temporary name"])
def kind(request, monkeypatch):
    if request.param == "a temporary name":
        monkeypatch.setattr(local_files, "_open_unnamed", lambda directory: -1)
    return request.param


@pytest.mark.usefixtures("kind")
def test_a_file_appears_when_it_is_complete_and_replaces_another(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"before")
    new = NewFile(path, 8)
    new.write(2, b"abc")
    assert path.read_bytes() == b"before"
    new.publish()
    assert path.read_bytes() == b"\0\0abc\0\0\0"
    assert path.stat().st_mode & 0o777 == 0o600
    new.discard()
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.usefixtures("kind")
def test_what_is_discarded_leaves_nothing(tmp_path):
    new = NewFile(tmp_path / "file", 8)
    new.discard()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("kind")
def test_what_cannot_be_published_leaves_nothing(tmp_path):
    (tmp_path / "file").mkdir()
    new = NewFile(tmp_path / "file", 8)
    with pytest.raises(IsADirectoryError):
        new.publish()
    new.discard()
    assert list(tmp_path.iterdir()) == [tmp_path / "file"]


@pytest.mark.usefixtures("kind")
def test_what_is_larger_than_a_file_may_be_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "ftruncate", failing(errno.EFBIG))
    with pytest.raises(Unavailable, match="file: File too large"), os_errors():
        NewFile(tmp_path / "file", 8)
    assert list(tmp_path.iterdir()) == []


def test_a_tool_that_is_killed_leaves_nothing(tmp_path):
    code = f"""
import os, signal
from pathlib import Path
from tplayout.admin.local_files import NewFile
NewFile(Path({str(tmp_path / "file")!r}), 1 << 20).write(0, b"x" * 4096)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -9
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_names_the_file(tmp_path, monkeypatch):
    new = NewFile(tmp_path / "file", 8)
    monkeypatch.setattr(os, "pwrite", failing(errno.ENOSPC))
    with pytest.raises(StorageFull, match=f"{Path(tmp_path) / 'file'}: No space left"), os_errors():
        new.write(0, b"x")
    new.discard()
