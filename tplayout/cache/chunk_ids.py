"""What a stored object says it is, by a small read: its cells are neither read nor verified."""

from __future__ import annotations

from tplayout.errors import FormatError, NotFound, StorageError, StorageErrorKind
from tplayout.format.chunk import parse_ids
from tplayout.format.keys import ChunkId
from tplayout.format.layout import ChunkLayout
from tplayout.storage.base import Store


def read_id(store: Store, layout: ChunkLayout, digest: bytes, name: str, key: bytes) -> ChunkId | None:
    """The chunk that the object of this name holds; None if that is not the one of the key, or damaged, or gone.

    store: of plain objects. digest: of the identity. Raises StorageError.
    """
    try:
        data = store.get_range(name, layout.ids_range.start, len(layout.ids_range))
    except (NotFound, FormatError):
        return None
    except StorageError as error:
        if error.kind is StorageErrorKind.SHORT_READ:
            return None
        raise
    chunk = parse_ids(data, layout, digest)
    return chunk if chunk.key == key else None
