"""The demo: a real vLLM server at TP=4 fills a store, one at TP=2 answers the same prompt from it.

    tools/demo.py                        the store is a temporary directory
    tools/demo.py --url s3://bucket/kv   a store of yours; the demo writes below demo-… in it and leaves that there
    tools/demo.py --s3                   a bucket of a real S3 server that the demo starts itself

Exit status 0 only if TP=2 took every full chunk of the prompt from the store and said the same text as TP=4.
"""

import argparse
import contextlib
import os
import secrets
import shutil
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import demo_models
from s3_server import S3Server
from vllm_server import Answer, ServerError, VLLMServer, interrupt_on_sigterm, transfer_config

ROOT = Path(__file__).resolve().parent.parent
LOGS = ROOT / ".demo"
TEXT = Path(__file__).with_name("demo_text.txt")
CHUNK_TOKENS = 256
ANSWER_TOKENS = 32
# Two cores that are busy with other things may need longer than the default, or than the other server took to compute.
PATIENT = {"load_deadline_ms": 30_000, "never_slower": False}
HEARTBEAT_S = 10.0
PUBLISH_S = 60.0
QUESTION = "In one sentence: who is the keeper of the lighthouse, and what happened in this story?"
OTHER_QUESTION = "In one sentence: who was in the green boat, and how did he find the way to the tower?"


class DemoFailed(Exception):
    """The demo cannot go on; the text says why and what to do."""


@dataclass(frozen=True)
class Row:
    """One request: which server, what it was asked, its answer, and how many tokens the store supplied."""

    server: str
    prompt: str
    answer: Answer
    from_store: int


@dataclass(frozen=True)
class Prompts:
    """story and other share their first half."""

    warm_up: str
    story: str
    other: str


class Progress:
    """Says on stdout what is being done and that it is still being done; one line each, so that pipes show it."""

    def __init__(self) -> None:
        self.begin = time.monotonic()

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begin:5.0f} s] {text}", flush=True)

    @contextlib.contextmanager
    def doing(self, text: str) -> Iterator[None]:
        """Say `text` now, and every few seconds that it is not finished yet."""
        self.say(text)
        done = threading.Event()
        begin = time.monotonic()

        def beat() -> None:
            while not done.wait(HEARTBEAT_S):
                self.say(f"  … {time.monotonic() - begin:.0f} s")

        thread = threading.Thread(target=beat, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()


def read_prompts(path: Path = TEXT) -> Prompts:
    """The prompts, from the text's three parts: a beginning and two ways to go on."""
    beginning, end, other_end = (part.strip() for part in path.read_text().split("\n---\n"))
    return Prompts(
        warm_up="Tell me about the sea and its winds. " * 30,
        story=f"{beginning}\n\n{end}\n\n{QUESTION}",
        other=f"{beginning}\n\n{other_end}\n\n{OTHER_QUESTION}",
    )


def full_chunks(prompt_tokens: int) -> int:
    """Tokens of a prompt that a complete store supplies: its full chunks, but never the very last token."""
    return min(prompt_tokens // CHUNK_TOKENS * CHUNK_TOKENS, prompt_tokens - 1)


def verdict(first: Row, again: Row, other: Row, other_cold: Row) -> tuple[str, list[str]]:
    """The last line, and what is wrong with the run (nothing: it passed)."""
    reloaded, prompt_tokens = again.answer.cached_tokens, again.answer.prompt_tokens
    identical = again.answer.text == first.answer.text
    wrong = []
    if not identical:
        wrong.append("TP=2 answered the reloaded prompt with another text than TP=4")
    if reloaded < full_chunks(prompt_tokens):
        wrong.append(f"{reloaded} tokens were reloaded, but the prompt has {full_chunks(prompt_tokens)} in full chunks")
    if again.from_store < full_chunks(prompt_tokens):
        wrong.append(f"only {again.from_store} of the reloaded tokens came from the store")
    for row in (first, other_cold):
        if row.answer.cached_tokens:
            wrong.append(f"{row.server}, {row.prompt}: not cold, {row.answer.cached_tokens} tokens were cached")
    if other.answer.text != other_cold.answer.text:
        wrong.append("TP=2 answered the second prompt with another text than it does without the store")
    if other.from_store < CHUNK_TOKENS:
        wrong.append("the second prompt took nothing from the store, although it shares half of its text")
    line = (
        f"demo: TP=4 -> TP=2 reloaded {reloaded} of {prompt_tokens} prompt tokens; "
        f"text identical: {'yes' if identical else 'no'}"
    )
    return line, wrong


def table(rows: Sequence[Row]) -> str:
    """The rows as aligned text."""
    cells = [("server", "prompt", "tokens", "from store", "first token", "text")]
    for row in rows:
        answer = row.answer
        text = textwrap.shorten(answer.text, 44, placeholder=" …")
        counts = (str(answer.prompt_tokens), str(row.from_store), f"{answer.first_token_s:.2f} s")
        cells.append((row.server, row.prompt, *counts, text))
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    right = {2, 3, 4}
    lines = [
        "  ".join(c.rjust(w) if i in right else c.ljust(w) for i, (c, w) in enumerate(zip(line, widths, strict=True)))
        for line in cells
    ]
    rule = "  ".join("-" * width for width in widths)
    return "\n".join(line.rstrip() for line in (lines[0], rule, *lines[1:]))


class Demo:
    """One run. `url`: the store; `env`: what its client reads from the environment."""

    def __init__(self, url: str, env: dict[str, str], progress: Progress) -> None:
        self.url, self.env, self.progress = url, env, progress
        self.prompts = read_prompts()

    def run(self) -> tuple[str, list[str]]:
        """Everything; returns the last line and what is wrong."""
        with self.progress.doing("building the model (SmolLM2-135M, padded to 4 KV heads, float32)"):
            # float32: with bfloat16 two TP sizes may choose different words by themselves, without any cache.
            model = demo_models.ensure("smollm2", "float32")
        with self.server(model, tp=4, block_size=64) as server:
            first = self.ask(server, "story", self.prompts.story)
        with self.server(model, tp=2, block_size=32) as server:
            again = self.ask(server, "same story", self.prompts.story)
            cold = self.ask(server, "same story, cache refused", self.prompts.story, salt="story")
            server.reset_prefix_cache()  # else the shared half would come from the server's own memory
            other = self.ask(server, "half of it is new", self.prompts.other)
            other_cold = self.ask(server, "half of it is new, cache refused", self.prompts.other, salt="other")
        print("\n" + table([first, again, cold, other, other_cold]))
        print(f"\nanswer at TP=4:            {first.answer.text.strip()!r}")
        print(f"answer at TP=2, reloaded:  {again.answer.text.strip()!r}\n")
        return verdict(first, again, other, other_cold)

    @contextlib.contextmanager
    def server(self, model: Path, tp: int, block_size: int) -> Iterator[VLLMServer]:
        """A warmed-up server on the store, stopped by SIGTERM at the end."""
        log = LOGS / f"tp{tp}.log"
        log.unlink(missing_ok=True)
        args = ["--dtype", "float32", "--max-model-len", "4096", "--enforce-eager", "--block-size", str(block_size)]
        args += [
            "--kv-transfer-config",
            transfer_config(self.url, chunk_tokens=CHUNK_TOKENS, **PATIENT),
        ]
        server = VLLMServer(model, tp, log, args, self.env, name="smollm2", dev_mode=True)
        try:
            with self.progress.doing(f"starting vLLM at TP={tp}, blocks of {block_size} tokens (log: {relative(log)})"):
                server.start()
            with self.progress.doing(f"TP={tp} is up after {server.start_s:.0f} s; warm-up request"):
                server.chat(self.prompts.warm_up, 4)
            yield server
            seconds = server.stop()
            self.progress.say(f"stopped TP={tp} with SIGTERM ({seconds:.1f} s)")
        finally:
            server.stop()
            with self.progress.doing(f"waiting until what TP={tp} saved is published"):
                ended = server.settle(PUBLISH_S)
        if not ended:
            raise DemoFailed(f"the I/O processes of TP={tp} had not published after {PUBLISH_S:g} s\n{server.tail()}")

    def ask(self, server: VLLMServer, title: str, prompt: str, salt: str | None = None) -> Row:
        """One request, and how many tokens of it the connector supplied by vLLM's own count."""
        with self.progress.doing(f"TP={server.tp}: {title}"):
            before = external_hits(server)
            answer = server.chat(prompt, ANSWER_TOKENS, salt)
            from_store = external_hits(server) - before
        self.progress.say(
            f"  {answer.prompt_tokens} prompt tokens, {answer.cached_tokens} cached, {from_store} of them from the "
            f"store; first token after {answer.first_token_s:.2f} s"
        )
        return Row(f"TP={server.tp}", title, answer, from_store)


def external_hits(server: VLLMServer) -> int:
    """Prompt tokens that the server's connector has supplied so far, as vLLM counts them."""
    return int(server.metrics().get("vllm:external_prefix_cache_hits_total", 0.0))


def relative(path: Path) -> str:
    """A path as seen from the working directory where that is shorter."""
    return min(str(path), os.path.relpath(path), key=len)


@contextlib.contextmanager
def store(url: str | None, s3: bool, progress: Progress) -> Iterator[tuple[str, dict[str, str]]]:
    """The store's URL and the environment its client needs: the one asked for, or a temporary one."""
    if url:
        # Below the URL, and new: an earlier run's chunks would make the first answer warm.
        below = f"{url.rstrip('/')}/demo-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
        progress.say(f"store: {below} (it stays there)")
        yield below, {}
    elif s3:
        with progress.doing("starting an S3 server (rclone) on loopback"):
            server = S3Server().start()
        try:
            progress.say(f"store: {server.url} at {server.endpoint_url}")
            # In the environment and not in the server's options: command lines are public on a machine.
            yield (
                server.url,
                {
                    "AWS_ENDPOINT_URL": server.endpoint_url,
                    "AWS_ACCESS_KEY_ID": server.key,
                    "AWS_SECRET_ACCESS_KEY": server.secret,
                    "AWS_DEFAULT_REGION": "us-east-1",
                },
            )
        finally:
            server.stop()
    else:
        directory = tempfile.mkdtemp(prefix="tplayout-demo-")
        progress.say(f"store: file://{directory} (removed at the end)")
        try:
            yield f"file://{directory}", {}
        finally:
            shutil.rmtree(directory, ignore_errors=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", help="store to use: file:///directory, s3://bucket/prefix, … (default: temporary)")
    parser.add_argument("--s3", action="store_true", help="start an S3 server and use it, unless --url names a store")
    options = parser.parse_args(arguments)
    interrupt_on_sigterm()
    progress = Progress()
    try:
        with store(options.url, options.s3, progress) as (url, env):
            line, wrong = Demo(url, env, progress).run()
    except (DemoFailed, ServerError, RuntimeError, OSError) as error:
        print(f"demo: failed: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("demo: interrupted; the servers are stopped", file=sys.stderr)
        return 130
    for what in wrong:
        print(f"demo: failed: {what} (logs: {relative(LOGS)})", file=sys.stderr)
    print(line, flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
