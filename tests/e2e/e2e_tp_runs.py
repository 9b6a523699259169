"""One engine run of the tests across TP sizes: read what others stored, write for others."""

from dataclasses import dataclass
from pathlib import Path

from e2e_cases import ANSWER, CHUNK, STORY_TOKENS, engine_args, external_hits, offload, story
from e2e_store import objects, wait_until_stored
from vllm_engine import Output, engine

FULL = STORY_TOKENS // CHUNK * CHUNK


@dataclass(frozen=True)
class Read:
    """A prompt answered by a fresh engine: the answer, and the tokens of it that the connector supplied."""

    output: Output
    supplied: float


@dataclass(frozen=True)
class Run:
    """What one engine did. again: the last prompt written, once more, with the engine's own prefix cache emptied."""

    read: dict[str, Read]
    wrote: dict[str, Output]
    again: Output
    before: dict[str, bytes]
    after: dict[str, bytes]


def run(root: Path, log: Path, model: str, tp: int, block: int, role: str, read: str, write: str) -> Run:
    """One engine: answer the prompts `read`, then `write`, then the last of all with only the connector's help."""
    before = objects(root)
    args = engine_args(model, tp, block_size=block, **offload(f"file://{root}", role, chunk_tokens=CHUNK))
    reads, writes = {}, {}
    with engine(args, log) as running:
        for prompt in read:
            supplied = external_hits(running)
            output = running.generate(story(prompt), ANSWER)
            reads[prompt] = Read(output, external_hits(running) - supplied)
        for prompt in write:
            writes[prompt] = running.generate(story(prompt), ANSWER)
            if role != "kv_consumer":
                wait_until_stored(root, story(prompt), FULL)
        assert running.call("reset_prefix_cache", connector=True)
        again = running.generate(story((read + write)[-1]), ANSWER)
    return Run(reads, writes, again, before, objects(root))
