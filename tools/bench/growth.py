"""What a store's size costs: lookup and publish, which should not notice it, and tools, which read all of it.

The chunks are tiny, so that it is their number which is measured; each prompt has PROMPT of them.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import count
from pathlib import Path

from bench.lookups import TINY_CHUNK, put_tiny
from bench.measure import Note, Result, Row, Sense, Setting, Work, compare
from bench.objects import identity
from tplayout import Cache
from tplayout.admin.catalog import scan
from tplayout.admin.prune import Limits, plan
from tplayout.admin.verify import verify_store
from tplayout.format.keys import object_name
from tplayout.storage import Store, open_store

PROMPT = 16
FLAT = 1.3
MILLION = 1_000_000
FRESH = 1 << 30  # token ids of what is published while it is measured


def growth_rows(setting: Setting, directory: Path) -> Iterator[Result]:
    """Every larger store against the smallest. ls, gc and verify by chunk: as long as that stays, they are linear."""
    first, *larger = setting.growth
    with open_store(directory / f"growth-{first}") as small:
        base = _filled(small, first)
        for size in larger:
            with open_store(directory / f"growth-{size}") as store:
                yield from _rows(_filled(store, size), base, (float(size), float(first)), setting)
            shutil.rmtree(directory / f"growth-{size}")
    if setting.growth[-1] < MILLION:
        yield Note(f"growth was measured up to {setting.growth[-1]:,} chunks, not {MILLION:,}")


def _filled(store: Store, chunks: int) -> Cache:
    """A store that holds that many chunks."""
    cache = Cache.open(store, identity(TINY_CHUNK))
    with ThreadPoolExecutor(2) as pool:
        for first in range(0, chunks, PROMPT):
            prompt = cache.chunks(_prompt(first, PROMPT))[: chunks - first]
            list(pool.map(lambda chunk: put_tiny(cache, chunk), prompt))
    return cache


def _prompt(first: int, chunks: int) -> range:
    """Tokens that no other prompt begins with."""
    return range(first * TINY_CHUNK.tokens, (first + chunks) * TINY_CHUNK.tokens)


def _rows(large: Cache, small: Cache, sizes: tuple[float, float], setting: Setting) -> Iterator[Row]:
    label = f"store of {sizes[0]:,.0f} chunks"
    against = f"store of {sizes[1]:,.0f} chunks"
    flat = partial(compare, setting=setting, sense=Sense.TIME, target=FLAT, limits=setting.short)
    yield flat(f"lookup of {PROMPT} chunks, {label}", _lookup(large), {against: _lookup(small)})
    stores = (Publishing(large), Publishing(small))

    def forget() -> None:
        for publishing in stores:
            publishing.forget()

    yield flat(f"publish, {label}", stores[0].publish, {against: stores[1].publish}, before=forget)
    forget()
    for what, work in (("ls", _ls), ("gc (plan)", _gc), ("verify", _verify)):
        yield compare(
            f"{what} by chunk, {label}",
            work(large),
            {against: work(small)},
            setting,
            sense=Sense.TIME,
            target=FLAT,
            scales=sizes,
        )


def _lookup(cache: Cache) -> Work:
    prompt = _prompt(0, PROMPT)
    return lambda: cache.longest_prefix(prompt)


class Publishing:
    """Stores chunks that are not there, and removes them again, so that the store keeps its size."""

    def __init__(self, cache: Cache) -> None:
        """Nothing is published yet."""
        self._cache = cache
        self._first = count(FRESH, TINY_CHUNK.tokens)
        self._names: list[str] = []

    def publish(self) -> None:
        """One chunk."""
        first = next(self._first)
        (chunk,) = self._cache.chunks(range(first, first + TINY_CHUNK.tokens))
        put_tiny(self._cache, chunk)
        self._names.append(object_name(self._cache.namespace, chunk.key, 0))

    def forget(self) -> None:
        """Remove what was published."""
        self._cache.store.delete(self._names)
        self._names.clear()


def _ls(cache: Cache) -> Work:
    return lambda: scan(cache.store)


def _gc(cache: Cache) -> Work:
    return lambda: plan(cache.store, Limits(max_bytes=0))


def _verify(cache: Cache) -> Work:
    return lambda: verify_store(cache.store)
