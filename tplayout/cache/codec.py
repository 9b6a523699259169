"""Codecs by name: how the objects of a namespace are stored, and what that takes.

A codec goes between the bytes of a plain object and those that a store holds. zstandard is imported by the first
plane that is packed or unpacked: who only lists a store does not need it.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Protocol

from tplayout.errors import ConfigError, FormatError, Reason
from tplayout.format.chunk import Buffer
from tplayout.format.digest import CellHasher
from tplayout.format.layout import CODEC_NONE, CODEC_SHUFFLE_ZSTD, CODECS, ChunkLayout, check_codec
from tplayout.format.packed import (
    Compressor,
    check_info,
    pack,
    packed_layout,
    plain_beginning,
    salvage,
    unpack,
)

if TYPE_CHECKING:
    from zstandard import ZstdCompressor, ZstdDecompressor

# Planes of KV either shrink at once or not at all: higher levels cost time and gain nothing (bfloat16: level 3 takes
# three times as long as 1 for planes that are larger).
_LEVEL = 1


class Codec(Protocol):
    """How objects are stored. layout: of the plain object."""

    name: str

    def sizes(self, layout: ChunkLayout) -> range:
        """What a stored object may have, in bytes."""
        ...

    def most_bytes(self, layout: ChunkLayout) -> int:
        """How much to read of what may be an object: what is longer is none, of this codec or another."""
        ...

    def info_bytes(self, layout: ChunkLayout) -> int:
        """How many of its first bytes hold all but the cells."""
        ...

    def pack(self, plain: Buffer, layout: ChunkLayout) -> Buffer:
        """The bytes to store for a sealed plain object."""
        ...

    def unpack(self, stored: Buffer, layout: ChunkLayout) -> memoryview:
        """The plain object; it is for `verify` to check. Raises FormatError."""
        ...

    def beginning(self, head: Buffer, file_size: int, layout: ChunkLayout) -> tuple[memoryview, int]:
        """The plain object's first layout.sections bytes and its size, from the stored one's first info_bytes and size.

        Fewer where the stored one is shorter. Raises FormatError for what can be told without the cells.
        """
        ...

    def salvage(self, stored: Buffer, layout: ChunkLayout) -> memoryview:
        """As much of the plain object as a damaged one gives. Raises FormatError if that is nothing."""
        ...


class Plain:
    """The codec none: objects are stored as they are."""

    name = CODEC_NONE

    def sizes(self, layout: ChunkLayout) -> range:
        """See `Codec`."""
        return range(layout.nbytes, layout.nbytes + 1)

    def most_bytes(self, layout: ChunkLayout) -> int:
        """See `Codec`."""
        return layout.nbytes

    def info_bytes(self, layout: ChunkLayout) -> int:
        """See `Codec`."""
        return layout.sections

    def pack(self, plain: Buffer, layout: ChunkLayout) -> Buffer:
        """See `Codec`."""
        return plain

    def unpack(self, stored: Buffer, layout: ChunkLayout) -> memoryview:
        """See `Codec`."""
        return memoryview(stored).cast("B")

    def beginning(self, head: Buffer, file_size: int, layout: ChunkLayout) -> tuple[memoryview, int]:
        """See `Codec`."""
        return memoryview(head).cast("B"), file_size

    def salvage(self, stored: Buffer, layout: ChunkLayout) -> memoryview:
        """See `Codec`."""
        return memoryview(stored).cast("B")


class ShuffleZstd:
    """The codec shuffle-zstd; safe to use from many threads."""

    name = CODEC_SHUFFLE_ZSTD

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

    def pack(self, plain: Buffer, layout: ChunkLayout) -> Buffer:
        """See `Codec`."""
        assert self._hasher is not None, "this codec was made for reading"
        return pack(plain, packed_layout(layout), self._hasher, self.compressor)

    def unpack(self, stored: Buffer, layout: ChunkLayout, out: memoryview | None = None) -> memoryview:
        """See `Codec`. out: memory for it, None for new."""
        return unpack(stored, packed_layout(layout), self._hasher, self.compressor, out)

    def beginning(self, head: Buffer, file_size: int, layout: ChunkLayout) -> tuple[memoryview, int]:
        """See `Codec`."""
        check_info(head, file_size, packed_layout(layout))
        return plain_beginning(head, packed_layout(layout)), layout.nbytes

    def salvage(self, stored: Buffer, layout: ChunkLayout) -> memoryview:
        """See `Codec`."""
        return salvage(stored, packed_layout(layout), self.compressor)


def make_codec(name: str, hasher: CellHasher | None) -> Codec:
    """The codec of that name. hasher: see `ShuffleZstd`. Raises FormatError unsupported-codec."""
    check_codec(name)
    return Plain() if name == CODEC_NONE else ShuffleZstd(hasher)


def require(name: str) -> None:
    """ConfigError unless what a codec needs is installed, or for a codec that is not known: before work begins."""
    if name not in CODECS:
        raise ConfigError(f"codec {name!r} is not known: {', '.join(CODECS)}")
    if name != CODEC_NONE:
        _decompressor()


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


def _missing(error: ImportError) -> ConfigError:
    return ConfigError(f"codec {CODEC_SHUFFLE_ZSTD} needs zstandard ({error}): pip install 'tplayout[zstd]'")
