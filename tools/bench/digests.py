"""What digests cost: their share of a warm load and of a save on local disk, and what a secret and a key cost."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch

from bench.measure import CPU, Row, Sense, Setting, compare
from bench.objects import Objects
from bench.pages import Case, cells_of, copying, paged
from tplayout.cache.codec import Aes256Gcm
from tplayout.format.digest import make_hasher
from tplayout.format.encryption_key import EncryptionKey
from tplayout.storage import open_store

SHARE = 0.15
PAGES = Case("vec", 128, (0, 1))


def digest_rows(setting: Setting, directory: Path) -> Iterator[Row]:
    """Chunks one after the other on one thread: fetch, verify, copy into pages; and the way back."""
    for label, secret, target in (("without a secret", None, SHARE), ("with a secret", bytes(32), None)):
        yield from _shares(label, secret, target, setting, directory / f"digests {label}".replace(" ", "-"))
    yield from _kinds(setting)


def _shares(label: str, secret: bytes | None, target: float | None, setting: Setting, path: Path) -> Iterator[Row]:
    objects = Objects(setting.chunk, setting.copied, make_hasher(secret=secret))
    cells = [cells_of(torch.frombuffer(buffer, dtype=torch.uint8), setting.chunk) for buffer in objects.buffers]
    run = paged(PAGES, setting.chunk, setting.copied)
    gather, scatter = (copying(verb, run, cells, setting.chunk.tokens) for verb in ("save", "load"))
    torch.set_num_threads(1)
    with open_store(path) as store:

        def load(verified: bool) -> None:
            objects.each(lambda index: objects.get(store, index))
            if verified:
                objects.each(objects.verify)
            scatter()

        def save(sealed: bool) -> None:
            gather()
            if sealed:
                objects.each(objects.seal)
            objects.each(lambda index: objects.put(store, index))

        save(True)
        name, without = f"share of digests in a warm local load, {label}", {"the same without": lambda: load(False)}
        yield compare(name, lambda: load(True), without, setting, sense=Sense.SHARE, target=target)
        name, without = f"share of digests in a local save, {label}", {"the same without": lambda: save(False)}
        yield compare(name, lambda: save(True), without, setting, sense=Sense.SHARE)


def _kinds(setting: Setting) -> Iterator[Row]:
    plain = Objects(setting.chunk, setting.copied)
    keyed = Objects(setting.chunk, setting.copied, make_hasher(secret=bytes(32)))
    key = EncryptionKey(os.urandom(32))
    codec = Aes256Gcm(plain.hasher, key.id, key)

    def encrypt() -> None:
        for buffer, chunk in zip(plain.buffers, plain.chunks, strict=True):
            codec.pack(buffer, plain.layout, chunk.key)

    others = {"seal, keyed BLAKE3 (secret)": lambda: keyed.each(keyed.seal)}
    name = "seal, XXH3-128 (no secret)"
    yield compare(name, lambda: plain.each(plain.seal), others, setting, clock=CPU, limits=setting.copies)
    yield compare("encrypt, AES-256-GCM", encrypt, others, setting, clock=CPU, limits=setting.copies)
