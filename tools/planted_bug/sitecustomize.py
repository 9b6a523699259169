"""A bug on purpose: with this directory on PYTHONPATH, I/O processes take what they read for verified.

Python imports a module of this name at start. `make faults` uses it to show that its verdict would be red.
"""

import sys

if "tplayout.staging.io_process" in sys.orig_argv:
    from tplayout.format import chunk

    chunk.verify = lambda buf, layout, namespace, *_: chunk.read_chunk_id(memoryview(buf), layout, namespace)
