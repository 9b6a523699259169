"""Engines one after another in one process, each started when it is needed: 3 s an engine instead of 20 to 40.

They are vLLM's engine, scheduler and worker without the processes that usually lie between these; at TP 2 and more the
ranks have processes of their own.
"""

import time
from pathlib import Path
from typing import Any

from e2e_cases import ANSWER, engine_args, external_hits, offload
from e2e_store import objects
from vllm_engine import ONE_PROCESS, Engine, EngineFailed, Output


class OneProcess:
    """Holds the process and the engine that runs in it now. `plain` and `offloading` change it where they must."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._engine: Engine | None = None

    def use(self, args: dict[str, Any]) -> Engine:
        """An engine of these arguments: the one that runs, if it is of these."""
        running = self._engine
        return running if running is not None and running.args == args else self.fresh(args)

    def fresh(self, args: dict[str, Any]) -> Engine:
        """A new engine of these arguments in any case."""
        if self._engine is not None and self._engine.args.get("speculative_config", {}).get("method") == "ngram":
            self.close()  # it has loaded numba, which vLLM's next start in the same process stumbles over
        if self._engine is None:
            self._engine = Engine(args, self._log, ONE_PROCESS).start()
            return self._engine
        try:
            return self._engine.restart(args)
        except EngineFailed:
            self.close()  # the next engine gets a process of its own
            raise

    def plain(self, model: str = "llama", **args: Any) -> Engine:
        """An engine of a demo model, without the connector."""
        return self.use(engine_args(model, 1, **args))

    def offloading(
        self, root: Path, model: str = "llama", options: dict[str, Any] | None = None, **args: Any
    ) -> Engine:
        """A new engine of a demo model on the store in `root`. options: of the connector."""
        return self.fresh(engine_args(model, 1, **args, **offload(f"file://{root}", **(options or {}))))

    def close(self) -> None:
        if self._engine is not None:
            self._engine.kill()
            self._engine = None


def forget(running: Engine) -> None:
    """Leave only the store: neither vLLM's own prefix cache nor the connector's host memory knows anything."""
    deadline = time.monotonic() + 10
    while not running.call("reset_prefix_cache", connector=True):  # refused while blocks are still held
        assert time.monotonic() < deadline
        time.sleep(0.05)


def supplied(running: Engine, tokens: list[int], max_tokens: int = ANSWER, **kind: Any) -> tuple[Output, int]:
    """An answer, and how many of its prompt's tokens the connector supplied. They are vLLM's cached tokens."""
    before = external_hits(running)
    output = running.generate(tokens, max_tokens, **kind)
    count = external_hits(running) - before
    assert output.cached == count, "vLLM's own prefix cache helped, or supplied tokens were computed again"
    return output, int(count)


def wait_until_objects(root: Path, count: int, within: float = 20) -> None:
    """Wait until the store holds exactly `count` objects: for prompts that are keyed by more than their tokens."""
    deadline = time.monotonic() + within
    while len(objects(root)) < count:
        assert time.monotonic() < deadline, f"{len(objects(root))} of {count} objects stored in {within} s"
        time.sleep(0.05)
    assert len(objects(root)) == count
