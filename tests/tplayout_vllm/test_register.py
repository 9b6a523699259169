"""The plug-in hook: found by vLLM, harmless when called again, and cheap to import."""

import subprocess
import sys
from importlib.metadata import entry_points

from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

import tplayout_vllm


def test_vllm_finds_the_hook() -> None:
    (hook,) = entry_points(group="vllm.general_plugins", name="tplayout")
    assert hook.load() is tplayout_vllm.register


def test_registering_again_is_harmless() -> None:
    tplayout_vllm.register()
    tplayout_vllm.register()
    from tplayout_vllm.connector import TPLayoutConnector

    assert KVConnectorFactory._registry["TPLayoutConnector"]() is TPLayoutConnector


def test_the_hook_s_module_imports_nothing_heavy() -> None:
    code = "import sys, tplayout_vllm; print({'torch', 'vllm', 'fsspec', 'numpy'} & set(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "set()"
