"""A server that saves without pause into a store under a limit, for as long as its standard input is open.

Run as `python server_process.py STORE MAX_BYTES SEED`. Prefixes of 1 to 6 chunks fork from a few shared ones; some are
looked up again. Prints the pids of its I/O processes, and at its end what it counted.
"""

import json
import random
import select
import sys

from conftest import NAMESPACE, ONE_GROUP, TOKENS, writer_process

from tplayout.format.keys import chain
from tplayout.staging.stager import Stager, StagingPlan


def prompt(draw):
    """A prefix that begins with one of a few heads."""
    head, tail = draw.randrange(3), draw.randrange(8)
    return chain(NAMESPACE, [head] * 2 * TOKENS + [10 + tail] * TOKENS * draw.randrange(4), TOKENS)


def save(stager, chunk):
    """Fill and mark a slot as all ranks, if there is one."""
    ref = stager.begin_save(chunk)
    if ref is not None:
        order = {"slot": ref.slot, "key": chunk.key.hex()}
        writer_process.fill(stager.region, stager.plan.layouts[0], order, 0, range(4))
        stager.region.mark(ref.slot, 0, 0, ref.generation)


def main():
    """Serve until nobody holds the other end of standard input."""
    store, limit, seed = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    plan = StagingPlan(
        url=f"file://{store}", namespace=NAMESPACE, geometry=ONE_GROUP, slots=16, writers=(1,), io_processes=1,
        max_bytes=limit,
    )  # fmt: skip
    stager, draw, hits = Stager(plan), random.Random(seed), 0
    while not stager._pool.io.pids:
        stager.wait(0.01)
    print(json.dumps(stager._pool.io.pids), flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        chunks = prompt(draw)
        stager.reset()  # what others have stored, and evicted
        stager.start_lookup("r", chunks)
        while not (state := stager.lookup("r")).done:
            stager.wait(0.005)
        hits += state.ready
        stager.release("r")
        for chunk in chunks[state.ready :]:
            save(stager, chunk)
        while stager.busy:
            stager.wait(0.005)
    print(json.dumps({**stager.counters(), "hits": hits}), flush=True)


if __name__ == "__main__":
    main()
