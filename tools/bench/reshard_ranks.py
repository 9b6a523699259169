"""One rank of the resharding benchmark: TP=4 saves and TP=2 loads, through the staging pool and through
torch.distributed.checkpoint in turn. Rank 0 is the scheduler too, and writes times.json.

Ours is what a server does: ranks fill their heads of slots and mark them, an I/O process digests and publishes; to load
it fetches and verifies, and ranks copy their heads out. Theirs writes and reads one file a rank, without fsync.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as checkpoint
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from bench.measure import Shape
from bench.objects import identity
from tplayout.format.keys import ChunkId, chain
from tplayout.staging.region import Region
from tplayout.staging.stager import SlotRef, Stager, StagingPlan
from tplayout_vllm.pages import Canonical, canonical_view

WRITERS, READERS = 4, 2


def heads_of(rank: int, shape: Shape, chunks: int) -> list[torch.Tensor]:
    """A TP=4 rank's heads of each chunk: [heads, layers, 2, tokens, dim]."""
    random = torch.Generator().manual_seed(rank)
    size = (shape.heads // WRITERS, shape.layers, 2, shape.tokens, shape.dim)
    return [torch.randint(-(2**15), 2**15, size, dtype=torch.int16, generator=random) for _ in range(chunks)]


class Ours:
    """The staging pool as the ranks of two servers use it."""

    def __init__(self, rank: int, shape: Shape, chunks: int, directory: Path, readers: Any) -> None:
        """Rank 0 makes the pool, the others map it. readers: the group of the ranks that load."""
        self.rank, self.shape, self.chunks, self.readers = rank, shape, chunks, readers
        self.identity = identity(shape)
        self.plan = StagingPlan(
            url=f"file://{directory / 'ours'}",
            namespace=self.identity.digest(),
            geometry=self.identity.geometry,
            slots=2 * chunks,
            writers=(WRITERS,),
            io_processes=1,
            load_deadline_s=60.0,
        )
        self.stager = Stager(self.plan) if rank == 0 else None
        (ref,) = self._tell([self.stager and self.stager.region_ref])
        self.region = self.stager.region if self.stager else Region.attach(ref)

    def _tell(self, values: list[Any], group: Any = None) -> list[Any]:
        """What rank 0 says."""
        dist.broadcast_object_list(values, 0, group)
        return values

    def _prompt(self, number: int) -> list[ChunkId]:
        """The chunks of a round: of tokens that no other round has."""
        size = self.chunks * self.shape.tokens
        return chain(self.plan.namespace, range(number * size, (number + 1) * size), self.shape.tokens)

    def _cells(self, ref: SlotRef, ranks: int) -> torch.Tensor:
        """This rank's heads of a slot, of so many ranks."""
        (layout,) = self.plan.layouts
        heads = self.shape.heads // ranks
        slot = torch.frombuffer(self.region.slot(ref.slot, 0), dtype=torch.uint8)
        sizes, dims = (heads, self.shape.layers, self.shape.tokens), (self.shape.dim, self.shape.dim)
        offset = layout.kv_offset(self.rank * heads)
        cells: Canonical = canonical_view(slot, offset, layout.section_bytes, 2, sizes, dims)
        return cells.block

    def save(self, number: int, tensors: list[torch.Tensor]) -> None:
        """Until everything is published."""
        refs: list[Any] = [None] * self.chunks
        if self.stager:
            refs = [self.stager.begin_save(chunk) for chunk in self._prompt(number)]
        for ref, tensor in zip(self._tell(refs), tensors, strict=True):
            self._cells(ref, WRITERS).copy_(tensor)
            self.region.mark(ref.slot, 0, self.rank, ref.generation)
        while self.stager and self.stager.busy:
            self.stager.wait(0.001)

    def load(self, number: int, tensors: list[torch.Tensor]) -> None:
        """Until the reading ranks have their heads. Staging must not hold the chunks (`settle`)."""
        if self.rank >= READERS:
            return
        refs: list[Any] = [None] * self.chunks
        if self.stager:
            self.stager.start_lookup("bench", self._prompt(number))
            while not self.stager.lookup("bench").done:
                self.stager.wait(1.0)
            refs = list(self.stager.claim("bench", 0, self.chunks))
        for ref, tensor in zip(self._tell(refs, self.readers), tensors, strict=True):
            tensor.copy_(self._cells(ref, READERS))

    def settle(self) -> None:
        """Let go of all slots, and forget what they hold."""
        if self.stager:
            self.stager.release("bench")
            self.stager.reset()

    def close(self) -> None:
        """End the I/O process."""
        if self.stager:
            self.stager.close()


class Theirs:
    """torch.distributed.checkpoint with one tensor a chunk, split by heads."""

    def __init__(self, rank: int, directory: Path, readers: Any) -> None:
        self.rank, self.directory, self.readers = rank, directory, readers
        self.saving = DeviceMesh("cpu", list(range(WRITERS)))
        self.loading = DeviceMesh("cpu", list(range(READERS)))

    def _path(self, number: int) -> Path:
        return self.directory / f"theirs-{number}"

    def _state(self, tensors: list[torch.Tensor], mesh: DeviceMesh) -> dict[str, Any]:
        split = [Shard(0)]
        return {str(i): DTensor.from_local(tensor, mesh, split, run_check=False) for i, tensor in enumerate(tensors)}

    def save(self, number: int, tensors: list[torch.Tensor]) -> None:
        """On all ranks."""
        writer = checkpoint.FileSystemWriter(self._path(number), sync_files=False)
        checkpoint.save(self._state(tensors, self.saving), storage_writer=writer)

    def load(self, number: int, tensors: list[torch.Tensor]) -> None:
        """Into the tensors of the reading ranks."""
        if self.rank < READERS:
            reader = checkpoint.FileSystemReader(self._path(number))
            state = self._state(tensors, self.loading)
            checkpoint.load(state, storage_reader=reader, process_group=self.readers)

    def settle(self) -> None:
        """Nothing is kept in memory."""


def timed(work: Callable[[], None]) -> float:
    """Seconds until all ranks have done it."""
    dist.barrier()
    start = time.perf_counter()
    work()
    dist.barrier()
    return time.perf_counter() - start


def measure(rank: int, directory: Path, shape: Shape, chunks: int, rounds: int) -> None:
    """Rounds of both sides in turn, and one before them that does not count."""
    readers = dist.new_group(list(range(READERS)))
    ours = Ours(rank, shape, chunks, directory, readers)
    sides: list[Ours | Theirs] = [ours, Theirs(rank, directory, readers)]
    saved = heads_of(rank, shape, chunks)
    times: dict[str, tuple[list[float], list[float]]] = {"save": ([], []), "load": ([], [])}
    for number in range(rounds + 1):
        for index in (0, 1) if number % 2 else (1, 0):
            side = sides[index]
            loaded = [torch.zeros((shape.heads // READERS, *tensor.shape[1:]), dtype=torch.int16) for tensor in saved]
            save = timed(partial(side.save, number, saved))
            side.settle()
            load = timed(partial(side.load, number, loaded))
            side.settle()
            if number:
                times["save"][index].append(save)
                times["load"][index].append(load)
            _check(rank, shape, chunks, loaded)
        dist.barrier()
        if rank == 0:
            shutil.rmtree(directory / f"theirs-{number}")
    ours.close()
    if rank == 0:
        (directory / "times.json").write_text(json.dumps(times))


def _check(rank: int, shape: Shape, chunks: int, loaded: list[torch.Tensor]) -> None:
    """Raise RuntimeError if a reading rank has anything but its heads."""
    if rank >= READERS:
        return
    each = WRITERS // READERS
    parts = [heads_of(writer, shape, chunks) for writer in range(rank * each, (rank + 1) * each)]
    for tensor, heads in zip(loaded, zip(*parts, strict=True), strict=True):
        if not torch.equal(tensor, torch.cat(heads)):
            raise RuntimeError("what was loaded is not what was saved")


def main(directory: str, task: str, rank: str) -> None:
    """As bench/reshard.py calls it."""
    about = json.loads(task)
    torch.set_num_threads(1)
    place = Path(directory)
    dist.init_process_group("gloo", init_method=f"file://{place / 'meet'}", rank=int(rank), world_size=WRITERS)
    try:
        measure(int(rank), place, Shape(*about["shape"]), about["chunks"], about["rounds"])
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
