"""A store on disk, the simulated engines on it, and what must be in it."""

import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from sim_config import Setup
from sim_engine import SimEngine
from sim_model import VOCABULARY, SimModel, Text

from tplayout.format.chunk import verify
from tplayout.format.digest import make_hasher
from tplayout.format.keys import EXTRA_SALT, chain, object_name, parse_object_name
from tplayout.format.layout import ChunkLayout, chunk_layout


class Sim:
    """A store on disk, the engines on it and all texts that they were asked about."""

    def __init__(self, root: Path, model_directory: Path) -> None:
        self.store, self.model_directory = root / "store", model_directory
        self.url = f"file://{self.store}"
        self.engines: list[SimEngine] = []
        self.texts: list[Text] = []
        self._expected: dict[bytes, np.ndarray] = {}

    def engine(self, **setup: Any) -> SimEngine:
        engine = SimEngine(self.url, self.model_directory, Setup(**setup))
        self.engines.append(engine)
        return engine

    def text(self, seed: int, like: Text | None = None, shared: int = 0, salt: str | None = None) -> Text:
        """A text of its own, or one that shares the first `shared` tokens of another."""
        random = np.random.default_rng(seed)
        start = like.upto(shared) if like is not None else []
        text = Text([*start, *random.integers(0, VOCABULARY, 1 + max(0, 16 - shared)).tolist()], salt)
        self.texts.append(text)
        return text

    def objects(self) -> Iterator[tuple[bytes, int, Path]]:
        """(chunk key, group, file) of all that is stored."""
        for path in sorted(self.store.rglob("*.safetensors")):
            name = parse_object_name(str(path.relative_to(self.store)))
            yield name.key, name.group_index, path

    def check_store(self) -> int:
        """Every object is valid, belongs to a text, and holds that text's KV. Returns how many there are."""
        self._expected = self._histories()
        return sum(self._check(key, group, path) for key, group, path in self.objects())

    def check_file(self, path: Path) -> None:
        """The same for one object."""
        self._expected = self._histories()
        name = parse_object_name(str(path.relative_to(self.store)))
        self._check(name.key, name.group_index, path)

    def _check(self, key: bytes, group: int, path: Path) -> bool:
        assert key in self._expected, f"{path.name} is of a text that nobody asked about"
        side, model = self.engines[-1].side, self.engines[-1].model
        layout = chunk_layout(side._staging.geometry, group, side._staging.digest)
        check_object(model, layout, side._namespace, key, path, self._expected[key])
        return True

    def _histories(self) -> dict[bytes, np.ndarray]:
        """What every chunk of every text is a function of, by its key."""
        side, size = self.engines[-1].side, self.engines[-1].setup.chunk
        return {
            chunk.key: text.history(index * size, (index + 1) * size)
            for text in self.texts
            for index, chunk in enumerate(self._chunks(side, text, len(text.tokens)))
        }

    def path(self, text: Text, chunk: int, group: int = 0) -> Path:
        """Where a chunk of a text is, or would be."""
        side = self.engines[-1].side
        key = self._chunks(side, text, (chunk + 1) * self.engines[-1].setup.chunk)[chunk].key
        return self.store / object_name(side._namespace.hex()[:32], key, group)

    def stored(self, text: Text, tokens: int, groups: Sequence[int] = (0,)) -> list[bool]:
        """For each full chunk of a text's first tokens, whether all these groups of it are stored."""
        count = tokens // self.engines[-1].setup.chunk
        return [all(self.path(text, chunk, group).is_file() for group in groups) for chunk in range(count)]

    @staticmethod
    def _chunks(side: Any, text: Text, tokens: int) -> list[Any]:
        extras = [(EXTRA_SALT, text.salt.encode())] if text.salt else []
        return chain(side._namespace, text.upto(tokens), side._chunk, lambda _: extras)

    @staticmethod
    def wait(condition: Callable[[], bool], seconds: float = 20.0) -> None:
        """Until the I/O processes have made it true."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"not within {seconds} s"
            time.sleep(0.005)

    def close(self) -> None:
        for engine in self.engines:
            engine.close()


def check_object(
    model: SimModel, layout: ChunkLayout, namespace: bytes, key: bytes, path: Path, history: np.ndarray
) -> None:
    """A stored object is valid, and each cell is the KV of its tokens."""
    data = path.read_bytes()
    verify(data, layout, namespace, key, make_hasher(layout.digest_name))
    for head in range(model.heads):
        for position, layer in enumerate(layout.group.layers):
            span = layout.cell_range(head, position)
            cell = np.frombuffer(data[span.start : span.stop], dtype=np.int32).reshape(2, -1, model.dim)
            wanted = model.kv(layer, range(head, head + 1), history)[:, 0].permute(1, 0, 2).numpy()
            bad = np.flatnonzero((cell != wanted).any(axis=(0, 2))).tolist()
            assert not bad, f"{path.name}: head {head}, layer {layer} holds other KV for tokens {bad[:8]}... of it"
