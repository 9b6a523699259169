"""Where everything is in an encrypted chunk object: a function of the plain object's layout and the key's id."""

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from tplayout.errors import GeometryError
from tplayout.format.layout import CODEC_AES_256_GCM, ChunkLayout, encode_header

SALT_BYTES = 32
TAG_BYTES = 16
MAX_SEALED_BYTES = 2**31 - 1  # that ciphers' libraries take at a time


@dataclass(frozen=True)
class EncryptedLayout:
    """Where everything is in an encrypted object: known before a byte of it is read.

    plain: of the object that is sealed. key_id: of the encryption key. info_bytes: header, salt and sealed ids; the
    heads follow. nbytes: of the whole object.
    """

    plain: ChunkLayout
    key_id: str
    ids_bytes: int
    header: bytes = field(repr=False)

    @property
    def info_digest_range(self) -> range:
        """Digest of salt and sealed ids."""
        return range(len(self.header), len(self.header) + self.plain.digest_size)

    @property
    def salt_range(self) -> range:
        """The object's salt."""
        return range(self.info_digest_range.stop, self.info_digest_range.stop + SALT_BYTES)

    @property
    def ids_range(self) -> range:
        """Tokens, parent, extras and the digests of all plain cells, sealed."""
        return range(self.salt_range.stop, self.salt_range.stop + self.ids_bytes + TAG_BYTES)

    @property
    def info_bytes(self) -> int:
        """Everything before the first head."""
        return self.ids_range.stop

    @property
    def layers(self) -> int:
        """Of the group."""
        return len(self.plain.group.layers)

    @property
    def cells(self) -> int:
        """Of the object: head by head, the layers of each."""
        return self.plain.group.heads * self.layers

    @property
    def sealed_bytes(self) -> int:
        """Of one cell."""
        return self.plain.cell_bytes + TAG_BYTES

    @property
    def nbytes(self) -> int:
        """Of the whole object."""
        return self.info_bytes + self.cells * (self.plain.digest_size + self.sealed_bytes)

    def _head(self, head: int) -> int:
        return self.info_bytes + head * self.layers * (self.plain.digest_size + self.sealed_bytes)

    def digest_range(self, cell: int) -> range:
        """Digest of a sealed cell."""
        head, position = divmod(cell, self.layers)
        start = self._head(head) + position * self.plain.digest_size
        return range(start, start + self.plain.digest_size)

    def sealed_range(self, cell: int) -> range:
        """A sealed cell."""
        head, position = divmod(cell, self.layers)
        start = self._head(head) + self.layers * self.plain.digest_size + position * self.sealed_bytes
        return range(start, start + self.sealed_bytes)

    def place(self, cell: int) -> range:
        """Where a cell is in the plain object."""
        return self.plain.cell_range(*divmod(cell, self.layers))

    def coordinates(self, cell: int) -> tuple[int, int]:
        """Head and the model's number of the layer."""
        head, position = divmod(cell, self.layers)
        return head, self.plain.group.layers[position]


@lru_cache(maxsize=256)
def encrypted_layout(layout: ChunkLayout, key_id: str) -> EncryptedLayout:
    """The layout of a group's encrypted objects. key_id: of the encryption key.

    GeometryError if the header would exceed its cap, or a cell is more than ciphers take at a time.
    """
    if layout.cell_bytes + TAG_BYTES > MAX_SEALED_BYTES:
        raise GeometryError(f"cells of {layout.cell_bytes} bytes are too large to be encrypted: use smaller chunks")
    cells = layout.group.heads * len(layout.group.layers)
    ids = len(layout.ids_range) + cells * layout.digest_size
    return EncryptedLayout(layout, key_id, ids, _encode(layout, key_id, ids))


def _encode(layout: ChunkLayout, key_id: str, ids_bytes: int) -> bytes:
    """The header of an encrypted object."""
    layers, sealed = len(layout.group.layers), layout.cell_bytes + TAG_BYTES
    entries: dict[str, Any] = {}
    offset = 0

    def add(name: str, *shape: int) -> None:
        nonlocal offset
        end = offset + (shape[0] * shape[1] if len(shape) == 2 else shape[0])
        entries[name] = {"dtype": "U8", "shape": list(shape), "data_offsets": [offset, end]}
        offset = end

    add("digest", layout.digest_size)
    add("salt", SALT_BYTES)
    add("ids", ids_bytes + TAG_BYTES)
    for head in range(layout.group.heads):
        add(f"h{head}.digests", layers, layout.digest_size)
        add(f"h{head}.sealed", layers, sealed)
    return encode_header({**layout.metadata(CODEC_AES_256_GCM), "encryption_key_id": key_id}, entries)
