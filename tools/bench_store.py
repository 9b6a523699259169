"""Benchmark of everything but pages: sealing, local disk, S3, resharding, and what a miss costs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import s3fs
from bench_measure import CPU, Row, Setting, compare
from ml_dtypes import bfloat16
from s3_server import S3Server

from tplayout import Cache
from tplayout.cache.codec import Aes256Gcm
from tplayout.format.chunk import chunk_layout, seal, verify
from tplayout.format.digest import CellHasher, make_hasher
from tplayout.format.encrypted import EncryptionKey
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.identity import Identity
from tplayout.format.keys import ChunkId, chain, object_name
from tplayout.format.sharding import shard_of
from tplayout.staging.stager import Stager, StagingPlan
from tplayout.storage import Store, open_store

IN_FLIGHT = 8
PREFIX_CHUNKS = 16


class Objects:
    """Chunk objects in memory, of bfloat16 KV: their ids, names and bytes. `seal` completes them."""

    def __init__(self, setting: Setting, hasher: CellHasher | None = None) -> None:
        self.hasher = hasher or make_hasher()
        self.identity = Identity("files:bench", {}, "bfloat16", None, geometry(setting))
        self.layout = chunk_layout(self.identity.geometry, 0, self.hasher.name, self.hasher.key_id)
        key = EncryptionKey(os.urandom(32))
        self.codec = Aes256Gcm(self.hasher, key.id, key)
        self.namespace = self.identity.digest()
        tokens = range(setting.objects * setting.chunk_tokens)
        self.chunks = chain(self.namespace, tokens, setting.chunk_tokens)
        self.names = [self.name(chunk) for chunk in self.chunks]
        cells = os.urandom(self.layout.nbytes)
        self.buffers = [memoryview(bytearray(cells)) for _ in self.chunks]
        self.seal()

    def name(self, chunk: ChunkId) -> str:
        """Of a chunk's object."""
        return object_name(self.identity.namespace, chunk.key, 0)

    def seal(self) -> None:
        """Complete all objects."""
        for buffer, chunk in zip(self.buffers, self.chunks, strict=True):
            seal(buffer, self.layout, self.namespace, chunk, self.hasher)

    def encrypt(self) -> None:
        """What a store of encrypted objects does before it puts them."""
        for buffer, chunk in zip(self.buffers, self.chunks, strict=True):
            self.codec.pack(buffer, self.layout, chunk.key)

    def put(self, store: Store) -> None:
        """Store all objects, one after the other."""
        for name, buffer in zip(self.names, self.buffers, strict=True):
            store.put(name, buffer)

    def get(self, store: Store) -> None:
        """Fetch all objects into their buffers, one after the other."""
        for name, buffer in zip(self.names, self.buffers, strict=True):
            store.get_into(name, buffer)

    def verify(self) -> None:
        """Verify all objects; raises FormatError."""
        for buffer, chunk in zip(self.buffers, self.chunks, strict=True):
            verify(buffer, self.layout, self.namespace, chunk.key, self.hasher)

    def seal_and_put(self, store: Store) -> None:
        """What saving costs."""
        self.seal()
        self.put(store)

    def get_and_verify(self, store: Store) -> None:
        """What loading costs."""
        self.get(store)
        self.verify()


def geometry(setting: Setting) -> Geometry:
    """One group of bfloat16."""
    parts = (Part("k", setting.dim), Part("v", setting.dim))
    group = Group("full", "full", tuple(range(setting.layers)), setting.heads, parts, "BF16")
    return Geometry(setting.chunk_tokens, (group,))


def local_rows(setting: Setting, directory: Path) -> Iterator[Row]:
    """file:// against plain files in the same directory; nothing is flushed, and reads find the page cache warm."""
    objects = Objects(setting)
    plain = directory / "plain"
    plain.mkdir()
    with open_store(directory / "local") as store:
        yield compare(
            "seal + put, file://",
            "write + rename of the same bytes",
            lambda: objects.seal_and_put(store),
            lambda: write_files(plain, objects.buffers),
            setting,
        )
        yield compare(
            "get + verify, file://",
            "readinto of the same bytes",
            lambda: objects.get_and_verify(store),
            lambda: read_files(plain, objects.buffers),
            setting,
        )
        yield compare(
            "get + verify, file://",
            "get alone",
            lambda: objects.get_and_verify(store),
            lambda: objects.get(store),
            setting,
        )


def write_files(directory: Path, buffers: list[memoryview]) -> None:
    """Each buffer to a new file, which is then renamed to replace the one before."""
    for number, buffer in enumerate(buffers):
        temporary = directory / f"{number}.tmp"
        with temporary.open("xb", buffering=0) as file:
            done = 0
            while done < len(buffer):
                done += file.write(buffer[done:])
        temporary.rename(directory / str(number))


def read_files(directory: Path, buffers: list[memoryview]) -> None:
    """Each file into its buffer."""
    for number, buffer in enumerate(buffers):
        with (directory / str(number)).open("rb", buffering=0) as file:
            done = 0
            while done < len(buffer):
                done += file.readinto(buffer[done:]) or 0


def digest_rows(setting: Setting) -> Iterator[Row]:
    """What a secret costs, and encryption."""
    plain, keyed = Objects(setting), Objects(setting, make_hasher(secret=bytes(32)))
    yield compare("seal, XXH3-128 (no secret)", "seal, keyed BLAKE3 (secret)", plain.seal, keyed.seal, setting, CPU)
    yield compare("encrypt, AES-256-GCM", "seal, keyed BLAKE3 (secret)", plain.encrypt, keyed.seal, setting, CPU)


def s3_rows(setting: Setting) -> Iterator[Row]:
    """s3:// against s3fs with its defaults, on one rclone server, IN_FLIGHT requests at a time."""
    objects = Objects(setting)
    data = [bytes(buffer) for buffer in objects.buffers]
    numbers = range(len(data))
    with S3Server() as server, ThreadPoolExecutor(IN_FLIGHT) as pool:
        bare = s3fs.S3FileSystem(**server.storage_options, use_listings_cache=False, skip_instance_cache=True)
        path = f"{server.bucket}/bare"

        def each(call: Callable[[int], object]) -> Callable[[], object]:
            return lambda: list(pool.map(call, numbers))

        with open_store(server.url, server.storage_options) as store:
            yield compare(
                f"put, s3://, {IN_FLIGHT} in flight",
                "s3fs pipe_file",
                each(lambda i: store.put(objects.names[i], objects.buffers[i])),
                each(lambda i: bare.pipe_file(f"{path}/{i}", data[i])),
                setting,
            )
            yield compare(
                f"get, s3://, {IN_FLIGHT} in flight",
                "s3fs cat_file",
                each(lambda i: store.get_into(objects.names[i], objects.buffers[i])),
                each(lambda i: bare.cat_file(f"{path}/{i}")),
                setting,
            )


def reshard_rows(setting: Setting, directory: Path) -> Iterator[Row]:
    """What a rank of TP=2 reads of a chunk that TP=4 wrote."""
    identity = Identity("files:bench", {}, "bfloat16", None, geometry(setting))
    (group,) = identity.geometry.groups
    with open_store(directory / "reshard") as store:
        cache = Cache.open(store, identity)
        (chunk,) = cache.chunks(range(setting.chunk_tokens))
        shape = (group.heads, len(group.layers), *group.cell_shape(setting.chunk_tokens))
        kv = np.arange(np.prod(shape), dtype="u2").reshape(shape).view(bfloat16)
        cache.put(chunk, {shard: kv[shard.heads] for shard in (shard_of(group, 4, rank) for rank in range(4))})
        whole = next(info.size for info in store.list(f"{cache.namespace}/") if info.key.endswith(".safetensors"))
        read: list[int] = []
        get_range = store.get_range

        def counted(key: str, start: int, length: int, **options: float) -> bytes:
            read.append(length)
            return get_range(key, start, length, **options)

        store.get_range = counted  # type: ignore[method-assign, assignment]
        cache.get(chunk, shard_of(group, 2, 1))
    share = sum(read) / whole
    yield Row("TP=2 shard of a chunk of TP=4: bytes read", "bytes of the whole object", share, share, share)


def miss_rows(setting: Setting, directory: Path) -> Iterator[Row]:
    """What a request waits that finds nothing: a lookup through staging and an I/O process."""
    objects = Objects(setting)
    plan = StagingPlan(
        url=f"file://{directory / 'empty'}",
        namespace=objects.namespace,
        geometry=objects.identity.geometry,
        slots=2 * PREFIX_CHUNKS,
        writers=(1,),
        io_processes=1,
    )
    tokens = range(1, 1 + PREFIX_CHUNKS * setting.chunk_tokens)
    prefix = chain(objects.namespace, tokens, setting.chunk_tokens)
    names = [objects.name(prefix[0])]
    setting = replace(setting, runs=setting.short_runs)
    stager = Stager(plan)
    try:
        with open_store(plan.url) as store:
            for count in (1, PREFIX_CHUNKS):
                yield compare(
                    f"miss: lookup of {count} cold chunk{'s' * (count > 1)}, file://",
                    "exists of one object",
                    partial(miss, stager, prefix[:count]),
                    lambda: store.exists(names),
                    setting,
                    before=partial(settle, stager),
                )
    finally:
        stager.close()


def miss(stager: Stager, prefix: list[ChunkId]) -> None:
    """One lookup, from its start to its end without a chunk."""
    stager.start_lookup("bench", prefix)
    while not (state := stager.lookup("bench")).done:
        stager.wait(1.0)
    stager.release("bench")
    if state.reason != "miss":
        raise RuntimeError(f"a lookup of what is not stored ended with {state}")


def settle(stager: Stager) -> None:
    """Wait until nothing of earlier lookups is under way."""
    while stager.busy:
        stager.wait(0.01)
