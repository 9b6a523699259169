"""`import tplayout`: everything that is promised, and nothing that costs."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import tplayout
import tplayout.errors

ROOT = Path(__file__).resolve().parent.parent
HEAVY = ("fsspec", "ml_dtypes", "numpy", "s3fs", "torch", "transformers", "vllm")


def fresh(code: str) -> str:
    """Output of code in an interpreter that has imported nothing of ours."""
    run = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    return run.stdout.strip()


@pytest.mark.parametrize("module", ["tplayout", "tplayout.cache", "tplayout.model"])
def test_importing_loads_nothing_heavy(module: str) -> None:
    assert fresh(f"import sys, {module}; print([m for m in {HEAVY} if m in sys.modules])") == "[]"


def test_importing_takes_no_time() -> None:
    code = "import time; t = time.perf_counter(); import tplayout; print(time.perf_counter() - t)"
    assert min(float(fresh(code)) for _ in range(3)) < 0.1  # measured: 0.002


def test_numpy_users_do_not_load_torch() -> None:
    code = """
import sys
from tplayout import Cache, Geometry, Group, Identity, Part, whole
group = Group("full", "full", (0,), 1, (Part("k", 2),), "BF16")
cache = Cache.open("memory://cheap", Identity("w", {}, "bfloat16", None, Geometry(2, (group,))))
import ml_dtypes, numpy
chunk = cache.chunks([1, 2])[0]
cache.put(chunk, {whole(group): numpy.ones((1, 1, 1, 2, 2), ml_dtypes.bfloat16)})
print(cache.get(chunk).sum(), "torch" in sys.modules)
"""
    assert fresh(code) == "4 False"


def test_every_name_leads_somewhere() -> None:
    assert sorted(tplayout.__all__) == tplayout.__all__
    for name in tplayout.__all__:
        assert getattr(tplayout, name) is not None
        assert name in dir(tplayout)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        tplayout.nothing  # noqa: B018


def test_type_checkers_see_the_same_names() -> None:
    source = ast.parse((ROOT / "tplayout" / "__init__.py").read_text())
    block = next(node for node in source.body if isinstance(node, ast.If))
    imported = {
        alias.name: node.module for node in block.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert sorted(imported) == tplayout.__all__
    for name, home in tplayout._HOME_OF.items():
        assert imported[name] == home
    assert all(imported[name] == "tplayout.errors" for name in imported.keys() - tplayout._HOME_OF.keys())
