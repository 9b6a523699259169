"""The chunks of a namespace as chains: which follows which, where prefixes end, what is cut off by a gap.

The index holds some hundred bytes a chunk; token ids are read again when they are needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from tplayout.admin.namespaces import OpenNamespace
from tplayout.admin.parallel import in_order
from tplayout.errors import FormatError, NotFound
from tplayout.format.keys import ROOT, ChunkId
from tplayout.storage.base import ObjectInfo

SMALL_READS = 8  # reads of a few kilobytes at the same time, whatever a caller's jobs: they cost time, not memory


@dataclass
class Chunk:
    """One stored chunk. parent: key of the one before, ROOT for none. objects: by group index, those listed."""

    key: bytes
    parent: bytes = b""
    objects: dict[int, ObjectInfo] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        """Of all its objects."""
        return sum(info.size for info in self.objects.values())


@dataclass
class Index:
    """All chunks of a namespace. damaged: object names with what is wrong, as far as reading their ids told."""

    namespace: OpenNamespace
    chunks: dict[bytes, Chunk] = field(default_factory=dict)
    damaged: dict[str, FormatError] = field(default_factory=dict)

    def leaves(self) -> list[bytes]:
        """Keys of the chunks that no chunk follows, sorted."""
        followed = {chunk.parent for chunk in self.chunks.values()}
        return sorted(key for key in self.chunks if key not in followed)

    def path(self, key: bytes) -> list[bytes]:
        """Keys from the prefix's first chunk to this one; empty if a chunk between them is missing."""
        keys = []
        while key != ROOT:
            chunk = self.chunks.get(key)
            if chunk is None:
                return []
            keys.append(key)
            key = chunk.parent
        return keys[::-1]

    def depths(self) -> dict[bytes, int]:
        """For each chunk its position in its prefix; -1 where a chunk before it is missing."""
        found = {ROOT: -1}
        for start in self.chunks:
            keys = []
            key = start
            while key not in found and key in self.chunks:
                keys.append(key)
                key = self.chunks[key].parent
            cut_off = key not in found or (key != ROOT and found[key] == -1)
            depth = -1 if cut_off else found[key]
            for key in reversed(keys):
                depth = -1 if cut_off else depth + 1
                found[key] = depth
        del found[ROOT]
        return found

    def prefixes(self) -> Iterator[list[bytes]]:
        """The longest prefixes that have no gap, as keys from the first chunk on."""
        depths = self.depths()
        for leaf in self.leaves():
            if depths[leaf] >= 0:
                yield self.path(leaf)

    def cut_off(self) -> list[bytes]:
        """Keys of the chunks that no reader reaches, since one before them is missing; sorted."""
        return sorted(key for key, depth in self.depths().items() if depth < 0)

    def reasons(self) -> dict[str, str]:
        """Damaged objects' names, and in words what is wrong."""
        return {name: str(error) for name, error in self.damaged.items()}

    def chunk_id(self, key: bytes) -> ChunkId:
        """Tokens, parent and extras of a chunk, read from one of its objects. Raises FormatError, NotFound."""
        return self.namespace.chunk_id(key, min(self.chunks[key].objects))


def build_index(namespace: OpenNamespace) -> Index:
    """List a namespace and read what each chunk follows. An object that does not say is damaged and left out.

    Of each chunk one object is read, a few kilobytes. Raises StorageError.
    """
    listed: dict[bytes, Chunk] = {}
    for name, info in namespace.objects():
        listed.setdefault(name.key, Chunk(name.key)).objects[name.group_index] = info
    index = Index(namespace)

    def parent(chunk: Chunk) -> tuple[Chunk, dict[str, FormatError]]:
        damaged: dict[str, FormatError] = {}
        for group in sorted(chunk.objects):
            try:
                chunk.parent = namespace.chunk_id(chunk.key, group).parent
                break
            except FormatError as error:
                damaged[chunk.objects.pop(group).key] = error
            except NotFound:  # deleted since it was listed
                del chunk.objects[group]
        return chunk, damaged

    for chunk, damaged in in_order(parent, listed.values(), SMALL_READS):
        index.damaged |= damaged
        if chunk.parent:
            index.chunks[chunk.key] = chunk
    return index
