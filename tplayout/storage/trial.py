"""Whether a store can be written: a small object is put, read back and deleted.

Its name is one of those that FORMAT.md leaves to tools, so no reader takes it for a chunk.
"""

from __future__ import annotations

import contextlib
import secrets

from tplayout.errors import OverLimit, StorageError, Unavailable
from tplayout.storage.base import RESERVED, Store

DIRECTORY = f"{RESERVED}probe"
_BYTES = 4096


def try_writing(store: Store) -> StorageError | None:
    """Raises the StorageError that keeps objects from being written or read back. Each verb has the store's deadline.

    Returns what keeps them from being deleted, None if nothing does: a bucket may well allow no more than to write. A
    store that is full up to its own limit is fine, too: who writes chunks makes room.
    """
    key = f"{DIRECTORY}/{secrets.token_hex(16)}"
    written = secrets.token_bytes(_BYTES)
    try:
        store.put(key, written)
        if store.get(key, max_bytes=_BYTES) != written:
            raise Unavailable(f"get {key!r} on {store.url}: another content came back than was written")
    except OverLimit:
        return None
    except StorageError:
        with contextlib.suppress(StorageError):  # it may be there all the same
            store.delete([key])
        raise
    try:
        store.delete([key])
    except StorageError as error:
        return error
    return None
