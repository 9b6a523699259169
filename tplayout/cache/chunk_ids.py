"""What a stored object says it is, by a small read: its cells are neither read nor verified."""

from __future__ import annotations

import struct

from tplayout.errors import FormatError, NotFound, StorageError, StorageErrorKind
from tplayout.format.keys import ROOT, ChunkId, key_of_packed
from tplayout.format.layout import ChunkLayout
from tplayout.storage.base import Store


def read_id(store: Store, layout: ChunkLayout, digest: bytes, name: str, key: bytes) -> ChunkId | None:
    """The chunk that the object of this name holds; None if that is not the one of the key, or damaged, or gone.

    store: of plain objects. digest: of the identity. Raises StorageError.
    """
    span = range(layout.tokens_range.start, layout.extras_range.stop)
    try:
        data = store.get_range(name, span.start, len(span))
    except (NotFound, FormatError):
        return None
    except StorageError as error:
        if error.kind is StorageErrorKind.SHORT_READ:
            return None
        raise
    packed, parent, extras = data[:-64], data[-64:-32], data[-32:]
    if key_of_packed(digest, parent, packed, extras) != key:
        return None
    tokens = struct.unpack(f"<{layout.chunk_tokens}i", packed)
    return ChunkId(key, parent, tokens, extras, 0 if parent == ROOT else -1)
