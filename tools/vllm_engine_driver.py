"""A vLLM engine behind a line protocol: JSON commands on stdin, JSON replies on stdout. Started by `vllm_engine.py`.

One command a line, `{"id": n, "op": name, ...}`; each is answered by `{"id": n, "result": ...}` or
`{"id": n, "error": text}`, in the order in which they end. Anything that vLLM prints goes to stderr: the protocol
has a file descriptor of its own. It runs the same `AsyncLLM` as vLLM's API server, in a process of its own, so that
a test can kill it, read its log, and start the next one. With VLLM_ENABLE_V1_MULTIPROCESSING=0 it runs vLLM's
engine, scheduler and worker without any further process, as `LLM` does then; requests run one after another.
"""

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator
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


class OneProcess:
    """vLLM's engine within this process, with those methods of `AsyncLLM` that the commands use."""

    def __init__(self, engine_args: dict[str, Any], counter: Any) -> None:
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self._engine = LLMEngine.from_engine_args(EngineArgs(**engine_args), stat_loggers=[counter])

    async def generate(self, prompt: Any, sampling: Any, request: str, **more: Any) -> AsyncIterator[Any]:
        """Nothing else runs until the request has ended: there is no `await` in between."""
        self._engine.add_request(request, prompt, sampling, **more)
        while self._engine.has_unfinished_requests():
            for output in self._engine.step():
                yield output

    async def reset_prefix_cache(self, reset_connector: bool) -> bool:
        return bool(self._engine.reset_prefix_cache(reset_connector=reset_connector))

    def shutdown(self) -> None:
        from vllm.distributed import cleanup_dist_env_and_memory

        self._engine.engine_core.shutdown()
        del self._engine
        cleanup_dist_env_and_memory()


def start_engine(engine_args: dict[str, Any], counter: Any) -> Any:
    """The engine that vLLM's environment variable asks for."""
    from vllm import envs
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    if not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return OneProcess(engine_args, counter)
    return AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_args), stat_loggers=[counter])


def prompt_of(tokens: list[int], embeds: str | None, audio: str | None) -> dict[str, Any]:
    """A prompt for vLLM. embeds, audio: safetensors files, with a tensor [tokens, hidden size], or 16,000 samples/s."""
    from safetensors.torch import load_file

    if embeds:
        return {"prompt_embeds": load_file(embeds)["embeds"]}
    heard = {"multi_modal_data": {"audio": (load_file(audio)["audio"].numpy(), 16_000)}} if audio else {}
    return {"prompt_token_ids": tokens, **heard}


class Driver:
    """The commands. Each method named `op_x` is the command `x`; its keyword arguments are the command's fields."""

    def __init__(self, engine_args: dict[str, Any]) -> None:
        self.counter = step_counter()
        self.engine = start_engine(engine_args, self.counter)
        self.running: dict[str, asyncio.Task[Any]] = {}

    async def op_restart(self, engine_args: dict[str, Any]) -> None:
        """Another engine in the place of this one, in this process, which has imported all that it needs."""
        self.engine.shutdown()
        self.engine = start_engine(engine_args, self.counter)

    async def op_generate(
        self,
        request: str,
        tokens: list[int],
        params: dict[str, Any],
        extra: dict[str, Any],
        lora: list[Any] | None = None,
        embeds: str | None = None,
        audio: str | None = None,
        rank: int | None = None,
    ) -> Any:
        """Run one request to its end.

        `request` names it for `abort`; `extra` goes into the prompt (cache_salt …). lora: name, id and path of an
        adapter. embeds, audio: as in `prompt_of`. rank: the data-parallel engine.
        """
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        sampling = SamplingParams(**{"temperature": 0.0, "logprobs": 5, **params})
        prompt = {**prompt_of(tokens, embeds, audio), **extra}
        more = {"lora_request": LoRARequest(*lora)} if lora else {}
        if rank is not None:
            more["data_parallel_rank"] = rank
        start, first = time.monotonic(), None
        self.running[request] = asyncio.current_task()  # type: ignore[assignment]
        try:
            async for output in self.engine.generate(prompt, sampling, request, **more):
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

    async def op_sleep(self, level: int) -> None:
        """Put the engine to sleep: level 1 keeps the weights, 2 discards them."""
        await self.engine.sleep(level)

    async def op_wake_up(self) -> None:
        await self.engine.wake_up()

    async def op_reload_weights(self, path: str) -> None:
        """Replace the weights in place by those of another model directory, as trainers do."""
        await self.engine.collective_rpc("reload_weights", kwargs={"weights_path": path})

    async def op_replace_lora(self, name: str, number: int, path: str) -> bool:
        """Load an adapter in the place of the one of that number, as vLLM's load_lora_adapter does in place."""
        from vllm.lora.request import LoRARequest

        return bool(await self.engine.add_lora(LoRARequest(name, number, path, load_inplace=True)))

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
