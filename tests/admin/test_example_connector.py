"""ExampleConnector's directories, from files that its own code wrote."""

import shutil
from dataclasses import replace

import numpy as np
import pytest

from tests.admin.peer_kit import GROUP, PEERS, PROMPT, filled, values
from tplayout.admin.example_connector import is_example_directory, read_prompt
from tplayout.admin.pages import check_statement
from tplayout.errors import ConfigError, GeometryError, NotFound


@pytest.mark.parametrize("backend", ["gpu", "cpu"])
def test_what_is_stated_right_gives_the_values(backend):
    root = PEERS / f"example-{backend}"
    assert is_example_directory(root)
    source = read_prompt(root, GROUP, [*PROMPT, 1, 2], 8, backend)
    check_statement(source, PROMPT, "it")
    assert np.array_equal(filled(source, range(32)), values())
    assert np.array_equal(filled(source, range(12, 20)), values()[..., 12:20, :])


@pytest.mark.parametrize(("backend", "stated", "block"), [("gpu", "cpu", 8), ("cpu", "gpu", 8), ("cpu", "cpu", 16)])
def test_what_is_stated_wrong_does_not_fit_the_values(backend, stated, block):
    source = read_prompt(PEERS / f"example-{backend}", GROUP, PROMPT, block, stated)
    with pytest.raises(ConfigError, match="do not fit"):
        check_statement(source, PROMPT, "it")


def test_ranks_that_overwrote_each_other_are_detected():
    with pytest.raises(GeometryError, match="ranks overwrite each other"):
        read_prompt(PEERS / "example-tp2", GROUP, PROMPT, 8, "cpu")


def test_other_prompts_and_models_are_refused():
    root = PEERS / "example-gpu"
    with pytest.raises(NotFound):
        read_prompt(root, GROUP, [1] * 32, 8, "gpu")
    with pytest.raises(ConfigError, match="unknown"):
        read_prompt(root, GROUP, PROMPT, 8, "tpu")
    for other in ({"layers": (0, 1, 2)}, {"dtype": "BF16"}, {"heads": 2}):
        with pytest.raises(GeometryError, match=root.name):
            read_prompt(root, replace(GROUP, **other), PROMPT, 8, "gpu")


def test_a_missing_layer_is_named(tmp_path):
    shutil.copytree(PEERS / "example-gpu", tmp_path / "x")
    next((tmp_path / "x").rglob("*layers.1.*")).unlink()
    with pytest.raises(GeometryError, match=r"layers \[0\]"):
        read_prompt(tmp_path / "x", GROUP, PROMPT, 8, "gpu")
    assert not is_example_directory(tmp_path)
