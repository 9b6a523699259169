"""Feeds mutated files to everything that reads files of others: only typed errors may come out, in little memory.

    python tools/fuzz.py                     # ten million bytes for each reader, another seed every time
    python tools/fuzz.py --bytes 1e9 --seed 7 --only chunk

A finding is printed with its reader, seed and round, which make it again, and ends the run with status 1.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import tracemalloc
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

PROJECT = Path(__file__).resolve().parent.parent
if not __package__:  # run as a script
    sys.path.insert(0, str(PROJECT))

from tplayout.admin.bundle import read_members  # noqa: E402
from tplayout.admin.local_files import ReadFile  # noqa: E402
from tplayout.admin.shard_files import Rank, ShardHeader, ranks_of, read_shard_header, shard_head  # noqa: E402
from tplayout.cache.codec import Gcm, Zstd  # noqa: E402
from tplayout.errors import FormatError, GeometryError  # noqa: E402
from tplayout.format.chunk import seal, verify  # noqa: E402
from tplayout.format.digest import CellHasher, make_hasher  # noqa: E402
from tplayout.format.encrypted import check_stored, decrypt, encrypt  # noqa: E402
from tplayout.format.encrypted_layout import SALT_BYTES, encrypted_layout  # noqa: E402
from tplayout.format.encryption_key import EncryptionKey  # noqa: E402
from tplayout.format.geometry import Geometry, Group, Part  # noqa: E402
from tplayout.format.header import parse_header  # noqa: E402
from tplayout.format.identity import Identity, NamespaceDocument, StorageFacts, parse_namespace_document  # noqa: E402
from tplayout.format.keys import chain, object_name, parse_object_name  # noqa: E402
from tplayout.format.layout import chunk_layout, layout_of  # noqa: E402
from tplayout.format.packed import pack, packed_layout, unpack  # noqa: E402
from tplayout.staging.protocol import Load, ProtocolError, decode, encode  # noqa: E402

GROUPS = (
    Group("full", "full", (0, 2), 2, (Part("k", 4), Part("v", 4)), "BF16"),
    Group("window", "window", (1,), 2, (Part("k", 4), Part("v", 4)), "BF16", window=8),
)
IDENTITY = Identity("files:00", {"rope_theta": 1e4}, "bfloat16", None, Geometry(4, GROUPS))
HASHER = make_hasher("xxh3-128", None)
ZSTD = Zstd()
KEY = EncryptionKey(bytes(32))
PLANE = bytes(range(100)) * 40
(CHUNK,) = chain(IDENTITY.digest(), [1, 2, 3, 4], 4)

# What breaks parsers of JSON, of lengths and of paths.
WORDS = [
    *(
        b"{}",
        b"[]",
        b'"',
        b"\\u0000",
        b"\\ud800",
        b"null",
        b"true",
        b"-1",
        b"1e999",
        b"NaN",
        b"0x10",
        b"1.5",
        b" " * 64,
    ),
    *(b"9" * 400, b"[" * 5000, b'{"a":' * 2000, b"\xff\xfe", b"\x00", "é".encode(), b"__metadata__", b"data_offsets"),
    *(b"../../etc/passwd", b"/dev/zero", b"C:\\", b"a/../b", b"namespace.json", b"\x80\x00\x00\x00\x00\x00\x00\x00"),
    *((2**bits + step).to_bytes(8, "little") for bits in (20, 31, 32, 53, 63) for step in (-1, 0)),
]


@dataclass(frozen=True)
class Reader:
    """One way in. seeds: sound inputs; read: raises one of `errors` for others, or takes them.

    memory: bytes it may allocate at most for an input of n bytes.
    """

    name: str
    seeds: Sequence[bytes]
    read: Callable[[bytes], object]
    errors: tuple[type[Exception], ...] = (FormatError,)
    memory: Callable[[int], int] = lambda n: 2**22 + 64 * n


def _object() -> bytes:
    layout = chunk_layout(IDENTITY.geometry, 0, HASHER.name)
    buffer = bytearray(layout.nbytes)
    seal(buffer, layout, IDENTITY.digest(), CHUNK, HASHER)
    return bytes(buffer)


def _verify(data: bytes) -> None:
    layout = chunk_layout(IDENTITY.geometry, 0, HASHER.name)
    verify(data, layout, IDENTITY.digest(), CHUNK.key, HASHER)
    if data != _object():
        raise AssertionError("a changed object was accepted")


def _packed(hasher: CellHasher | None) -> Callable[[bytes], None]:
    """hasher None: as who lacks the secret, so that changed bytes get as far as the decompressor."""

    def read(data: bytes) -> None:
        layout = chunk_layout(IDENTITY.geometry, 0, HASHER.name)
        plain = unpack(data, packed_layout(layout), hasher, ZSTD)
        verify(plain, layout, IDENTITY.digest(), CHUNK.key, HASHER)
        if plain != _object() or (hasher is not None and data != _packed_object()):
            raise AssertionError("a changed object was accepted")

    return read


def _packed_object() -> bytes:
    layout = packed_layout(chunk_layout(IDENTITY.geometry, 0, HASHER.name))
    return bytes(pack(_object(), layout, HASHER, ZSTD))


def _encrypted(key: EncryptionKey | None) -> Callable[[bytes], None]:
    """key None: as who lacks it, and compares what is stored with its digests alone."""

    def read(data: bytes) -> None:
        layout = encrypted_layout(chunk_layout(IDENTITY.geometry, 0, HASHER.name), KEY.id)
        check_stored(data, layout, CHUNK.key, HASHER)
        if key is not None:
            plain = decrypt(data, layout, CHUNK.key, key, HASHER, Gcm)
            verify(plain, layout.plain, IDENTITY.digest(), CHUNK.key, HASHER)
        if data != _encrypted_object():
            raise AssertionError("a changed object was accepted")

    return read


def _encrypted_object() -> bytes:
    layout = encrypted_layout(chunk_layout(IDENTITY.geometry, 0, HASHER.name), KEY.id)
    return bytes(encrypt(_object(), layout, CHUNK.key, KEY, bytes(SALT_BYTES), HASHER, Gcm))


def _plane(data: bytes) -> None:
    ZSTD.expand(memoryview(data), len(PLANE))


def _shard_header(data: bytes) -> None:
    read_shard_header(parse_header(data, len(data)), "fuzz")


def _shard_seed(rank: Rank) -> bytes:
    header = ShardHeader(rank, IDENTITY.geometry, 4, IDENTITY, "m", {}, True)
    head = shard_head(header)
    return head.header.ljust(head.nbytes, b"\0")


def _bundle(data: bytes) -> None:
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with ReadFile(Path(file.name)) as opened:
            list(read_members(opened))


def _tar() -> bytes:
    import io
    import tarfile

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as tar:
        for name, data in ((f"{IDENTITY.namespace}/namespace.json", b"{}"), ("x", b"y" * 700)):
            info = tarfile.TarInfo(name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return out.getvalue()


def _name(data: bytes) -> None:
    """A name that is taken must be a path below the store, and be the only spelling of what it means."""
    text = data.decode("utf-8", "replace")
    name = parse_object_name(text)
    if object_name(name.namespace, name.key, name.group_index) != text or ".." in text or text.startswith("/"):
        raise AssertionError(f"accepted as an object's name: {text!r}")


def readers() -> list[Reader]:
    """Every reader of foreign bytes."""
    document = NamespaceDocument(IDENTITY, StorageFacts("xxh3-128"), "model").to_bytes()
    layout = chunk_layout(IDENTITY.geometry, 0, HASHER.name)
    shards = [_shard_seed(rank) for rank in ranks_of(IDENTITY.geometry, 2, [range(3)])]
    load = encode(Load(1, 2, (0, 1), "ab" * 32)).strip()
    return [
        Reader("header", [layout.header], lambda data: layout_of(parse_header(data, layout.nbytes))),
        Reader("chunk", [_object()], _verify),
        Reader("packed", [_packed_object()], _packed(HASHER)),
        Reader("unpacked", [_packed_object()], _packed(None)),
        Reader("encrypted", [_encrypted_object()], _encrypted(KEY)),
        Reader("sealed", [_encrypted_object()], _encrypted(None)),
        Reader("plane", [ZSTD.compress(PLANE)], _plane),
        Reader("namespace", [document], lambda data: parse_namespace_document(data, IDENTITY.namespace)),
        Reader("name", [object_name(IDENTITY.namespace, CHUNK.key, 1).encode()], _name),
        Reader("shards", shards, _shard_header, (FormatError, GeometryError)),
        Reader("bundle", [_tar()], _bundle),
        Reader("message", [load], decode, (ProtocolError,)),
    ]


def mutated(data: bytes, chance: random.Random) -> bytes:
    """`data` with one to four changes: flipped, cut, doubled, moved and foreign bytes."""
    out = bytearray(data)
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(out) + 1)
        end = min(len(out), at + chance.choice((1, 1, 2, 8, 64, 700)))
        match chance.randrange(7):
            case 0:
                out[at:end] = bytes(byte ^ (1 << chance.randrange(8)) for byte in out[at:end])
            case 1:
                del out[at:end]
            case 2:
                out[at:at] = chance.choice(WORDS)
            case 3:
                word = chance.choice(WORDS)
                out[at : at + len(word)] = word
            case 4:
                out[at:at] = out[chance.randrange(len(out) + 1) :][: end - at]
            case 5:
                del out[at:]
            case 6:
                out[0:8] = chance.choice(WORDS)[:8].ljust(8, b"\0")
    return bytes(out)


def finding(reader: Reader, data: bytes, measure: bool) -> str | None:
    """What is wrong with how a reader takes `data`; None if nothing is. measure: look at memory too, which is slow."""
    if measure:
        tracemalloc.start()
    try:
        reader.read(data)
    except reader.errors:
        pass
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:300]}"
    finally:
        peak = tracemalloc.get_traced_memory()[1] if measure else 0
        tracemalloc.stop()
    allowed = reader.memory(len(data))
    return f"{peak} bytes allocated, {allowed} are allowed for {len(data)}" if peak > allowed else None


def run(reader: Reader, nbytes: int, seed: int) -> tuple[int, str | None]:
    """Rounds made until `nbytes` were read, and the finding that ended them earlier."""
    done = rounds = 0
    while done < nbytes:
        chance = random.Random(f"{seed} {rounds}")
        data = mutated(chance.choice(reader.seeds), chance)
        found = finding(reader, data, measure=rounds % 20 == 0)
        rounds += 1
        if found is not None:
            return rounds, found
        done += max(1, len(data))
    return rounds, None


def main(arguments: Sequence[str] | None = None) -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bytes", type=float, default=1e7, help="for each reader (default: 1e7)")
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--only", choices=[reader.name for reader in readers()], help="one reader")
    options = parser.parse_args(arguments)
    seed = random.SystemRandom().randrange(2**32) if options.seed is None else options.seed
    status = 0
    for reader in readers():
        if options.only not in (None, reader.name):
            continue
        rounds, found = run(reader, int(options.bytes), seed)
        print(f"{reader.name:10} {rounds:9} rounds, seed {seed}: {found or 'only typed errors'}")
        status |= found is not None
    return status


if __name__ == "__main__":
    sys.exit(main())
