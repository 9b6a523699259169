"""Codecs by name: how the objects of a namespace are stored, and what that takes.

A codec goes between the bytes of a plain object and those that a store holds. zstandard and cryptography are imported
by the first object that needs them: who only lists a store does not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from tplayout.errors import ConfigError, FormatError, Reason
from tplayout.format import encrypted, packed
from tplayout.format.chunk import Buffer
from tplayout.format.digest import CellHasher
from tplayout.format.encrypted import Aead
from tplayout.format.encrypted_layout import SALT_BYTES, EncryptedLayout, encrypted_layout
from tplayout.format.encryption_key import EncryptionKey
from tplayout.format.layout import (
    CODEC_AES_256_GCM,
    CODEC_NONE,
    CODEC_SHUFFLE_ZSTD,
    CODECS,
    ChunkLayout,
    check_codec,
)
from tplayout.format.packed import Compressor, packed_layout

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    from zstandard import ZstdCompressor, ZstdDecompressor

Read = Callable[[int, int], bytes]  # start and length in a stored object -> its bytes

# Planes of KV either shrink at once or not at all: higher levels cost time and gain nothing (bfloat16: level 3 takes
# three times as long as 1 for planes that are larger).
_LEVEL = 1


class Codec(Protocol):
    """How objects are stored. layout: of the plain object; key: the chunk's, from the object's name."""

    name: str
    encrypts: bool

    @property
    def closed(self) -> Aes256Gcm | None:
        """Itself if objects are encrypted and the key is not at hand, so that only what is stored can be checked."""
        ...

    def sizes(self, layout: ChunkLayout) -> range:
        """What a stored object may have, in bytes."""
        ...

    def most_bytes(self, layout: ChunkLayout) -> int:
        """How much to read of what may be an object: what is longer is none, of this codec or another."""
        ...

    def info_bytes(self, layout: ChunkLayout) -> int:
        """How many of its first bytes hold all but the cells."""
        ...

    def pack(self, plain: Buffer, layout: ChunkLayout, key: bytes) -> Buffer:
        """The bytes to store for a sealed plain object."""
        ...

    def unpack(self, stored: Buffer, layout: ChunkLayout, key: bytes, out: memoryview | None = None) -> memoryview:
        """The plain object; it is for `verify` to check. out: memory for it, None for new. Raises FormatError."""
        ...

    def plain_range(self, span: range, layout: ChunkLayout, key: bytes, read: Read) -> bytes:
        """A range of the plain object, read from no more of the stored one than that takes. Raises FormatError."""
        ...

    def beginning(self, head: Buffer, file_size: int, layout: ChunkLayout, key: bytes) -> tuple[memoryview, int]:
        """The plain object's first layout.sections bytes and its size, from the stored one's first info_bytes and size.

        Fewer where the stored one is shorter. Raises FormatError for what can be told without the cells.
        """
        ...

    def salvage(self, stored: Buffer, layout: ChunkLayout, key: bytes) -> memoryview:
        """As much of the plain object as a damaged one gives. Raises FormatError if that is nothing."""
        ...


class Plain:
    """The codec none: objects are stored as they are."""

    name = CODEC_NONE
    encrypts = False
    closed = None

    def sizes(self, layout: ChunkLayout) -> range:
        """See `Codec`."""
        return range(layout.nbytes, layout.nbytes + 1)

    def most_bytes(self, layout: ChunkLayout) -> int:
        """See `Codec`."""
        return layout.nbytes

    def info_bytes(self, layout: ChunkLayout) -> int:
        """See `Codec`."""
        return layout.sections

    def pack(self, plain: Buffer, layout: ChunkLayout, key: bytes) -> Buffer:
        """See `Codec`."""
        return plain

    def unpack(self, stored: Buffer, layout: ChunkLayout, key: bytes, out: memoryview | None = None) -> memoryview:
        """See `Codec`. Without `out` it is what was given."""
        view = memoryview(stored).cast("B")
        if out is None:
            return view
        out[: len(view)] = view
        return out[: len(view)]

    def plain_range(self, span: range, layout: ChunkLayout, key: bytes, read: Read) -> bytes:
        """See `Codec`."""
        return read(span.start, len(span))

    def beginning(self, head: Buffer, file_size: int, layout: ChunkLayout, key: bytes) -> tuple[memoryview, int]:
        """See `Codec`."""
        return memoryview(head).cast("B"), file_size

    def salvage(self, stored: Buffer, layout: ChunkLayout, key: bytes) -> memoryview:
        """See `Codec`."""
        return memoryview(stored).cast("B")


class ShuffleZstd:
    """The codec shuffle-zstd; safe to use from many threads."""

    name = CODEC_SHUFFLE_ZSTD
    encrypts = False
    closed = None

    def __init__(self, hasher: CellHasher | None) -> None:
        """hasher: of the namespace; None to read without authenticating what is stored, and to write nothing."""
        self.compressor: Compressor = Zstd()
        self._hasher = hasher

    def sizes(self, layout: ChunkLayout) -> range:
        """See `Codec`."""
        return packed_layout(layout).sizes

    def most_bytes(self, layout: ChunkLayout) -> int:
        """See `Codec`. A plain object in a packed one's place is to be called that."""
        return max(packed_layout(layout).sizes.stop - 1, layout.nbytes)

    def info_bytes(self, layout: ChunkLayout) -> int:
        """See `Codec`."""
        return packed_layout(layout).info_bytes

    def pack(self, plain: Buffer, layout: ChunkLayout, key: bytes) -> Buffer:
        """See `Codec`."""
        assert self._hasher is not None, "this codec was made for reading"
        return packed.pack(plain, packed_layout(layout), self._hasher, self.compressor)

    def unpack(self, stored: Buffer, layout: ChunkLayout, key: bytes, out: memoryview | None = None) -> memoryview:
        """See `Codec`."""
        return packed.unpack(stored, packed_layout(layout), self._hasher, self.compressor, out)

    def plain_range(self, span: range, layout: ChunkLayout, key: bytes, read: Read) -> bytes:
        """See `Codec`."""
        own, ids = packed_layout(layout), layout.ids_range
        if ids.start <= span.start and span.stop <= ids.stop:
            return read(own.ids_start + span.start - ids.start, len(span))
        return packed.plain_range(read(0, own.info_bytes), span, own, self.compressor, read)

    def beginning(self, head: Buffer, file_size: int, layout: ChunkLayout, key: bytes) -> tuple[memoryview, int]:
        """See `Codec`."""
        packed.check_info(head, file_size, packed_layout(layout))
        return packed.plain_beginning(head, packed_layout(layout)), layout.nbytes

    def salvage(self, stored: Buffer, layout: ChunkLayout, key: bytes) -> memoryview:
        """See `Codec`."""
        return packed.salvage(stored, packed_layout(layout), self.compressor)


class Aes256Gcm:
    """The codec aes-256-gcm; safe to use from many threads. Without the key it can only look at what is stored."""

    name = CODEC_AES_256_GCM
    encrypts = True

    def __init__(self, hasher: CellHasher | None, key_id: str, key: EncryptionKey | None) -> None:
        """hasher: see `ShuffleZstd`. key_id: of the key that objects are encrypted with; key: None if not at hand."""
        self._hasher = hasher
        self._key_id = key_id
        self._key = key

    @property
    def closed(self) -> Aes256Gcm | None:
        """See `Codec`."""
        return self if self._key is None else None

    def layout(self, layout: ChunkLayout) -> EncryptedLayout:
        """Of what is stored."""
        return encrypted_layout(layout, self._key_id)

    def check(self, stored: Buffer, layout: ChunkLayout, key: bytes) -> None:
        """Compare what is stored with its digests: all that can be done without the key. Raises FormatError."""
        encrypted.check_stored(stored, self.layout(layout), key, self._hasher)

    def check_head(self, head: Buffer, file_size: int, layout: ChunkLayout) -> None:
        """The same for header and size alone."""
        encrypted.check_info(head, file_size, self.layout(layout))

    def sizes(self, layout: ChunkLayout) -> range:
        """See `Codec`."""
        return range(self.layout(layout).nbytes, self.layout(layout).nbytes + 1)

    def most_bytes(self, layout: ChunkLayout) -> int:
        """See `Codec`. A plain or packed object in an encrypted one's place is to be called that."""
        return max(self.layout(layout).nbytes, layout.nbytes, packed_layout(layout).sizes.stop - 1)

    def info_bytes(self, layout: ChunkLayout) -> int:
        """See `Codec`."""
        return self.layout(layout).info_bytes

    def pack(self, plain: Buffer, layout: ChunkLayout, key: bytes) -> Buffer:
        """See `Codec`."""
        assert self._hasher is not None, "this codec was made for reading"
        salt = os.urandom(SALT_BYTES)
        return encrypted.encrypt(plain, self.layout(layout), key, self._needed(), salt, self._hasher, Gcm)

    def unpack(self, stored: Buffer, layout: ChunkLayout, key: bytes, out: memoryview | None = None) -> memoryview:
        """See `Codec`."""
        return encrypted.decrypt(stored, self.layout(layout), key, self._needed(), self._hasher, Gcm, out)

    def plain_range(self, span: range, layout: ChunkLayout, key: bytes, read: Read) -> bytes:
        """See `Codec`."""
        return encrypted.plain_range(span, self.layout(layout), key, self._needed(), Gcm, read)

    def beginning(self, head: Buffer, file_size: int, layout: ChunkLayout, key: bytes) -> tuple[memoryview, int]:
        """See `Codec`."""
        self.check_head(head, file_size, layout)
        return encrypted.plain_beginning(head, self.layout(layout), key, self._needed(), Gcm), layout.nbytes

    def salvage(self, stored: Buffer, layout: ChunkLayout, key: bytes) -> memoryview:
        """See `Codec`."""
        return encrypted.salvage(stored, self.layout(layout), key, self._needed(), Gcm)

    def _needed(self) -> EncryptionKey:
        if self._key is None:
            raise FormatError(Reason.WRONG_ENCRYPTION_KEY, f"the encryption key {self._key_id} is needed")
        return self._key


def make_codec(
    name: str, hasher: CellHasher | None, key_id: str | None = None, key: EncryptionKey | None = None
) -> Codec:
    """The codec of that name. hasher: see `ShuffleZstd`; key_id, key: see `Aes256Gcm`.

    Raises FormatError unsupported-codec.
    """
    check_codec(name)
    if name == CODEC_AES_256_GCM:
        assert key_id is not None, "a namespace of this codec names its key"
        return Aes256Gcm(hasher, key_id, key)
    return Plain() if name == CODEC_NONE else ShuffleZstd(hasher)


def require(name: str) -> None:
    """ConfigError unless what a codec needs is installed, or for a codec that is not known: before work begins."""
    if name not in CODECS:
        raise ConfigError(f"codec {name!r} is not known: {', '.join(CODECS)}")
    if name == CODEC_SHUFFLE_ZSTD:
        _decompressor()
    if name == CODEC_AES_256_GCM:
        _aes_gcm()


def begun_codec(codec: str | None, key: EncryptionKey | None) -> str:
    """The codec of a namespace that is begun. codec: the one asked for, None for that which goes with the key.

    Raises ConfigError unless an encryption key and the codec that takes one come together.
    """
    if codec is None:
        return CODEC_NONE if key is None else CODEC_AES_256_GCM
    if codec == CODEC_AES_256_GCM and key is None:
        raise ConfigError(f"codec {codec} needs an encryption key")
    if codec in CODECS and codec != CODEC_AES_256_GCM and key is not None:
        # Compressed lengths tell something of what is in them, so that the two are not combined.
        raise ConfigError(f"codec {codec} does not encrypt: leave out the encryption key, or take {CODEC_AES_256_GCM}")
    return codec


def check_key(codec: str, key_id: str | None, key: EncryptionKey | None) -> None:
    """FormatError wrong-encryption-key unless a namespace's key, or none, is the one that its user has.

    codec, key_id: that the namespace states. Who has a key must not read, nor write, what is not encrypted with it.
    """
    given = None if key is None else key.id
    if given == key_id:
        return
    if key_id is None:
        raise FormatError(Reason.WRONG_ENCRYPTION_KEY, f"codec {codec} takes no encryption key, {given} is given")
    raise FormatError(Reason.WRONG_ENCRYPTION_KEY, f"encryption key {key_id} is needed, {given or 'none'} is given")


class Zstd:
    """zstd frames that say how long their data is; contexts are kept, one of each kind a thread."""

    def __init__(self) -> None:
        self._of_thread = threading.local()

    def compress(self, data: bytes) -> bytes:
        """One frame."""
        compressor: ZstdCompressor | None = getattr(self._of_thread, "compressor", None)
        if compressor is None:
            compressor = self._of_thread.compressor = _compressor()
        return compressor.compress(data)

    def expand(self, frame: memoryview, nbytes: int) -> bytes:
        """The data of one frame. FormatError bad-plane unless it says to have, and has, nbytes."""
        decompressor: ZstdDecompressor | None = getattr(self._of_thread, "decompressor", None)
        if decompressor is None:
            decompressor = self._of_thread.decompressor = _decompressor()
        import zstandard

        try:
            # By itself the library allocates what a frame claims, and ignores what follows the frame.
            claimed = zstandard.get_frame_parameters(frame).content_size
            if claimed != nbytes:
                raise FormatError(Reason.BAD_PLANE, "a frame does not say to have the bytes of a plane")
            data = decompressor.decompress(
                frame, max_output_size=nbytes, read_across_frames=False, allow_extra_data=False
            )
        except zstandard.ZstdError as error:
            raise FormatError(Reason.BAD_PLANE, str(error)[:200]) from None
        if len(data) != nbytes:
            raise FormatError(Reason.BAD_PLANE, f"{len(data)} bytes, a plane has {nbytes}")
        return data


def _compressor() -> ZstdCompressor:
    try:
        from zstandard import ZstdCompressor
    except ImportError as error:
        raise _missing(error) from None
    return ZstdCompressor(level=_LEVEL)


def _decompressor() -> ZstdDecompressor:
    try:
        from zstandard import ZstdDecompressor
    except ImportError as error:
        raise _missing(error) from None
    return ZstdDecompressor()


class Gcm(Aead):
    """AES-256-GCM under one object's key."""

    def __init__(self, key: bytes) -> None:
        """key: 32 bytes."""
        self._aead = _aes_gcm()(key)

    def seal(self, nonce: bytes, data: Buffer, associated: bytes) -> bytes:
        """See `Aead`."""
        return self._aead.encrypt(nonce, data, associated)

    def open(self, nonce: bytes, stored: Buffer, associated: bytes) -> bytes:
        """See `Aead`."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._aead.decrypt(nonce, stored, associated)
        except InvalidTag:
            raise FormatError(Reason.BAD_TAG, "not sealed there with this key") from None


def _aes_gcm() -> type[AESGCM]:
    try:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM
    except ImportError as error:
        raise ConfigError(
            f"codec {CODEC_AES_256_GCM} needs cryptography ({error}): pip install 'tplayout[encrypt]'"
        ) from None
    return AESGCM


def _missing(error: ImportError) -> ConfigError:
    return ConfigError(f"codec {CODEC_SHUFFLE_ZSTD} needs zstandard ({error}): pip install 'tplayout[zstd]'")
