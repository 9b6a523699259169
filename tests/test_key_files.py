"""tplayout/key_files.py: keys are read from files and the environment; who may read them is said, not refused."""

import os
from pathlib import Path

import pytest

from tplayout.errors import ConfigError
from tplayout.key_files import check_secret, exposure, key_in_environment, read_key_file


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


def test_a_file_is_read_without_blanks_around_the_key(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(b" \xff secret\n")
    assert read_key_file(str(tmp_path / "key")) == b"\xff secret"


@pytest.mark.parametrize(
    ("name", "said"), [("missing", "No such file"), (".", "Is a directory"), ("a\0b", "no path"), ("empty", "is empty")]
)
def test_a_file_that_holds_no_key(tmp_path: Path, name: str, said: str) -> None:
    (tmp_path / "empty").write_text("\n")
    with pytest.raises(ConfigError, match=said):
        read_key_file(str(tmp_path / name))


def test_a_key_in_the_environment_may_be_any_bytes() -> None:
    assert key_in_environment("KEY", {"KEY": os.fsdecode(b"\xff\xfe")}) == b"\xff\xfe"
    assert key_in_environment("KEY", {"KEY": ""}) is key_in_environment("KEY", {}) is None


def test_a_short_secret_is_refused_unseen() -> None:
    assert check_secret(b"0123456789abcdef", "SOURCE") == b"0123456789abcdef"
    with pytest.raises(ConfigError, match="SOURCE holds a secret of 5 bytes, must have 16 or more") as error:
        check_secret(b"five!", "SOURCE")
    assert "five!" not in str(error.value)
