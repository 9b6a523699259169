"""What a request waits for a lookup, in round trips: the time in which the store says whether one object is there.

A prefix of tiny chunks is found whole, to its half, or not at all, by the Python API (`longest_prefix`) and by the
staging pool through an I/O process, where a lookup also fetches and verifies what it finds. On S3 every answer comes
20 ms later than the server gives it.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from s3_server import S3Server

from bench.delay_line import DelayLine
from bench.measure import Row, Sense, Setting, Shape, compare
from bench.objects import identity
from tplayout import Cache, ChunkId
from tplayout.format.keys import object_name
from tplayout.staging.stager import Stager, StagingPlan
from tplayout.storage import open_store

LATENCY_S = 0.02
ROUND_TRIPS = 3
TINY_CHUNK = Shape(1, 1, 8, 16)


def lookup_rows(setting: Setting, directory: Path) -> Iterator[Row]:
    """Local disk, then S3 behind the latency."""
    yield from _rows("local disk", f"file://{directory / 'lookups'}", {}, setting)
    with S3Server() as server:
        with open_store(server.url, server.storage_options) as store:
            _fill(Cache.open(store, identity(TINY_CHUNK)), setting)
        with DelayLine(server.port, LATENCY_S) as line:
            options = {**server.storage_options, "endpoint_url": f"http://127.0.0.1:{line.port}"}
            yield from _rows(f"S3 with {LATENCY_S * 1000:g} ms latency", server.url, options, setting)


def _prompts(setting: Setting) -> dict[str, range]:
    """Of as many chunks each, by what of them is stored."""
    tokens = setting.prefix * TINY_CHUNK.tokens
    return {"hit": range(tokens), "half": range(tokens, 2 * tokens), "miss": range(2 * tokens, 3 * tokens)}


def _fill(cache: Cache, setting: Setting) -> None:
    """Store what is to be found."""
    prompts = _prompts(setting)
    for chunk in (*cache.chunks(prompts["hit"]), *cache.chunks(prompts["half"])[: setting.prefix // 2]):
        put_tiny(cache, chunk)


def put_tiny(cache: Cache, chunk: ChunkId) -> None:
    """Store zeros as a chunk of the shape TINY_CHUNK."""
    import numpy as np
    from ml_dtypes import bfloat16

    from tplayout import whole

    (group,) = cache.geometry.groups
    shape = (group.heads, len(group.layers), *group.cell_shape(TINY_CHUNK.tokens))
    cache.put(chunk, {whole(group): np.zeros(shape, bfloat16)})


def _rows(where: str, url: str, options: dict[str, Any], setting: Setting) -> Iterator[Row]:
    with open_store(url, options) as store:
        cache = Cache.open(store, identity(TINY_CHUNK))
        prompts = _prompts(setting)
        if url.startswith("file:"):
            _fill(cache, setting)
        name = object_name(cache.namespace, cache.chunks(prompts["hit"])[0].key, 0)
        one = {"exists of one object": lambda: store.exists([name])}
        found = {"hit": setting.prefix, "half": setting.prefix // 2, "miss": 0}
        label = f"{setting.prefix} chunks, {where}"
        for what, prompt in prompts.items():
            yield compare(
                f"longest_prefix, {what}, {label}",
                partial(_ask_cache, cache, prompt, found[what]),
                one,
                setting,
                sense=Sense.TIME,
                target=ROUND_TRIPS,
                limits=setting.short,
            )
        stager = Stager(_plan(url, options, cache, setting))
        try:
            for what, prompt in prompts.items():
                yield compare(
                    f"staging lookup, {what}, {label}",
                    partial(_ask_stager, stager, cache.chunks(prompt), found[what]),
                    one,
                    setting,
                    sense=Sense.TIME,
                    target=ROUND_TRIPS,
                    before=partial(_forget, stager),
                    limits=setting.short,
                )
        finally:
            stager.close()


def _plan(url: str, options: dict[str, Any], cache: Cache, setting: Setting) -> StagingPlan:
    return StagingPlan(
        url=url,
        storage_options=options,
        namespace=cache.identity.digest(),
        geometry=cache.geometry,
        slots=2 * setting.prefix,
        writers=(1,),
        io_processes=1,
        load_deadline_s=30.0,
    )


def _ask_cache(cache: Cache, prompt: range, found: int) -> None:
    count = len(cache.longest_prefix(prompt).chunks)
    if count != found:
        raise RuntimeError(f"longest_prefix found {count} chunks of {found}")


def _ask_stager(stager: Stager, chunks: list[ChunkId], found: int) -> None:
    """One lookup, from its start to its end."""
    stager.start_lookup("bench", chunks)
    while not (state := stager.lookup("bench")).done:
        stager.wait(1.0)
    stager.release("bench")
    if state.ready != found:
        raise RuntimeError(f"a lookup of {found} stored chunks ended with {state}")


def _forget(stager: Stager) -> None:
    """Wait until nothing of earlier lookups is under way; then nothing is in host memory."""
    while stager.busy:
        stager.wait(0.01)
    stager.reset()
