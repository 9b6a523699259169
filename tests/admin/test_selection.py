"""Which prefixes a user means."""

import pytest

from tplayout.admin.chains import build_index
from tplayout.admin.selection import keys_with, prompt_chunks, read_token_file, selected
from tplayout.errors import ConfigError, NotFound
from tplayout.format.keys import prefix_extras


@pytest.mark.parametrize("text", ["[1, 2, 3]", "1 2 3", "1,2,3\n", " 1\n2\n3 "])
def test_token_files(tmp_path, text):
    (tmp_path / "t").write_text(text)
    assert read_token_file(tmp_path / "t") == [1, 2, 3]


@pytest.mark.parametrize(
    "text", ["", "[]", "[1.5]", "[true]", "-1", "2147483648", "one", "[1", '["1"]', "[[1]]", "\xff"]
)
def test_what_is_no_token_file_is_refused_by_name(tmp_path, text):
    (tmp_path / "t").write_text(text)
    with pytest.raises(ConfigError, match="tokens file"):
        read_token_file(tmp_path / "t")


def test_a_file_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="No such file"):
        read_token_file(tmp_path / "t")


def test_prompts_and_keys(kit, store):
    namespace, _ = kit.fill(store, kit.identity())
    kit.fill(store, namespace.identity, extras=prefix_extras(4, salt="s")(0))
    index = build_index(namespace)
    chunks = prompt_chunks(index, [*kit.TOKENS[:10], 0, 0])
    assert [chunk.index for chunk in chunks] == [0, 1]
    key = chunks[1].key
    assert keys_with(index, key.hex()[:10].upper()) == key
    assert selected(index, [], []) is None
    assert selected(index, [key.hex()], [kit.TOKENS[:8]]) == [key]
    assert selected(index, [], [kit.TOKENS[:8]], "s") != [key]
    for wrong in ("abc", "xyzw", "../a"):
        with pytest.raises(ConfigError, match="hex digits"):
            keys_with(index, wrong)
    with pytest.raises(NotFound):
        keys_with(index, "0" * 64)
    with pytest.raises(NotFound):
        prompt_chunks(index, [1, 2, 3, 4])
