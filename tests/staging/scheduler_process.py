"""A scheduler to be killed: hosts a Stager, begins saves, fills some completely and some in part, then sleeps.

Run as `python scheduler_process.py STORE COMPLETE PARTIAL MODE`; prints one JSON line when everything is marked. MODE:
"plain", or "fork" to leave a forked child that inherits all descriptors, and prints its pid too.
"""

import json
import os
import sys
import time

from conftest import NAMESPACE, ONE_GROUP, TOKENS, writer_process

from tplayout.format.keys import chain
from tplayout.staging.stager import Stager, StagingPlan


def main():
    """Set up, report, sleep."""
    store, complete, partial, mode = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    plan = StagingPlan(
        url=f"file://{store}", namespace=NAMESPACE, geometry=ONE_GROUP, slots=2 * (complete + partial), writers=(2,),
        io_processes=2, drain_s=3.0, storage_options={}, secret=None,
    )  # fmt: skip
    stager = Stager(plan)
    while len(stager._pool.io.pids) < 2:
        stager.wait(0.01)
    chunks = chain(NAMESPACE, range((complete + partial) * TOKENS), TOKENS)
    for number, chunk in enumerate(chunks):
        ref = stager.begin_save(chunk)
        order = {"slot": ref.slot, "key": chunk.key.hex()}
        writer_process.fill(stager.region, plan.layouts[0], order, 0, range(4))
        for writer in range(2 if number < complete else 1):
            stager.region.mark(ref.slot, 0, writer, ref.generation)
    child = os.fork() if mode == "fork" else 0
    if child or mode != "fork":
        inode = os.fstat(stager.region.fileno()).st_ino
        report = {"pids": stager._pool.io.pids, "ref": stager.region_ref.to_json(), "inode": inode}
        print(json.dumps({**report, "child": child}), flush=True)
    time.sleep(600)


if __name__ == "__main__":
    main()
