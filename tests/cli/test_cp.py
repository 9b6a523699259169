"""`tplayout cp` as people call it."""

from pathlib import Path

import pytest

from tests.support.sample_stores import TOKENS, content, damage_one, store_prompts, two_namespaces
from tests.support.tool import ask, call, refused
from tplayout.storage.url import open_store


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return two_namespaces(tmp_path / "store")


def test_a_whole_store(store, tmp_path):
    report = ask("cp", store, tmp_path / "copy")
    assert [each["copied"] for each in report["namespaces"].values()] == [4, 4]
    assert content(tmp_path / "copy") == content(store)
    assert [each["present"] for each in ask("cp", store, tmp_path / "copy")["namespaces"].values()] == [4, 4]


def test_a_namespace_and_a_prompt(store, tmp_path):
    name = store_prompts(store, TOKENS)
    assert list(ask("cp", store, tmp_path / "copy", "--namespace", name[:8])["namespaces"]) == [name]
    (tmp_path / "prompt").write_text(" ".join(map(str, TOKENS[:8])))
    report = ask("cp", store, tmp_path / "few", "--namespace", name, "--tokens", tmp_path / "prompt")
    assert report["namespaces"][name]["copied"] == 2
    assert len(content(tmp_path / "few")) == 3


def test_damage_is_an_exit_code_of_1(store, tmp_path):
    name = damage_one(store)
    report = ask("cp", store, tmp_path / "copy", code=1)
    damaged = [object_name for each in report["namespaces"].values() for object_name in each["damaged"]]
    assert damaged == [str(name.relative_to(store))]


@pytest.mark.parametrize("verb", ["cp", "mv"])
def test_a_namespace_that_cannot_be_read_keeps_no_other_back(store, tmp_path, verb):
    sound = store_prompts(store, TOKENS)
    (document,) = set(store.glob("*/namespace.json")) - {store / sound / "namespace.json"}
    document.write_text("{")
    options = ["--yes"] if verb == "mv" else []
    spaces = ask(verb, store, tmp_path / "copy", *options, code=1)["namespaces"]
    assert spaces[sound]["copied"] == 4
    assert list(spaces[document.parent.name]["damaged"]) == [f"{document.parent.name}/namespace.json"]
    assert len(content(tmp_path / "copy")) == 5
    assert document.read_text() == "{"


def test_between_file_systems(store):
    """memory:// lives in one process, so this one is not a subprocess."""
    url = f"memory://{str(store).strip('/')}/copy"
    ask("cp", store, url)
    with open_store(url) as copy:
        assert {info.key: copy.get(info.key) for info in copy.list()} == content(store)


def test_what_is_no_store_is_an_answer_of_no(tmp_path):
    result = call("cp", tmp_path / "nothing", tmp_path / "copy")
    assert result.exit_code == 3
    assert "no such directory" in result.stderr
    (tmp_path / "empty").mkdir()
    result = call("cp", tmp_path / "empty", tmp_path / "copy")
    assert result.exit_code == 1
    assert "no namespace" in result.stderr


@pytest.mark.parametrize("verb", ["cp", "mv"])
def test_a_store_is_not_copied_onto_itself(store, tmp_path, verb):
    (tmp_path / "alias").symlink_to(store)
    for target in (store, tmp_path / "alias"):
        assert "one place" in refused(verb, store, target)


def test_a_destination_that_is_a_file_is_left_alone(store, tmp_path):
    (tmp_path / "file").write_text("mine")
    for target in ("file", "file/below"):
        line = refused("cp", store, tmp_path / target)
        assert ("is a file" in line, "remove" in line) == (True, False)
    assert (tmp_path / "file").read_text() == "mine"


def test_a_namespace_that_is_not_there_is_an_answer_of_no(store, tmp_path):
    """In all verbs that take one."""
    name = "ffff" * 8
    for arguments in (
        ["cp", store, tmp_path / "to"],
        ["export", store, tmp_path / "to"],
        ["gc", store],
        ["verify", store],
    ):
        assert "no namespace begins with" in refused(*arguments, "--namespace", name, code=1)
    assert "no namespace begins with" in refused(
        "convert", store, tmp_path / "to", "--tp", 2, "--namespace", name, code=1
    )
    assert "no namespace begins with" in refused("ls", store, name, code=1)
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(("source", "target"), [("store", "store/copy"), ("store/deep", "store")])
def test_a_store_within_the_other_is_refused(store, tmp_path, source, target):
    (tmp_path / source).mkdir(exist_ok=True)
    before = content(store)
    result = call("cp", tmp_path / source, tmp_path / target)
    assert result.exit_code == 2
    assert "lies within" in result.stderr
    assert content(store) == before
