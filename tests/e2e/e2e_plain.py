"""Reference answers: what vLLM says without the connector. The tests' side of `plain_driver.py`."""

import json
import os
import select
import signal
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import vllm_server
from e2e_cases import ANSWER, engine_args
from e2e_engine import EngineFailed, Output

DRIVER = Path(__file__).with_name("plain_driver.py")
PATIENCE = 240  # seconds for one engine's start and its answers


class PlainEngines:
    """Engines without the connector, all in one process that is started by the first question.

    Answers are kept: the same question to the same model at the same TP size starts no engine again.
    """

    def __init__(self, log: Path) -> None:
        self._log = log
        self._run = uuid.uuid4().hex
        self._process: subprocess.Popen[bytes] | None = None
        self._kept: dict[str, Output] = {}

    def answer(self, model: str, tp: int, tokens: list[int], max_tokens: int = ANSWER, **args: Any) -> Output:
        """A prompt's answer, computed from the first token on."""
        return self.answers(model, tp, [tokens], max_tokens, **args)[0]

    def answers(
        self, model: str, tp: int, prompts: list[list[int]], max_tokens: int = ANSWER, **args: Any
    ) -> list[Output]:
        """The same for several prompts, of one engine. `args` are more engine arguments."""
        full = engine_args(model, tp, **args)
        keys = [json.dumps([full, max_tokens, tokens], sort_keys=True) for tokens in prompts]
        todo = [tokens for key, tokens in zip(keys, prompts, strict=True) if key not in self._kept]
        if todo:
            # As Engine.submit: exactly so many tokens.
            params: dict[str, Any] = {"max_tokens": max_tokens, "min_tokens": max_tokens}
            if full["skip_tokenizer_init"]:
                params.update(detokenize=False, min_tokens=0, ignore_eos=True)
            found = self._ask({"args": full, "prompts": [{"prompt_token_ids": t} for t in todo], "params": params})
            missing = [key for key in keys if key not in self._kept]
            self._kept.update(zip(missing, (Output(**fields) for fields in found), strict=True))
        answers = [self._kept[key] for key in keys]
        assert all(output.cached == 0 for output in answers)
        return answers

    def _ask(self, job: dict[str, Any]) -> list[dict[str, Any]]:
        if self._process is None:
            self._start()
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(job).encode() + b"\n")
        self._process.stdin.flush()
        # The driver writes a line whole and nothing else, so what is readable is a line.
        ready, _, _ = select.select([self._process.stdout], [], [], PATIENCE)
        line = self._process.stdout.readline() if ready else b""
        reply = json.loads(line) if line else {"error": "no answer"}
        if "error" in reply:
            self.close()
            raise EngineFailed(f"{job['args']}: {reply['error']}\n" + "\n".join(self._text().splitlines()[-40:]))
        return list(reply["result"])

    def _start(self) -> None:
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, str(DRIVER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={
                    **os.environ,
                    **vllm_server.cpu_environment(),
                    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
                    vllm_server.RUN_MARK: self._run,
                },
                start_new_session=True,
            )

    def _text(self) -> str:
        return self._log.read_text(errors="replace")

    def close(self) -> None:
        """End the process and its ranks; the next question starts another."""
        if self._process is None:
            return
        pids = vllm_server.processes_of(self._run, self._process.pid)
        left_behind = vllm_server.shared_memory_of(pids)
        for pid in pids:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        self._process.wait()
        self._process = None
        vllm_server.remove_shared_memory(left_behind)
