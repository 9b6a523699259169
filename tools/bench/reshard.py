"""Resharding: what TP=4 writes and TP=2 reads, against torch.distributed.checkpoint, and what a shard reads.

Both sides run in the same rank processes (reshard_ranks.py), with the same tensors on the same disk.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from bench.measure import Row, Sense, Setting, row_of
from bench.objects import identity
from tplayout import Cache, shard_of, whole
from tplayout.storage import open_store

RANKS = 4
TARGET = 2.0
MOST_ROUNDS = 11
PATIENCE_S = 600
OTHER = "torch.distributed.checkpoint"


def reshard_rows(setting: Setting, directory: Path) -> Iterator[Row]:
    """Saving on 4 ranks, loading on 2, and the bytes that a rank of TP=2 reads."""
    times = _run_ranks(setting, directory / "reshard")
    for verb, label in (("save", "save on 4 ranks"), ("load", "load on 2 ranks, verified")):
        yield row_of(f"TP=4 to 2: {label}", OTHER, *times[verb], Sense.SPEED, TARGET)
    yield _bytes_read(setting, directory)


def _run_ranks(setting: Setting, directory: Path) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds of each round by verb: ours, theirs."""
    directory.mkdir()
    shape, rounds = setting.chunk, min(setting.runs, MOST_ROUNDS)
    task = {"shape": [shape.layers, shape.heads, shape.dim, shape.tokens], "chunks": setting.objects, "rounds": rounds}
    path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]))
    command = [sys.executable, "-m", "bench.reshard_ranks", str(directory), json.dumps(task)]
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen([*command, str(rank)], env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        for rank in range(RANKS)
    ]
    try:
        errors = [rank.communicate(timeout=PATIENCE_S)[1] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("resharding failed:\n" + "\n".join(error[-2000:] for error in errors))
    return json.loads((directory / "times.json").read_text())  # type: ignore[no-any-return]


def _bytes_read(setting: Setting, directory: Path) -> Row:
    """What a rank of TP=2 reads of a chunk that TP=4 wrote."""
    import numpy as np
    from ml_dtypes import bfloat16

    with open_store(directory / "shards") as store:
        cache = Cache.open(store, identity(setting.chunk))
        (group,) = cache.geometry.groups
        (chunk,) = cache.chunks(range(setting.chunk.tokens))
        shape = (group.heads, len(group.layers), *group.cell_shape(setting.chunk.tokens))
        cache.put(chunk, {whole(group): np.zeros(shape, bfloat16)})
        size = next(info.size for info in store.list(f"{cache.namespace}/") if info.key.endswith(".safetensors"))
        read: list[int] = []
        get_range = store.get_range

        def counted(key: str, start: int, length: int, **options: float) -> bytes:
            read.append(length)
            return get_range(key, start, length, **options)

        store.get_range = counted  # type: ignore[method-assign, assignment]
        cache.get(chunk, shard_of(group, 2, 1))
    name = "TP=2 shard of a chunk of TP=4: bytes read"
    return row_of(name, "the whole object", [sum(read)], [size], Sense.TIME, 0.51, unit="B")
