"""A store that looks as if it held plain objects, while those of one namespace are stored in its codec.

Only what the objects of that namespace are read and written with differs; names, listings (with the sizes that are
stored) and all other files are those of the store below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from tplayout.cache.codec import Codec, Plain
from tplayout.errors import FormatError
from tplayout.format.keys import ObjectName, object_name, parse_object_name
from tplayout.format.layout import ChunkLayout
from tplayout.storage.base import ObjectInfo, Store
from tplayout.storage.bounded import Deadline


def plain_store(store: Store, namespace: str, layouts: Sequence[ChunkLayout], codec: Codec) -> Store:
    """The store as one that holds the namespace's objects plain: itself for the codec none.

    namespace: its directory. layouts: of its groups. `close` closes the store itself. Raises GeometryError for a group
    that the codec cannot store.
    """
    return store if isinstance(codec, Plain) else PackingStore(store, namespace, layouts, codec)


class PackingStore(Store):
    """See `plain_store`. Reading verbs raise FormatError, with the object's name, for what cannot be unpacked."""

    def __init__(self, inner: Store, namespace: str, layouts: Sequence[ChunkLayout], codec: Codec) -> None:
        super().__init__(inner.url, inner.timeout_s)
        self._inner = inner
        self._namespace = namespace
        self._layouts = layouts
        self._codec = codec
        for layout in layouts:
            codec.sizes(layout)

    def _known(self, key: str) -> tuple[ObjectName, ChunkLayout] | None:
        """Name and layout of the object; None for what is passed on as it is."""
        try:
            name = parse_object_name(key)
        except FormatError:
            return None
        known = name.namespace == self._namespace and name.group_index < len(self._layouts)
        return (name, self._layouts[name.group_index]) if known else None

    def _get(self, key: str, max_bytes: int | None, deadline: Deadline) -> bytes:
        known = self._known(key)
        if known is None:
            return self._inner.get(key, deadline=_left(deadline), max_bytes=max_bytes)
        name, layout = known
        if max_bytes is not None and max_bytes < layout.nbytes:
            raise self._too_large("get", key, layout.nbytes, max_bytes)
        return bytes(self._unpacked(name, layout, None, deadline))

    def _get_into(self, key: str, view: memoryview, deadline: Deadline) -> int:
        known = self._known(key)
        if known is None:
            return self._inner.get_into(key, view, deadline=_left(deadline))
        name, layout = known
        if len(view) < layout.nbytes:
            raise self._too_large("get_into", key, layout.nbytes, len(view))
        return len(self._unpacked(name, layout, view, deadline))

    def _get_range(self, key: str, start: int, length: int, deadline: Deadline) -> bytes:
        """What is asked for, and the tables that say where it is, are read; the whole only to say what is wrong."""
        known = self._known(key)
        if known is None:
            return self._inner.get_range(key, start, length, deadline=_left(deadline))
        name, layout = known
        if start + length > layout.nbytes:
            raise self._short("get_range", key, length, max(0, layout.nbytes - start))

        def read(at: int, count: int) -> bytes:
            return self._inner.get_range(key, at, count, deadline=_left(deadline))

        try:
            return self._codec.plain_range(range(start, start + length), layout, name.key, read)
        except FormatError:
            return bytes(self._unpacked(name, layout, None, deadline)[start : start + length])

    def _put(self, key: str, view: memoryview, deadline: Deadline) -> None:
        known = self._known(key)
        data = view if known is None else self._codec.pack(view, known[1], known[0].key)
        self._inner.put(key, data, deadline=_left(deadline))

    def _unpacked(
        self, name: ObjectName, layout: ChunkLayout, out: memoryview | None, deadline: Deadline
    ) -> memoryview:
        where = object_name(name.namespace, name.key, name.group_index)
        stored = self._inner.get(where, deadline=_left(deadline), max_bytes=self._codec.most_bytes(layout))
        try:
            return self._codec.unpack(stored, layout, name.key, out)
        except FormatError as error:
            raise error.at(where) from None

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
