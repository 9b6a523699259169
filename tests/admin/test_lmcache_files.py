"""LMCache's files, from files that its own code wrote."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from tests.admin.peer_kit import GROUP, PEERS, PROMPT, filled, values
from tplayout.admin.lmcache_files import chunk_hashes, is_lmcache_directory, read_prompt
from tplayout.admin.pages import check_statement
from tplayout.errors import ConfigError, FormatError, NotFound

ONE, TWO = PEERS / "lmcache-cpu-tp1", PEERS / "lmcache-gpu-tp2"


def source(directory, backend, block=8, chunk=16, tokens=PROMPT, group=GROUP, tp=None):
    return read_prompt(directory, group, tokens, block, backend, chunk, tp)


@pytest.mark.parametrize(("directory", "backend"), [(ONE, "cpu"), (TWO, "gpu")])
def test_what_is_stated_right_gives_the_values(directory, backend):
    assert is_lmcache_directory(directory)
    found = source(directory, backend)
    check_statement(found, PROMPT, "it")
    assert np.array_equal(filled(found, range(32)), values())
    assert np.array_equal(filled(found, range(6, 21)), values()[..., 6:21, :])


@pytest.mark.parametrize(("directory", "backend", "block"), [(ONE, "gpu", 8), (ONE, "cpu", 16), (TWO, "cpu", 8)])
def test_what_is_stated_wrong_does_not_fit_the_values(directory, backend, block):
    with pytest.raises(ConfigError, match="do not fit"):
        check_statement(source(directory, backend, block), PROMPT, "it")


def test_names_are_computed_from_the_tokens():
    names = {path.name.split("@")[3] for path in ONE.iterdir()}
    assert {f"{each}.data" for each in chunk_hashes(PROMPT, 16)} == names


def test_a_prompt_ends_where_a_rank_is_missing(tmp_path):
    shutil.copytree(TWO, tmp_path / "x")
    last = chunk_hashes(PROMPT, 16)[1]
    next(path for path in (tmp_path / "x").iterdir() if last in path.name and "0x0201" in path.name).unlink()
    assert source(tmp_path / "x", "gpu").tokens == 16
    assert source(TWO, "gpu", tokens=PROMPT[:31]).tokens == 16


def test_several_tp_sizes_and_models(tmp_path):
    shutil.copytree(TWO, tmp_path / "x")
    shutil.copytree(ONE, tmp_path / "x", dirs_exist_ok=True)
    with pytest.raises(ConfigError, match="--engine-tp"):
        source(tmp_path / "x", "gpu")
    check_statement(source(tmp_path / "x", "gpu", tp=2), PROMPT, "it")
    check_statement(source(tmp_path / "x", "cpu", tp=1), PROMPT, "it")
    with pytest.raises(ConfigError, match="not 4"):
        source(tmp_path / "x", "gpu", tp=4)
    for path in list((tmp_path / "x").iterdir()):
        shutil.copy(path, path.with_name(path.name.replace("org", "other")))
    with pytest.raises(ConfigError, match="other/model"):
        source(tmp_path / "x", "gpu", tp=2)


def test_wrong_statements_are_refused_by_name(tmp_path):
    with pytest.raises(NotFound, match="--engine-chunk-tokens"):
        source(ONE, "cpu", chunk=32)
    with pytest.raises(NotFound):
        source(ONE, "cpu", tokens=[1] * 32)
    with pytest.raises(ConfigError, match="multiple"):
        source(ONE, "cpu", block=7)
    with pytest.raises(FormatError, match=r"truncated.*2 heads|truncated.*8 heads"):
        source(ONE, "cpu", group=replace(GROUP, heads=8))
    with pytest.raises(FormatError, match="trailing"):
        source(ONE, "cpu", group=replace(GROUP, heads=2))
    assert not is_lmcache_directory(tmp_path)
