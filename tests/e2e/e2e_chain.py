"""A chain of engines on one store: each reads the prompt that the engine before it wrote, and writes one of its own."""

from dataclasses import dataclass, field
from pathlib import Path

from e2e_cases import assert_same, noise
from e2e_one_process import OneProcess, forget, supplied
from e2e_store import verified, wait_until_stored
from vllm_engine import Engine, Output

LENGTH = 1100


@dataclass
class References:
    """The answers of an engine without the connector, to prompts by number."""

    one_process: OneProcess
    known: dict[int, Output] = field(default_factory=dict)

    def learn(self, numbers: range) -> None:
        """Ask for these answers now, so that one engine gives them all."""
        plain = self.one_process.plain()
        self.known.update({n: plain.generate(noise(LENGTH, n)) for n in numbers if n not in self.known})


@dataclass
class Chain:
    """The store of one chunk size; `links` engines have had their turn."""

    root: Path
    chunk: int
    references: References
    links: int = 0

    @property
    def full(self) -> int:
        """Tokens of a prompt's full chunks."""
        return LENGTH // self.chunk * self.chunk

    def turn(self, running: Engine) -> None:
        """Let an engine that has just started read what the one before it wrote, then write, then read that."""
        if self.links:
            self._read(running)
        self.links += 1
        prompt, wanted = noise(LENGTH, self.links), self.references.known[self.links]
        first, count = supplied(running, prompt)
        assert count == 0
        assert_same(first, wanted)
        wait_until_stored(self.root, prompt, self.full)
        forget(running)
        self._read(running)

    def _read(self, running: Engine) -> None:
        answer, count = supplied(running, noise(LENGTH, self.links))
        assert count == self.full
        assert_same(answer, self.references.known[self.links])

    def check(self) -> None:
        """Every chunk of the store verifies, and there is none besides."""
        assert len(verified(self.root)) == self.links * (LENGTH // self.chunk)
