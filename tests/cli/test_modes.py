"""What the tool writes shows prompts: all of it is its owner's alone, whatever the umask."""

import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.sample_stores import TOKENS, damage_one, store_prompts
from tests.support.tool import call
from tplayout.admin.journal import Journal


@pytest.fixture(params=[0o000, 0o022, 0o077], ids=oct)
def umask(request: pytest.FixtureRequest) -> Iterator[int]:
    old = os.umask(request.param)
    yield request.param
    os.umask(old)


def wrong_modes(root: Path) -> dict[str, str]:
    """Files that are not 0600, directories that are not 0700, of all below root."""
    wanted = {True: 0o700, False: 0o600}
    modes = {path: stat.S_IMODE(path.lstat().st_mode) for path in root.rglob("*")}
    assert any(path.is_file() for path in modes)
    return {str(path.relative_to(root)): oct(mode) for path, mode in modes.items() if mode != wanted[path.is_dir()]}


def a_bundle(store: Path, out: Path) -> Path:
    file = out / "bundle"
    assert call("export", store, file).exit_code == 0
    return file


def a_journal(store: Path, out: Path) -> None:
    journal = Journal.open(out / "journal", {"what": "verify"})
    journal.add("piece", {})
    journal.close()


WRITERS: dict[str, Callable[[Path, Path], object]] = {
    "cp": lambda store, out: call("cp", store, out / "a/b/copy"),
    "mv": lambda store, out: call("mv", store, out / "moved", "--yes"),
    "export": lambda store, out: call("export", store, out / "bundle"),
    "import": lambda store, out: call("import", a_bundle(store, out), out / "imported"),
    "chunks": lambda store, out: call("convert", store, out / "chunks", "--chunk-tokens", "2"),
    "codec": lambda store, out: call("convert", store, out / "packed", "--codec", "shuffle-zstd"),
    "shards": lambda store, out: call("convert", store, out / "shards", "--tp", "2"),
    "heatmap": lambda store, out: call("inspect", store, one_key(store), "--heatmap", out / "map.png"),
    "journal": a_journal,
    "doctor": lambda store, out: call("doctor", out / "checked", "--size", "64K"),
}


def one_key(store: Path) -> str:
    return next(store.rglob("*.safetensors")).name[:12]


@pytest.mark.parametrize("writer", WRITERS)
def test_what_verbs_write_is_private(tmp_path: Path, umask: int, writer: str) -> None:
    store, out = tmp_path / "store", tmp_path / "out"
    store_prompts(store, TOKENS)
    out.mkdir()
    out.chmod(0o700)
    WRITERS[writer](store, out)
    if writer != "doctor":  # which removes what it has written
        assert wrong_modes(out) == {}


def test_what_is_moved_to_quarantine_is_private(tmp_path: Path, umask: int) -> None:
    store = tmp_path / "store"
    store_prompts(store, TOKENS)
    for path in store.rglob("*"):  # by somebody who did not care
        path.chmod(0o777)
    damage_one(store)
    call("verify", store, "--quarantine", "--yes")
    assert wrong_modes(store / "tplayout-quarantine") == {}


def test_a_file_is_private_where_it_must_have_a_name_from_the_start(
    tmp_path: Path, umask: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On file systems without unnamed files."""
    monkeypatch.setattr("tplayout.admin.local_files._open_unnamed", lambda directory: -1)
    store_prompts(tmp_path / "store", TOKENS)
    a_bundle(tmp_path / "store", tmp_path / "store")
    assert wrong_modes(tmp_path / "store") == {}
