"""Faults at the level of the cache: a store that breaks in every way, under the Python API, thousands of times."""

from __future__ import annotations

import hashlib
import random
import tempfile
from collections.abc import Sequence

import numpy as np
from fault_store import FaultStore
from faults_log import Answer, Entry, RequestLog

from tplayout import Cache
from tplayout.errors import TPLayoutError
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.identity import Identity
from tplayout.format.keys import ChunkId, chain
from tplayout.format.sharding import shard_of
from tplayout.storage import open_store

STAGE = "cache"
CHUNK_TOKENS = 4
_GROUP = Group("full", "full", (0, 1), 4, (Part("k", 4), Part("v", 4)), "F32")
_IDENTITY = Identity("files:faults", {}, "float32", None, Geometry(CHUNK_TOKENS, (_GROUP,)))
_PROMPTS = 40
_CHUNKS = 6
_DEADLINE_S = 0.02  # what a store that hangs costs each call


def content(chunk: ChunkId) -> np.ndarray:
    """The KV of a chunk [head, layer, part, token, dim], a function of its key."""
    shape = (_GROUP.heads, len(_GROUP.layers), *_GROUP.cell_shape(CHUNK_TOKENS))
    seed = int.from_bytes(chunk.key[:8], "little")
    return np.random.default_rng(seed).standard_normal(shape, dtype=np.float32)


def digest(kv: np.ndarray) -> list[int]:
    """An array as an answer that can be compared."""
    return list(hashlib.blake2b(kv.tobytes(), digest_size=16).digest())


def cold_answers() -> dict[str, Answer]:
    """What a cache must say of each chunk."""
    chunks = [chunk for tokens in _prompts() for chunk in _chunks(tokens)]
    return {chunk.key.hex(): Answer(digest(content(chunk))) for chunk in chunks}


def run(log: RequestLog, least: int, seed: int) -> int:
    """Put and get chunks until at least `least` faults have happened; their number.

    A request is one chunk that is read; a miss is computed, as an engine would. Afterwards the store is read without
    faults.
    """
    chance = random.Random(seed)
    with tempfile.TemporaryDirectory(prefix="tplayout-faults-") as directory, open_store(directory) as store:
        Cache.open(store, _IDENTITY, model="faults").close()
        faulty = FaultStore(store, seed=seed, rate=0.4, delay_s=_DEADLINE_S / 4)
        faulty.timeout_s = _DEADLINE_S
        cache = _opened(faulty)
        prompts = _prompts()
        while sum(faulty.injected.values()) < least:
            chunks = _chunks(chance.choice(prompts))
            _fill(cache, chunks, chance)
            for chunk in chunks:
                _ask(log, cache, chunk, chance)
        sound = Cache.open(store, _IDENTITY)
        for chunk in (chunk for tokens in prompts for chunk in _chunks(tokens)):
            _ask(log, sound, chunk, chance)
        return sum(faulty.injected.values())


def _opened(store: FaultStore) -> Cache:
    """The cache, however often the store fails meanwhile."""
    while True:
        try:
            return Cache.open(store, _IDENTITY)
        except TPLayoutError:
            continue


def _fill(cache: Cache, chunks: Sequence[ChunkId], chance: random.Random) -> None:
    """Store chunks as ranks of some tensor-parallel size would. What fails is not there."""
    for chunk in chunks:
        tp, kv = chance.choice((1, 2, 4)), content(chunk)
        shards = [shard_of(_GROUP, tp, rank) for rank in range(tp)]
        try:
            cache.put(chunk, {shard: kv[shard.heads] for shard in shards})
        except TPLayoutError:
            continue


def _ask(log: RequestLog, cache: Cache, chunk: ChunkId, chance: random.Random) -> None:
    """Read one chunk, in the shards of some tensor-parallel size. Anything but a typed error is a failure."""
    tp, name = chance.choice((1, 2, 4)), chunk.key.hex()
    cached = 0
    try:
        parts = [cache.get(chunk, shard_of(_GROUP, tp, rank)) for rank in range(tp)]
        answer, cached = Answer(digest(np.concatenate(parts))), CHUNK_TOKENS
    except TPLayoutError:
        answer = Answer(digest(content(chunk)))  # a miss is computed
    except Exception as error:
        log.add(Entry(STAGE, f"tp{tp}", name, None, f"{type(error).__name__}: {error}"))
        return
    log.add(Entry(STAGE, f"tp{tp}", name, answer, cached=cached))


def _prompts() -> list[list[int]]:
    return [[100 * prompt + token for token in range(_CHUNKS * CHUNK_TOKENS)] for prompt in range(_PROMPTS)]


def _chunks(tokens: Sequence[int]) -> list[ChunkId]:
    return chain(_IDENTITY.digest(), tokens, CHUNK_TOKENS)
