"""A store that looks as if it held plain objects, while those of one namespace are stored in its codec.

Only what the objects of that namespace are read and written with differs; names, listings (with the sizes that are
stored) and all other files are those of the store below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tplayout.cache.codec import Codec, ShuffleZstd
from tplayout.errors import FormatError
from tplayout.format.keys import parse_object_name
from tplayout.format.layout import ChunkLayout
from tplayout.format.packed import packed_layout, plain_range
from tplayout.storage.base import ObjectInfo, Store
from tplayout.storage.bounded import Deadline


def plain_store(store: Store, namespace: str, layouts: Sequence[ChunkLayout], codec: Codec) -> Store:
    """The store as one that holds the namespace's objects plain: itself for the codec none.

    namespace: its directory. layouts: of its groups. `close` closes the store itself.
    """
    return PackingStore(store, namespace, layouts, codec) if isinstance(codec, ShuffleZstd) else store


class PackingStore(Store):
    """See `plain_store`. Reading verbs raise FormatError, with the object's name, for what cannot be unpacked."""

    def __init__(self, inner: Store, namespace: str, layouts: Sequence[ChunkLayout], codec: ShuffleZstd) -> None:
        super().__init__(inner.url, inner.timeout_s)
        self._inner = inner
        self._namespace = namespace
        self._layouts = layouts
        self._codec = codec

    def _layout(self, key: str) -> ChunkLayout | None:
        """Of the object of that name; None for what is passed on as it is."""
        try:
            name = parse_object_name(key)
        except FormatError:
            return None
        known = name.namespace == self._namespace and name.group_index < len(self._layouts)
        return self._layouts[name.group_index] if known else None

    def _get(self, key: str, max_bytes: int | None, deadline: Deadline) -> bytes:
        layout = self._layout(key)
        if layout is None:
            return self._inner.get(key, deadline=_left(deadline), max_bytes=max_bytes)
        if max_bytes is not None and max_bytes < layout.nbytes:
            raise self._too_large("get", key, layout.nbytes, max_bytes)
        return bytes(self._unpacked(key, layout, None, deadline))

    def _get_into(self, key: str, view: memoryview, deadline: Deadline) -> int:
        layout = self._layout(key)
        if layout is None:
            return self._inner.get_into(key, view, deadline=_left(deadline))
        if len(view) < layout.nbytes:
            raise self._too_large("get_into", key, layout.nbytes, len(view))
        return len(self._unpacked(key, layout, view, deadline))

    def _get_range(self, key: str, start: int, length: int, deadline: Deadline) -> bytes:
        """What is asked for, and the tables that say where it is, are read; the whole only to say what is wrong."""
        layout = self._layout(key)
        if layout is None:
            return self._inner.get_range(key, start, length, deadline=_left(deadline))
        if start + length > layout.nbytes:
            raise self._short("get_range", key, length, max(0, layout.nbytes - start))
        packed = packed_layout(layout)

        def read(at: int, count: int) -> bytes:
            return self._inner.get_range(key, at, count, deadline=_left(deadline))

        if layout.tokens_range.start <= start and start + length <= layout.extras_range.stop:
            return read(packed.ids_start + start - layout.tokens_range.start, length)
        span = range(start, start + length)
        try:
            return plain_range(read(0, packed.info_bytes), span, packed, self._codec.compressor, read)
        except FormatError:
            return bytes(self._unpacked(key, layout, None, deadline)[start : start + length])

    def _put(self, key: str, view: memoryview, deadline: Deadline) -> None:
        layout = self._layout(key)
        data = view if layout is None else self._codec.pack(view, layout)
        self._inner.put(key, data, deadline=_left(deadline))

    def _unpacked(self, key: str, layout: ChunkLayout, out: memoryview | None, deadline: Deadline) -> memoryview:
        stored = self._inner.get(key, deadline=_left(deadline), max_bytes=self._codec.most_bytes(layout))
        try:
            return self._codec.unpack(stored, layout, out)
        except FormatError as error:
            raise error.at(key) from None

    def _exists(self, keys: Sequence[str], deadline: Deadline) -> list[bool]:
        return self._inner.exists(keys, deadline=_left(deadline))

    def _list(self, prefix: str, deadline: Deadline) -> Iterator[ObjectInfo]:
        return self._inner.list(prefix, deadline=_left(deadline))

    def _delete(self, keys: Sequence[str], deadline: Deadline) -> None:
        self._inner.delete(keys, deadline=_left(deadline))

    def _touch(self, keys: Sequence[str], deadline: Deadline) -> None:
        self._inner.touch(keys, deadline=_left(deadline))

    def _temporaries(self, deadline: Deadline) -> Iterator[ObjectInfo]:
        return self._inner.temporaries(deadline=_left(deadline))

    def _remove_temporaries(self, keys: Sequence[str], deadline: Deadline) -> None:
        self._inner.remove_temporaries(keys, deadline=_left(deadline))

    def _strangers(self, deadline: Deadline) -> Iterator[ObjectInfo]:
        return self._inner.strangers(deadline=_left(deadline))

    def _close(self) -> None:
        self._inner.close()


def _left(deadline: Deadline) -> float:
    return deadline.left()
