"""Real vLLM engines as sides of a comparison: how they start, what they are asked, and where their tokens came from.

All serve SmolLM2 padded to four KV heads, in bfloat16, on vLLM's and the connector's defaults. An engine that nobody
asks anything rests after a second, so that several can be there at once and be measured in turn.
"""

from __future__ import annotations

import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import demo_models
from vllm_engine import Engine, EngineFailed, Output

from bench.measure import Note, Result, Setting

TOOLS = Path(__file__).resolve().parents[1]
CHUNK = 256
PREFIX, PROMPT = 4096, 4113  # tokens that can come from a cache, and of the whole prompt
WARM_UP = 1041
REST_S = 1.5  # vLLM's ranks spin for a second behind each step
STORED_S = 60.0
RESULT_S = 600.0

Rows = Callable[[Setting, Path], Iterator[Result]]


class NotMeasured(Exception):
    """An engine did something else than the row is about: its tokens came from elsewhere, or were not stored."""


def engine_args(tp: int, **more: Any) -> dict[str, Any]:
    """vLLM's engine arguments. more: others."""
    return {
        "model": str(demo_models.ensure("smollm2", "bfloat16")),
        "tensor_parallel_size": tp,
        "dtype": "bfloat16",
        "enforce_eager": True,
        "max_model_len": 4352,
        **more,
    }


def connector(name: str, extra: dict[str, Any], module: str | None = None) -> dict[str, Any]:
    """The engine argument that names a connector. extra: its options. module: where its class is; None: vLLM knows."""
    config = {"kv_connector": name, "kv_role": "kv_both", "kv_connector_extra_config": extra}
    return {"kv_transfer_config": config if module is None else {**config, "kv_connector_module_path": module}}


def offload(store: Path, name: str = "TPLayoutConnector", module: str | None = None) -> dict[str, Any]:
    """The engine argument that saves to and loads from a directory. name, module: of a class derived from ours."""
    return connector(name, {"url": f"file://{store}", "staging_bytes": "2G"}, module)


@cache
def _text() -> list[int]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo_models.ensure("smollm2", "bfloat16") / "tokenizer.json"))
    return list(tokenizer.encode((TOOLS / "demo_text.txt").read_text()).ids)


def prompt(number: int, length: int = PROMPT) -> list[int]:
    """Real text, repeated, of so many tokens; prompts of two numbers differ from their first token on."""
    return [1000 + number, *itertools.islice(itertools.cycle(_text()), length - 1)]


@dataclass(frozen=True)
class Source:
    """Where a prompt came from: tokens of all caches, tokens that the connector supplied, chunks it read from the store
    and chunks it had in host memory."""

    cached: int = 0
    supplied: int = 0
    read: int = 0
    held: int = 0


COMPUTED = Source()
ENGINE = Source(cached=PREFIX)
STORE = Source(PREFIX, PREFIX, read=PREFIX // CHUNK)
HOST = Source(PREFIX, PREFIX, held=PREFIX // CHUNK)


def ask(running: Engine, tokens: list[int], source: Source, max_tokens: int = 1, salt: str | None = None) -> Output:
    """One answer. Raises NotMeasured if its prompt came from elsewhere. salt: keeps prompts of other salts apart."""
    before = _counters(running)
    output = running.submit(tokens, max_tokens, salt=salt, logprobs=None).result(RESULT_S)
    counted = [int(after - was) for after, was in zip(_counters(running), before, strict=True)]
    found = Source(output.cached, *counted)
    if found != source:
        raise NotMeasured(f"a prompt should have come from {source}, and came from {found}")
    return output


def _counters(running: Engine) -> list[float]:
    metrics = running.metrics()
    names = ("external_prefix_cache_hits", "tplayout_loads", "tplayout_host_hits")
    return [metrics.get(f"vllm:{name}_total", 0.0) for name in names]


def forget(running: Engine, *, host: bool) -> None:
    """Empty the engine's own prefix cache. host: and the connector's host memory, so that only the store is left."""
    if not running.call("reset_prefix_cache", connector=host):
        raise NotMeasured("the engine did not empty its prefix cache")


def warm_up(running: Engine, salt: str = "") -> None:
    """An engine's first request is slow for reasons of its own. salt: one that nobody used, so that it computes."""
    running.submit(prompt(0, WARM_UP), 2, salt=salt, logprobs=None).result(RESULT_S)


def wait_until_stored(store: Path, chunks: int) -> None:
    """Wait until the store holds so many chunks. Raises NotMeasured if it never does, or holds more."""
    end = time.monotonic() + STORED_S
    while (stored := len(list(store.rglob("*.safetensors")))) != chunks:
        if time.monotonic() > end or stored > chunks:
            raise NotMeasured(f"{stored} chunks are stored, of {chunks}")
        time.sleep(0.02)


def importable() -> dict[str, str]:
    """Environment in which an engine's processes can import modules of the benchmarks."""
    return {"PYTHONPATH": os.pathsep.join(filter(None, (str(TOOLS), os.environ.get("PYTHONPATH"))))}


def with_engines(theme: str, rows: Rows, *, quick: bool = False) -> Rows:
    """The rows, or a note where there are none: in a tiny run, without vLLM, and when an engine fails.

    quick: they are measured in a quick run too.
    """

    def measured(setting: Setting, directory: Path) -> Iterator[Result]:
        if not setting.reloads or not (quick or setting.everything):
            yield Note(f"{theme}: not in this run, since it needs engines and time; measured by `make bench`")
        elif find_spec("vllm") is None:
            yield Note(f"{theme}: not measured, since vLLM is not installed (make setup)")
        else:
            try:
                yield from rows(setting, directory)
            except (EngineFailed, NotMeasured) as error:
                print(f"{theme}: {error}", file=sys.stderr, flush=True)
                yield Note(f"{theme}: ended by {type(error).__name__}, which the run's output shows")

    return measured
