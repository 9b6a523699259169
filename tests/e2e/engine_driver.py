"""A vLLM engine behind a line protocol: JSON commands on stdin, JSON replies on stdout. Started by `e2e_engine.py`.

One command a line, `{"id": n, "op": name, ...}`; each is answered by `{"id": n, "result": ...}` or
`{"id": n, "error": text}`, in the order in which they end. Anything that vLLM prints goes to stderr: the protocol
has a file descriptor of its own. It runs the same `AsyncLLM` as vLLM's API server, in a process of its own, so that
a test can kill it, read its log, and start the next one.
"""

import asyncio
import json
import os
import sys
import time
from typing import Any

OUT = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)


def reply(**message: Any) -> None:
    """Write one line of the protocol."""
    OUT.write(json.dumps(message) + "\n")
    OUT.flush()


def step_counter() -> Any:
    """A vLLM stat logger that counts engine steps: the engine reports its statistics once a step, empty ones too."""
    from vllm.v1.metrics.loggers import StatLoggerBase

    class StepCounter(StatLoggerBase):
        steps = 0

        def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
            pass

        def record(self, scheduler_stats: Any, *args: Any, **kwargs: Any) -> None:
            if scheduler_stats is not None:
                StepCounter.steps += 1

        def log_engine_initialized(self) -> None:
            pass

    return StepCounter


class Driver:
    """The commands. Each method named `op_x` is the command `x`; its keyword arguments are the command's fields."""

    def __init__(self, engine_args: dict[str, Any]) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        self.counter = step_counter()
        self.engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args), stat_loggers=[self.counter])
        self.running: dict[str, asyncio.Task[Any]] = {}

    async def op_generate(self, request: str, tokens: list[int], params: dict[str, Any], extra: dict[str, Any]) -> Any:
        """Run one request to its end. `request` names it for `abort`; `extra` goes into the prompt (cache_salt …)."""
        from vllm import SamplingParams

        sampling = SamplingParams(**{"temperature": 0.0, "logprobs": 5, **params})
        prompt = {"prompt_token_ids": tokens, **extra}
        start, first = time.monotonic(), None
        self.running[request] = asyncio.current_task()  # type: ignore[assignment]
        try:
            async for output in self.engine.generate(prompt, sampling, request):  # type: ignore[arg-type]
                if first is None and output.outputs and output.outputs[0].token_ids:
                    first = time.monotonic() - start
                last = output
        finally:
            self.running.pop(request, None)
        choice = last.outputs[0]
        return {
            "prompt": len(tokens),
            "cached": last.num_cached_tokens or 0,
            "text": choice.text,
            "tokens": list(choice.token_ids),
            "finish": choice.finish_reason,
            "logprobs": [{str(t): p.logprob for t, p in step.items()} for step in choice.logprobs or []],
            "first_token_s": first,
            "total_s": time.monotonic() - start,
        }

    async def op_abort(self, request: str) -> bool:
        """Cancel a running request as a client that hangs up does. False: it had ended already."""
        task = self.running.get(request)
        return task is not None and task.cancel()

    async def op_metrics(self) -> str:
        """The text that `/metrics` of the API server would show."""
        from prometheus_client import generate_latest

        return generate_latest().decode()

    async def op_steps(self) -> int:
        """Engine steps so far."""
        return int(self.counter.steps)

    async def op_reset_prefix_cache(self, connector: bool = False) -> bool:
        """Forget the engine's own prefix cache (and the connector's, if it has one and `connector` is set)."""
        return bool(await self.engine.reset_prefix_cache(reset_connector=connector))

    async def op_shutdown(self) -> None:
        """Shut the engine down in order."""
        self.engine.shutdown()

    async def handle(self, command: dict[str, Any]) -> None:
        """Run one command and answer it."""
        number, op = command.pop("id"), command.pop("op")
        try:
            reply(id=number, result=await getattr(self, f"op_{op}")(**command))
        except asyncio.CancelledError:
            reply(id=number, error="aborted")
        except Exception as error:
            reply(id=number, error=f"{type(error).__name__}: {error}")

    async def serve(self) -> None:
        """Read commands until `shutdown` or the end of stdin."""
        reply(event="ready")
        loop = asyncio.get_running_loop()
        tasks = set()
        while line := await loop.run_in_executor(None, sys.stdin.readline):
            command = json.loads(line)
            stop = command["op"] == "shutdown"
            task = asyncio.create_task(self.handle(command))
            tasks.add(task)
            task.add_done_callback(tasks.discard)
            if stop:
                await task
                return
        self.engine.shutdown()


async def main() -> None:
    """Start the engine that the first argument describes and serve it."""
    await Driver(json.loads(sys.argv[1])).serve()


if __name__ == "__main__":
    asyncio.run(main())
    os._exit(0)
