"""vLLM engines without the connector, one after another in one process: reference answers at the price of one import.

Started by `e2e_plain.py`. One job a line on stdin, `{"args": {...}, "prompts": [...], "params": {...}}`; each is
answered by one line on stdout, `{"result": [...]}` or `{"error": text}`. What vLLM prints goes to stderr.
"""

import gc
import json
import os
import sys
import time
from typing import Any

OUT = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)


def answers(args: dict[str, Any], prompts: list[dict[str, Any]], params: dict[str, Any]) -> list[dict[str, Any]]:
    """Start an engine, ask it one prompt after another, and end it."""
    from vllm import LLM, SamplingParams
    from vllm.distributed import cleanup_dist_env_and_memory

    engine = LLM(disable_log_stats=True, **args)
    try:
        sampling = SamplingParams(**{"temperature": 0.0, "logprobs": 5, **params})
        return [answer(engine, prompt, sampling) for prompt in prompts]
    finally:
        engine.llm_engine.engine_core.shutdown()
        del engine
        gc.collect()
        cleanup_dist_env_and_memory()


def answer(engine: Any, prompt: dict[str, Any], sampling: Any) -> dict[str, Any]:
    """One prompt's answer, with the fields of `e2e_engine.Output`. Alone, since a batch rounds otherwise."""
    start = time.monotonic()
    (output,) = engine.generate([prompt], sampling, use_tqdm=False)
    (choice,) = output.outputs
    seconds = time.monotonic() - start
    return {
        "prompt": len(output.prompt_token_ids),
        "cached": output.num_cached_tokens or 0,
        "text": choice.text,
        "tokens": list(choice.token_ids),
        "finish": choice.finish_reason,
        "logprobs": [{str(t): p.logprob for t, p in step.items()} for step in choice.logprobs or []],
        "first_token_s": seconds,
        "total_s": seconds,
    }


def main() -> None:
    """Answer jobs until the end of stdin."""
    for line in sys.stdin:
        try:
            reply = {"result": answers(**json.loads(line))}
        except Exception as error:
            reply = {"error": f"{type(error).__name__}: {error}"}
        OUT.write(json.dumps(reply) + "\n")


if __name__ == "__main__":
    main()
    os._exit(0)
