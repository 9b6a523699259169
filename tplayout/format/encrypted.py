"""Encrypted chunk objects: what the codec aes-256-gcm stores instead of a plain object's bytes.

Each cell is sealed by itself, under a key that this object alone has, with its place as associated data; so are the
ids together with the digests of the plain cells. Beside each lies a digest of what is stored, for who has no key.
The cipher and the salt are given: this module computes only.
"""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Protocol

from tplayout.errors import FormatError, Reason
from tplayout.format.chunk import Buffer, check_length, cut, overlap, paste, stated_fault, tensor_fault
from tplayout.format.digest import CellHasher, coordinates
from tplayout.format.encrypted_layout import EncryptedLayout
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.header import parse_header
from tplayout.format.layout import CODEC_AES_256_GCM, stated_layout

_NONCE_BYTES = 12
_IDS = 2**32 - 1  # head and layer of the sealed ids: no cell has them
_STORED = 2**31  # added to the layer in digests of stored bytes: no plain cell has it


class Aead(Protocol):
    """Authenticated encryption under one object's key; the tag is behind what is sealed."""

    def seal(self, nonce: bytes, data: Buffer, associated: bytes) -> bytes:
        """The data encrypted, and the tag."""
        ...

    def open(self, nonce: bytes, stored: Buffer, associated: bytes) -> bytes:
        """The data. FormatError bad-tag unless it was sealed under this key with this nonce and associated data."""
        ...


Cipher = Callable[[bytes], Aead]  # an object's key, 32 bytes -> what seals and opens under it


def encrypt(
    plain: Buffer,
    layout: EncryptedLayout,
    chunk_key: bytes,
    key: EncryptionKey,
    salt: bytes,
    hasher: CellHasher,
    cipher: Cipher,
) -> bytearray:
    """The bytes that are stored for a sealed plain object. salt: random, and used once. hasher: of the namespace.

    chunk_key: that of its name. Raises FormatError bad-header if it is no object of this layout; that it is sound is
    for others to check.
    """
    view = memoryview(plain).cast("B")
    if len(view) != layout.plain.nbytes or view[: layout.plain.data_start] != layout.plain.header:
        raise FormatError(Reason.BAD_HEADER, "not the plain object of this group")
    name = layout.plain.group.name
    aead = cipher(key.of_object(salt, chunk_key, layout.plain.group_index))
    out = memoryview(bytearray(layout.nbytes))
    out[: len(layout.header)] = layout.header
    out[cut(layout.salt_range)] = salt
    ids = b"".join([bytes(view[cut(layout.plain.ids_range)]), *(view[cut(span)] for span in _tables(layout))])
    out[cut(layout.ids_range)] = aead.seal(_nonce(0), ids, coordinates(chunk_key, name, _IDS, _IDS))
    for cell in range(layout.cells):
        where = coordinates(chunk_key, name, *layout.coordinates(cell))
        out[cut(layout.sealed_range(cell))] = aead.seal(_nonce(1 + cell), view[cut(layout.place(cell))], where)
    for digest, sealed, head, layer in _pieces(layout):
        out[cut(digest)] = hasher.cell(chunk_key, name, head, layer, out[cut(sealed)])
    result = out.obj
    assert isinstance(result, bytearray)
    return result


def check_stored(stored: Buffer, layout: EncryptedLayout, chunk_key: bytes, hasher: CellHasher | None) -> None:
    """Whether every stored byte is as it was written, as far as that can be told without the key.

    hasher: of the namespace; None where its secret is not at hand: then header and size only. Raises FormatError.
    """
    view = memoryview(stored).cast("B")
    check_info(view, len(view), layout)
    if hasher is None:
        return
    name = layout.plain.group.name
    for digest, sealed, head, layer in _pieces(layout):
        if view[cut(digest)] != hasher.cell(chunk_key, name, head, layer, view[cut(sealed)]):
            what = "the ids" if head == _IDS else f"head {head}, layer {layer - _STORED}"
            raise FormatError(Reason.DIGEST_MISMATCH, f"group {name!r}, {what}, as they are stored")


def check_info(head: Buffer, file_size: int, layout: EncryptedLayout) -> None:
    """Whether header and size are right. head: the first layout.info_bytes, or more; fewer if it is shorter."""
    view = memoryview(head).cast("B")
    if bytes(view[: len(layout.header)]) != layout.header:
        raise _header_fault(view, file_size, layout)
    check_length(file_size, layout.nbytes)


def decrypt(
    stored: Buffer,
    layout: EncryptedLayout,
    chunk_key: bytes,
    key: EncryptionKey,
    hasher: CellHasher | None,
    cipher: Cipher,
    out: memoryview | None = None,
) -> memoryview:
    """The plain object of an encrypted one; every stored byte is accounted for, the plain object is not verified.

    chunk_key: that of its name. hasher: see `check_stored`. out: memory for it, at least plain.nbytes; undefined after
    an error. Raises FormatError with a reason.
    """
    view = memoryview(stored).cast("B")
    check_stored(view, layout, chunk_key, hasher)
    opener = _Opener(view, layout, chunk_key, key, cipher)
    nbytes = layout.plain.nbytes
    plain = memoryview(bytearray(nbytes)) if out is None else memoryview(out).cast("B")[:nbytes]
    for start, data in opener.beginning():
        plain[start : start + len(data)] = data
    for pad in layout.plain.pads():
        plain[cut(pad)] = bytes(len(pad))
    for cell in range(layout.cells):
        plain[cut(layout.place(cell))] = opener.cell(cell, view[cut(layout.sealed_range(cell))])
    return plain


def plain_beginning(
    head: Buffer, layout: EncryptedLayout, chunk_key: bytes, key: EncryptionKey, cipher: Cipher
) -> memoryview:
    """The plain object's header, tokens, parent, extras and padding. head: the first layout.info_bytes, checked."""
    plain = bytearray(layout.plain.sections)
    for start, data in _Opener(memoryview(head).cast("B"), layout, chunk_key, key, cipher).beginning():
        paste(plain, range(len(plain)), start, data)
    return memoryview(plain)


def plain_range(
    span: range,
    layout: EncryptedLayout,
    chunk_key: bytes,
    key: EncryptionKey,
    cipher: Cipher,
    read: Callable[[int, int], bytes],
) -> bytes:
    """Bytes of the plain object, from the salt, the ids and those cells alone that are in it.

    read: start and length in the encrypted object -> its bytes. Raises FormatError for what was not sealed there under
    this key.
    """
    opener = _Opener(memoryview(read(0, layout.info_bytes)), layout, chunk_key, key, cipher)
    plain = bytearray(len(span))

    for start, data in opener.beginning():
        paste(plain, span, start, data)
    wanted = [cell for cell in range(layout.cells) if overlap(layout.place(cell), span)]
    if wanted:
        first = layout.sealed_range(wanted[0]).start
        sealed = memoryview(read(first, layout.sealed_range(wanted[-1]).stop - first))
        for cell in wanted:
            own = layout.sealed_range(cell)
            paste(
                plain, span, layout.place(cell).start, opener.cell(cell, sealed[own.start - first : own.stop - first])
            )
    return bytes(plain)


def salvage(
    stored: Buffer, layout: EncryptedLayout, chunk_key: bytes, key: EncryptionKey, cipher: Cipher
) -> memoryview:
    """As much of the plain object as a damaged encrypted one gives, for who looks at it; lost cells are zeros.

    Raises FormatError truncated or bad-tag if not even its ids can be opened.
    """
    view = memoryview(stored).cast("B")
    if len(view) < layout.info_bytes:
        raise FormatError(Reason.TRUNCATED, f"{len(view)} bytes, header and ids have {layout.info_bytes}")
    opener = _Opener(view, layout, chunk_key, key, cipher)
    plain = memoryview(bytearray(layout.plain.nbytes))
    for start, data in opener.beginning():
        plain[start : start + len(data)] = data
    for cell in range(layout.cells):
        with suppress(FormatError):
            plain[cut(layout.place(cell))] = opener.cell(cell, view[cut(layout.sealed_range(cell))])
    return plain


class _Opener:
    """Opens what one object holds. Its ids are opened at once: FormatError bad-tag if they are not of this key."""

    def __init__(
        self, info: memoryview, layout: EncryptedLayout, chunk_key: bytes, key: EncryptionKey, cipher: Cipher
    ) -> None:
        """info: the first layout.info_bytes, or more."""
        self._layout = layout
        self._chunk_key = chunk_key
        salt = bytes(info[cut(layout.salt_range)])
        self._aead = cipher(key.of_object(salt, chunk_key, layout.plain.group_index))
        self._ids = memoryview(self._open(0, info[cut(layout.ids_range)], _IDS, _IDS))

    def cell(self, cell: int, sealed: memoryview) -> bytes:
        """One plain cell. FormatError truncated, bad-tag."""
        if len(sealed) != self._layout.sealed_bytes:
            raise FormatError(Reason.TRUNCATED, f"{len(sealed)} bytes of a cell of {self._layout.sealed_bytes}")
        return self._open(1 + cell, sealed, *self._layout.coordinates(cell))

    def beginning(self) -> Iterator[tuple[int, Buffer]]:
        """(offset in the plain object, bytes) of everything but cells and padding."""
        yield 0, self._layout.plain.header
        at = 0
        for span in (self._layout.plain.ids_range, *_tables(self._layout)):
            yield span.start, self._ids[at : at + len(span)]
            at += len(span)

    def _open(self, number: int, sealed: Buffer, head: int, layer: int) -> bytes:
        where = coordinates(self._chunk_key, self._layout.plain.group.name, head, layer)
        try:
            return self._aead.open(_nonce(number), sealed, where)
        except FormatError as error:
            what = "the ids" if head == _IDS else f"head {head}, layer {layer}"
            raise FormatError(
                error.reason, f"group {self._layout.plain.group.name!r}, {what}: {error.detail}"
            ) from None


def _tables(layout: EncryptedLayout) -> Iterator[range]:
    """Each head's digests in the plain object."""
    for head in range(layout.plain.group.heads):
        yield layout.plain.digests_range(head, range(layout.layers))


def _pieces(layout: EncryptedLayout) -> Iterator[tuple[range, range, int, int]]:
    """Of salt and ids, and of each cell: where the digest is, what it covers, and with which head and layer."""
    yield layout.info_digest_range, range(layout.salt_range.start, layout.ids_range.stop), _IDS, _IDS
    for cell in range(layout.cells):
        head, layer = layout.coordinates(cell)
        yield layout.digest_range(cell), layout.sealed_range(cell), head, layer + _STORED


def _nonce(number: int) -> bytes:
    """Unique within an object, whose key no other object has."""
    return number.to_bytes(_NONCE_BYTES, "little")


def _header_fault(view: memoryview, file_size: int, layout: EncryptedLayout) -> FormatError:
    """Why the beginning is not that of an encrypted object of this layout. Returns, or raises, the error."""
    header = parse_header(view, file_size)
    theirs, codec = stated_layout(header)
    if codec != CODEC_AES_256_GCM:
        return FormatError(Reason.WRONG_CODEC, f"codec is {codec}, must be {CODEC_AES_256_GCM}")
    fault = stated_fault(theirs, layout.plain)
    if fault is not None:
        return fault
    stated = header.metadata["encryption_key_id"]
    if stated != layout.key_id:
        return FormatError(Reason.WRONG_ENCRYPTION_KEY, f"encrypted with {stated}, must be {layout.key_id}")
    return tensor_fault(header, parse_header(layout.header, layout.nbytes))
