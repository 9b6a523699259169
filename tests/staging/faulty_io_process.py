"""An I/O process whose store obeys a file of faults, to be run in place of the real one.

The file is named by TPLAYOUT_TEST_FAULTS and read anew before every operation, so that a test can break the store
and mend it: {verb: {"delay": seconds, "hang": true, "error": kind}}. TPLAYOUT_TEST_STUCK_S: patience with hangs.
"""

import json
import os
import time

from tplayout.errors import StorageError, StorageErrorKind
from tplayout.staging import io_process

VERBS = ("get", "get_into", "put", "exists")


class FaultyStore:
    """Passes each verb to a real store after what the file says for it."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, verb):
        real = getattr(self._store, verb)
        if verb not in VERBS:
            return real

        def act(*args, **options):
            with open(os.environ["TPLAYOUT_TEST_FAULTS"]) as file:
                fault = json.load(file).get(verb, {})
            time.sleep(fault.get("delay", 0))
            while fault.get("hang"):
                time.sleep(60)
            if "error" in fault:
                raise StorageError("made up", StorageErrorKind(fault["error"]))
            return real(*args, **options)

        return act


if __name__ == "__main__":
    io_process._STUCK_S = float(os.environ.get("TPLAYOUT_TEST_STUCK_S", io_process._STUCK_S))
    real_open_store = io_process.open_store
    io_process.open_store = lambda *args, **options: FaultyStore(real_open_store(*args, **options))
    io_process.main()
