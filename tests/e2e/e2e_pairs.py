"""Servers of different shapes on one store: each reads what all before it wrote, then writes a prompt of its own.

Every read is proven: all full chunks came from the store, by vLLM's own counts, and the answer is the one of an engine
of the same TP size without the connector.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from e2e_cases import ANSWER, assert_same, engine_args, external_hits, noise, offload
from e2e_plain import PlainEngines
from e2e_store import namespace_of, objects, verified
from vllm_engine import engine

from tplayout.format.keys import chain, object_name, parse_object_name

CHUNK = 256
CHUNKS = 2
REST = 7  # tokens behind the last full chunk
TOLERANCE = 1e-3  # random weights make larger logits than real ones: seen is 2e-4

# vLLM's pipeline stages do not start eagerly on the CPU.
STAGES = {"enforce_eager": False, "compilation_config": {"mode": 2, "backend": "eager"}}


@dataclass(frozen=True)
class Server:
    """The shape of one server. layers: how many of each pipeline stage, where that is not even ("1,3")."""

    tp: int = 1
    block: int = 64
    pp: int = 1
    layers: str = ""

    def __str__(self) -> str:
        """Short, for logs' names and for failures."""
        return f"tp{self.tp}" + (f"-pp{self.pp}" if self.pp > 1 else "") + f"-blocks{self.block}"

    def args(self) -> dict[str, Any]:
        """What vLLM is told besides the TP size."""
        stages = {"pipeline_parallel_size": self.pp, **STAGES} if self.pp > 1 else {}
        return {"block_size": self.block, **stages}

    def env(self) -> dict[str, str]:
        return {"VLLM_PP_LAYER_PARTITION": self.layers} if self.layers else {}


@dataclass(frozen=True)
class Relay:
    """A model and how to serve it. chunk: tokens a chunk, chunks: of each prompt. more: vLLM's engine arguments.

    gone: the first chunks of a prompt whose window parts no server can save, as their blocks are given back before.
    """

    model: str
    chunk: int = CHUNK
    chunks: int = CHUNKS
    more: dict[str, Any] = field(default_factory=dict)
    gone: int = 0

    @property
    def full(self) -> int:
        """Tokens of a prompt that are stored."""
        return self.chunk * self.chunks

    def prompt(self, seed: int) -> list[int]:
        return noise(self.full + REST, seed)

    def objects_of(self, root: Path, tokens: list[int]) -> set[str]:
        """Names of all objects that a server stores of a prompt."""
        identity = namespace_of(root).identity
        chunks = chain(identity.digest(), tokens, self.chunk)
        return {
            object_name(identity.namespace, chunk.key, number)
            for number, group in enumerate(identity.geometry.groups)
            for chunk in chunks[self.gone if group.window else 0 :]
        }

    def wait_until_stored(self, root: Path, tokens: list[int], within: float = 30) -> None:
        """Wait until all objects of a prompt are there."""
        deadline = time.monotonic() + within
        while not list(root.glob("*/namespace.json")) or not all(
            (root / name).is_file() for name in self.objects_of(root, tokens)
        ):
            assert time.monotonic() < deadline, f"of {self.objects_of(root, tokens)} only {sorted(objects(root))}"
            time.sleep(0.05)

    def run(self, directory: Path, plain: PlainEngines, servers: Sequence[Server]) -> list["Leg"]:
        """Start the servers one after another on a new store; check every read, and every object at the end."""
        root = directory / "store"
        legs = [self.leg(root, directory, plain, number, server) for number, server in enumerate(servers)]
        assert len(verified(root)) == len(objects(root)) > 0
        return legs

    def leg(self, root: Path, logs: Path, plain: PlainEngines, number: int, server: Server) -> "Leg":
        """One server: read the prompts of all servers before it, then write prompt `number`."""
        earlier = [self.prompt(seed) for seed in range(number)]
        wanted = plain.answers(self.model, server.tp, earlier, **self.more) if earlier else []
        before = objects(root)
        options = offload(f"file://{root}", chunk_tokens=self.chunk)
        args = engine_args(self.model, server.tp, **self.more, **server.args(), **options)
        with engine(args, logs / f"{number}-{server}.log", env=server.env()) as running:
            for tokens, reference in zip(earlier, wanted, strict=True):
                supplied = external_hits(running)
                output = running.generate(tokens, ANSWER)
                assert output.cached == self.full, f"{server}: {output.cached} of {self.full} tokens were cached"
                assert external_hits(running) - supplied == self.full
                assert_same(output, reference, TOLERANCE)
            read = running.metrics()
            assert objects(root) == before, "what is stored was written again"
            own = running.generate(self.prompt(number), ANSWER)
            assert own.cached == 0
            self.wait_until_stored(root, self.prompt(number))
        after = objects(root)
        assert before.items() <= after.items()
        names = [group.name for group in namespace_of(root).identity.geometry.groups]
        wrote: dict[str, list[int]] = {name: [] for name in names}
        for name in after.keys() - before.keys():
            wrote[names[parse_object_name(name).group_index]].append(len(after[name]))
        return Leg(server, read, wrote)


@dataclass(frozen=True)
class Leg:
    """What one server did. read: its metrics after all reads, before it wrote. wrote: group -> sizes of its objects."""

    server: Server
    read: dict[str, float]
    wrote: dict[str, list[int]]

    def loaded(self, what: str) -> float:
        """A counter of the connector's loads: "bytes" from the store, "copy_bytes" into pages of all ranks."""
        return self.read[f"vllm:tplayout_load_{what}_total"]

    def sizes(self, group: str = "full") -> list[int]:
        """Sizes of a group's objects."""
        return self.wrote[group]
