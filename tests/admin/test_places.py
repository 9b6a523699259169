"""Places that cannot be what a verb takes them for are refused by name."""

from pathlib import Path

import pytest

from tplayout.admin.places import check_directory, check_file, check_separate, check_source, check_store, path_of
from tplayout.errors import ConfigError, Forbidden, Unavailable
from tplayout.storage.url import open_store


@pytest.fixture
def kv(tmp_path: Path) -> Path:
    (tmp_path / "kv" / "sub").mkdir(parents=True)
    (tmp_path / "file").write_text("mine")
    (tmp_path / "alias").symlink_to(tmp_path / "kv")
    (tmp_path / "nowhere").symlink_to(tmp_path / "none")
    return tmp_path / "kv"


def test_paths(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert path_of("file:///a/b/../c") == Path("/a/c")
    assert path_of("kv") == tmp_path / "kv"
    assert path_of("s3://bucket/x") is None


@pytest.mark.parametrize(
    ("source", "target", "said"),
    [
        ("kv", "kv", "one place"),
        ("kv", "alias", "one place"),
        ("alias/", "file://{}/kv", "one place"),
        ("kv", "kv/sub", "lies within"),
        ("alias/sub", "kv", "lies within"),
        ("kv", "alias/new/deep", "lies within"),
        ("kv", "kv2", None),
        ("kv", "memory://kv", None),
    ],
)
def test_one_place_twice(kv, monkeypatch, source, target, said):
    monkeypatch.chdir(kv.parent)
    source, target = source.format(kv.parent), target.format(kv.parent)
    if said is None:
        check_separate(source, target)
        return
    with pytest.raises(ConfigError, match=said):
        check_separate(source, target)


def test_buckets():
    check_separate("s3://bucket/a", "s3://bucket/ab")
    for source, target in (("s3://b/a", "s3://b/a/"), ("s3://b/a", "s3://b/a/c"), ("s3://b", "s3://b/a")):
        with pytest.raises(ConfigError):
            check_separate(source, target)


def test_sources(kv, monkeypatch):
    check_source(kv)
    for path in (kv / "none", kv.parent / "file" / "below", kv.parent / "nowhere"):
        with pytest.raises(Unavailable, match="no such path"):
            check_source(path)
    monkeypatch.setattr(Path, "stat", denied)
    with pytest.raises(Forbidden):
        check_source(kv)
    with open_store(kv) as store, pytest.raises(Forbidden):
        check_store(store)


def denied(self: Path) -> None:
    """As for a user whom a directory above keeps out; the tests may run as one whom nothing does."""
    raise PermissionError(13, "Permission denied", str(self))


def test_stores_that_are_read(kv):
    name = "ab" * 16
    with open_store(kv) as store:
        check_store(store)
        store.put(f"{name}/namespace.json", b"{}")
    with open_store(kv / name) as store, pytest.raises(ConfigError, match=rf"of the store file://{kv}: .* {name}"):
        check_store(store)
    with open_store(kv.parent / "none") as store, pytest.raises(Unavailable, match="no such directory"):
        check_store(store)
    with open_store(kv.parent / "file") as store, pytest.raises(ConfigError, match="is a file"):
        check_store(store)
    with open_store(f"memory://{name}") as store:
        check_store(store)
        store.put("namespace.json", b"{}")
        with pytest.raises(ConfigError, match="is a namespace"):
            check_store(store)


def test_directories_that_are_written(kv):
    for path in (kv, kv.parent / "alias", kv / "new" / "deep"):
        check_directory(path)
    for path in ("file", "file/below/it", "nowhere"):
        with pytest.raises(ConfigError, match="a directory belongs there"):
            check_directory(kv.parent / path)
    assert (kv.parent / "file").read_text() == "mine"


def test_files_that_are_written(kv):
    check_file(kv / "new")
    for path, said in ((Path("-"), "stdout"), (kv, "is a directory"), (kv / "none" / "new", "no directory")):
        with pytest.raises(ConfigError, match=said):
            check_file(path)
