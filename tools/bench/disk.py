"""Publishing to and fetching from local disk, against plain files in the same directory.

Nothing is flushed, and reads find the page cache warm.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from bench.measure import MIB, Row, Setting, Shape, Work, compare
from bench.objects import Objects
from tplayout.storage import open_store

IN_FLIGHT = 4
PUBLISH, FETCH = 0.9, 0.85


def disk_rows(setting: Setting, directory: Path) -> Iterator[Row]:
    """Chunks of both sizes, IN_FLIGHT at a time on both sides: without digests, then with them."""
    for shape, count in ((setting.chunk, setting.objects), (setting.large, setting.large_objects)):
        yield from _rows(shape, count, setting, directory)


def _rows(shape: Shape, count: int, setting: Setting, directory: Path) -> Iterator[Row]:
    objects = Objects(shape, count)
    size = f"{shape.nbytes / MIB:.2g} MiB"
    plain = directory / f"plain-{shape.nbytes}"
    plain.mkdir()
    with open_store(directory / f"local-{shape.nbytes}") as store, ThreadPoolExecutor(IN_FLIGHT) as pool:

        def all_of(*steps: Callable[[int], object]) -> Work:
            return lambda: objects.each(lambda index: [step(index) for step in steps], pool)

        def put(index: int) -> None:
            objects.put(store, index)

        def get(index: int) -> None:
            objects.get(store, index)

        write = {"write + rename": all_of(lambda index: write_file(plain, index, objects.buffers[index]))}
        read = {"readinto": all_of(lambda index: read_file(plain, index, objects.buffers[index]))}
        yield compare(f"publish {size} chunks, local disk", all_of(put), write, setting, target=PUBLISH)
        yield compare(f"fetch {size} chunks, local disk", all_of(get), read, setting, target=FETCH)
        yield compare(f"seal and publish {size} chunks, local disk", all_of(objects.seal, put), write, setting)
        yield compare(f"fetch and verify {size} chunks, local disk", all_of(get, objects.verify), read, setting)
    _remove(directory / f"local-{shape.nbytes}", plain)


def _remove(*directories: Path) -> None:
    for directory in directories:
        shutil.rmtree(directory)


def write_file(directory: Path, number: int, buffer: memoryview) -> None:
    """To a new file, which is then renamed to replace the one before."""
    temporary = directory / f"{number}.tmp"
    with temporary.open("xb", buffering=0) as file:
        done = 0
        while done < len(buffer):
            done += file.write(buffer[done:])
    temporary.rename(directory / str(number))


def read_file(directory: Path, number: int, buffer: memoryview) -> None:
    """A file into its buffer."""
    with (directory / str(number)).open("rb", buffering=0) as file:
        done = 0
        while done < len(buffer):
            done += file.readinto(buffer[done:]) or 0
