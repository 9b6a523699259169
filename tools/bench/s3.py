"""Publishing to and fetching from S3, against the fastest bare client on the same server."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec

from ceph_server import CephServer, missing_programs
from s3_server import S3Account, S3Server

from bench.measure import MIB, Note, Result, Setting, Shape, Work, compare
from bench.objects import Objects
from bench.s3_clients import MISSING, clients
from tplayout.storage import open_store

IN_FLIGHT = 8
TARGET = 0.9


def s3_rows(setting: Setting) -> Iterator[Result]:
    """rclone, and Ceph's gateway where it is installed; chunks of 80 MiB only when everything is measured."""
    if find_spec("obstore") is None:
        yield Note(MISSING)
    sizes = [(setting.chunk, setting.objects)]
    sizes += [(setting.large, setting.large_objects)] if setting.everything else []
    with S3Server() as rclone:
        for shape, count in sizes:
            yield from _rows("rclone", rclone, shape, count, setting)
    if not setting.ceph:
        return
    if missing := missing_programs():
        yield Note(f"Ceph is not installed ({', '.join(missing)}), so S3 was measured on rclone alone: make setup-ceph")
        return
    with CephServer() as ceph:
        for shape, count in sizes:
            yield from _rows("Ceph", ceph, shape, count, setting)


def _rows(label: str, server: S3Account, shape: Shape, count: int, setting: Setting) -> Iterator[Result]:
    """All objects of one prompt, IN_FLIGHT requests at a time on every side."""
    objects = Objects(shape, count)
    size = f"{shape.nbytes / MIB:.2g} MiB"
    bare = clients(server, IN_FLIGHT)
    with (
        open_store(server.url, server.storage_options) as store,
        ThreadPoolExecutor(IN_FLIGHT) as pool,
    ):

        def each(call: Callable[[int], object]) -> Work:
            return lambda: objects.each(call, pool)

        puts = {
            name: each(lambda index, put=client.put: put(f"bare/{index}", objects.buffers[index]))  # type: ignore[misc]
            for name, client in bare.items()
        }
        gets = {
            name: each(lambda index, get=client.get: get(f"bare/{index}", objects.buffers[index]))  # type: ignore[misc]
            for name, client in bare.items()
        }
        ours = each(lambda index: objects.put(store, index))
        yield compare(f"publish {size} chunks, S3 ({label})", ours, puts, setting, target=TARGET)
        ours = each(lambda index: objects.get(store, index))
        yield compare(f"fetch {size} chunks, S3 ({label})", ours, gets, setting, target=TARGET)
