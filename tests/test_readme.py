"""README's Python example does what README says that it does."""

import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

ROOT = Path(__file__).resolve().parent.parent
EXAMPLE = re.compile(r"<!-- test: api -->\n```python\n(?P<code>(?s:.*?))```\n\n(?P<output>(?:    .*\n)+)")


@pytest.fixture
def my_model(tmp_path: Path) -> Path:
    """A model directory with as little as describe_model needs: 4 KV heads, 2 layers, bfloat16."""
    model = tmp_path / "my-model"
    model.mkdir()
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "hidden_size": 128,
        "dtype": "bfloat16",
    }
    (model / "config.json").write_text(json.dumps(config))
    save_file({"weight": np.zeros((8, 8), "f2")}, model / "model.safetensors")
    return model


def test_the_api_example_prints_what_it_says(my_model: Path) -> None:
    found = EXAMPLE.search((ROOT / "README.md").read_text())
    assert found, "README.md has no python block behind <!-- test: api -->, or no output behind it"
    script = my_model.parent / "example.py"
    script.write_text(found["code"])
    run = subprocess.run(
        [sys.executable, script],
        cwd=my_model.parent,
        env={"PYTHONPATH": str(ROOT), "PATH": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == [line.strip() for line in found["output"].splitlines()]
