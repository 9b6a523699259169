"""`gc` while two servers save and load: nothing fails, what is claimed is whole, and the limit is met."""

import random
import threading

from tplayout.admin.prune import Limits, carry_out, plan
from tplayout.format.geometry import Geometry, Group, Part
from tplayout.format.identity import Identity, NamespaceDocument, StorageFacts
from tplayout.format.keys import chain
from tplayout.storage.url import open_store

KV = (Part("k", 8), Part("v", 8))
GEOMETRY = Geometry(16, (Group("full", "full", (0, 1, 2), 4, KV, "F32"),))
IDENTITY = Identity("files:01", {}, "float32", None, GEOMETRY)
DOCUMENT = NamespaceDocument(IDENTITY, StorageFacts("xxh3-128"), "m").to_bytes()
ROUNDS = 60


def prompt(draw):
    """One of a few system prompts, and one of a few questions: prefixes that fork."""
    head, tail = draw.randrange(3), draw.randrange(4)
    return chain(IDENTITY.digest(), [head] * 32 + [100 + tail] * 32, 16)


def serve(world, stager, draw, number):
    """One request: what is staged is claimed and checked, the rest is computed and saved."""
    chunks = prompt(draw)
    stager.start_lookup("r", chunks)
    ready = world.finish(stager, "r").ready
    for ref, chunk in zip(stager.claim("r", 0, ready) if ready else (), chunks, strict=False):
        assert world.cells(stager, ref) == world.expected(chunk)
    stager.release("r")
    for chunk in chunks[ready:]:
        ref = stager.begin_save(chunk)
        if ref is not None:
            world.fill(stager, ref, chunk.key)
    world.settle(stager)
    if number % 5 == 0:
        stager.reset()  # ask the store again, not memory
    return ready


def test_pruning_while_two_servers_go_on(world):
    stagers = [world.stager(namespace=IDENTITY.digest(), document=DOCUMENT) for _ in range(2)]
    limit = 6 * stagers[0].plan.layouts[0].nbytes + len(DOCUMENT)
    stop, pruned = threading.Event(), []

    def prune():
        with open_store(world.store) as store:
            while not stop.wait(0.02):
                decided = plan(store, Limits(max_bytes=limit, grace=0))
                carry_out(store, decided)
                pruned.append(decided.chunks)

    pruner = threading.Thread(target=prune)
    pruner.start()
    try:
        draw = random.Random(1)
        hits = [serve(world, stager, draw, number) for number in range(ROUNDS) for stager in stagers]
    finally:
        stop.set()
        pruner.join()
    assert sum(hits) > 0
    assert sum(pruned) > 0
    for stager in stagers:
        sums = stager.snapshot()
        assert not sums["save_errors"]
        assert not sums.get("load_errors")
    with open_store(world.store) as store:
        carry_out(store, plan(store, Limits(max_bytes=limit, grace=0)))
        assert sum(info.size for info in store.list()) <= limit
