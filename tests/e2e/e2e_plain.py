"""Reference answers: what vLLM says without the connector."""

import json
from typing import Any

from e2e_cases import ANSWER, engine_args
from e2e_one_process import OneProcess
from vllm_engine import Output


class PlainEngines:
    """Engines without the connector, one after another in one process.

    Answers are kept: the same question to the same model at the same TP size starts no engine again.
    """

    def __init__(self, engines: OneProcess) -> None:
        self._engines = engines
        self._kept: dict[str, Output] = {}

    def answers(self, model: str, tp: int, prompts: list[list[int]], **args: Any) -> list[Output]:
        """The prompts' answers, each computed from the first token on. `args` are more engine arguments."""
        full = engine_args(model, tp, **args)
        keys = [json.dumps([full, tokens], sort_keys=True) for tokens in prompts]
        for key, tokens in zip(keys, prompts, strict=True):
            if key not in self._kept:
                self._kept[key] = self._engines.use(full).generate(tokens, ANSWER)
                assert self._kept[key].cached == 0
        return [self._kept[key] for key in keys]
