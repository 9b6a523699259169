"""tplayout/key_files.py: who may read a key is said, and nothing is refused."""

import os
from pathlib import Path

import pytest

from tplayout.key_files import exposure


@pytest.mark.parametrize("mode", [0o600, 0o400, 0o700, 0o622])
def test_a_key_of_its_owner_s(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    file.touch()
    file.chmod(mode)
    assert exposure(str(file)) == ""


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604])
def test_a_key_that_others_can_read(tmp_path: Path, mode: int) -> None:
    file = tmp_path / "key"
    file.touch()
    file.chmod(mode)
    line = exposure(str(file))
    assert f"key file {file} has mode {mode:04o}" in line
    assert "chmod 600" in line


def test_what_is_no_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe", 0o644)
    for path in (tmp_path / "pipe", tmp_path / "missing", tmp_path, "a\0b"):
        assert exposure(str(path)) == ""
