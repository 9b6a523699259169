"""tplayout/storage/trial.py: a store that cannot be written is known before anything is, and nothing is left in one."""

import os
from pathlib import Path
from typing import NoReturn

import pytest
from s3_server import S3Server

from tests.support.rights import unprivileged
from tplayout.admin.catalog import scan
from tplayout.errors import Forbidden, StorageError, Unavailable, Unusable
from tplayout.storage.base import RESERVED, Store
from tplayout.storage.local import LocalStore
from tplayout.storage.trial import DIRECTORY, try_writing
from tplayout.storage.url import open_store


@pytest.fixture(params=["file", "capped", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        server: S3Server = request.getfixturevalue("rclone_server")
        return open_store(f"s3://{server.bucket}/trial", server.storage_options)
    if request.param == "memory":
        return open_store(f"memory://trial-{tmp_path.name}")
    return open_store(tmp_path / "kv", max_bytes=1 << 20 if request.param == "capped" else 0)


def test_a_sound_store_is_as_it_was(store: Store) -> None:
    assert try_writing(store) is None
    assert list(store.list()) == []


def test_the_name_is_a_tool_s(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    """Should it be left behind: ls, verify and gc know whose it is."""
    kept = []
    monkeypatch.setattr(store, "delete", lambda keys: kept.extend(keys))
    try_writing(store)
    assert DIRECTORY.startswith(RESERVED)
    assert [info.key for info in scan(store).tools] == kept
    monkeypatch.undo()
    store.delete(kept)


@pytest.mark.parametrize("below", ["file", "file/x/y"])
def test_a_file_in_the_way_lasts(tmp_path: Path, below: str) -> None:
    (tmp_path / "file").write_text("mine")
    for url in (f"{tmp_path}/{below}", f"/dev/null/{below}", "/dev/null"):
        with pytest.raises(Unusable, match="a store is a directory"):
            try_writing(open_store(url))
    assert (tmp_path / "file").read_text() == "mine"


def test_where_no_directory_can_be_made() -> None:
    with pytest.raises(Unavailable, match="its directory cannot be made"):
        try_writing(open_store("/proc/tplayout-trial"))


def test_a_directory_without_the_right_to_write(tmp_path: Path) -> None:
    (tmp_path / "kv").mkdir()
    (tmp_path / "kv").chmod(0o555)
    store = open_store(tmp_path / "kv")
    with unprivileged(tmp_path), pytest.raises(Forbidden, match="check the owner and mode of the directory"):
        try_writing(store)
    assert os.listdir(tmp_path / "kv") == []


def test_other_content_than_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalStore, "get", lambda self, key, **options: b"stale")
    store = open_store(tmp_path / "kv")
    with pytest.raises(Unavailable, match="another content came back"):
        try_writing(store)
    assert list(store.list()) == []


def test_a_full_store_of_a_server_is_usable(tmp_path: Path) -> None:
    """Whoever writes chunks makes room."""
    store = open_store(tmp_path / "kv", max_bytes=1000)
    store.put("ns/k", bytes(900))
    assert try_writing(store) is None
    assert [info.key for info in store.list()] == ["ns/k"]


def test_what_cannot_be_deleted_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def delete(self: Store, keys: list[str]) -> NoReturn:
        raise Forbidden("no right to delete")

    monkeypatch.setattr(LocalStore, "delete", delete)
    error = try_writing(open_store(tmp_path / "kv"))
    assert isinstance(error, StorageError)
    assert str(error) == "forbidden: no right to delete"
