"""Where copies run: at once on the host's memory, or through a device buffer and a stream of their own.

Layer: below worker.py, above pages.py. Both ways have the same three verbs, so worker.py does not know devices.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tplayout_vllm.pages import Canonical, Run, gather, scatter

logger = logging.getLogger("vllm.tplayout")

SAVE_BUFFERS = 4  # chunks of a rank between the engine's stream and ours; the next one waits on the device


class HostCopies:
    """Pages in host memory: tokens move straight between page and slot, and a copy is over when it returns."""

    def save(self, run: Run, table: Sequence[int], first: int, last: int, out: Canonical) -> None:
        """Copy tokens [first, last) of the pages to `out`, a view of a slot."""
        gather(run, table, first, last, out)

    def load(self, run: Run, table: Sequence[int], first: int, last: int, src: Canonical) -> None:
        """Copy `src`, a view of a slot, to tokens [first, last) of the pages."""
        scatter(run, table, first, last, src)

    def after(self, action: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        """Run `action` once every copy so far has ended. `failed` is never needed: such a copy raises itself."""
        action()

    def pin(self, region: torch.Tensor) -> None:
        """Prepare the staging region for copies."""

    def close(self) -> None:
        """Wait for nothing."""


class _Buffer:
    """Device memory for one copy at a time. However many copies are queued, it stays as large as the largest.

    The engine has the rest of the device's memory, and what is allocated for each copy would be in use until it ends.
    """

    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._ended: Any = None

    def take(self, like: Canonical, stream: Any) -> Canonical:
        """Cells of that shape, contiguous, uninitialised. stream: on which they are used first, behind the last use."""
        block = like.block
        nbytes = block.numel() * block.element_size()
        if self._memory.numel() < nbytes:
            self._memory = torch.empty(nbytes, dtype=torch.uint8, device=self._device)
        elif self._ended is not None:
            stream.wait_event(self._ended)
        return Canonical(self._memory[:nbytes].view(block.dtype).view(block.shape), like.dims)

    def give_back(self, stream: Any) -> None:
        """Its use ends with what is queued on the stream."""
        self._ended = self._module.Event()
        self._ended.record(stream)


class StreamCopies:
    """Pages on an accelerator: one kernel permutes into a device buffer, few large copies cross the bus.

    Copies run on their own stream behind the forward pass that is queued already, and in front of nothing: a
    thread waits for their events and runs the actions. Copying is ordered: a page is read after the step that
    computed it and before a later step, which waits for the gather, can reuse it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._module: Any = torch.get_device_module(device)
        self._stream = self._module.Stream(device)
        self._saving = itertools.cycle([_Buffer(self._module, device) for _ in range(SAVE_BUFFERS)])
        self._loading = _Buffer(self._module, device)  # loads follow each other on our stream
        self._pinned: torch.Tensor | None = None
        self._pending: queue.SimpleQueue[tuple[Any, Callable[[], None], Callable[[], None] | None] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._finish, name="tplayout-copies", daemon=True)
        self._thread.start()

    def save(self, run: Run, table: Sequence[int], first: int, last: int, out: Canonical) -> None:
        """Permute on the engine's stream (so the next step waits), cross the bus on ours."""
        memory = next(self._saving)
        buffer = memory.take(out, self._module.current_stream(self._device))
        gather(run, table, first, last, buffer)
        with self._behind_engine(buffer):
            for host, device in zip(out.pieces(), buffer.pieces(out.depth), strict=True):
                host.copy_(device, non_blocking=True)
        memory.give_back(self._stream)

    def load(self, run: Run, table: Sequence[int], first: int, last: int, src: Canonical) -> None:
        """Cross the bus and permute on our stream, behind whatever the engine has queued on these pages."""
        buffer = self._loading.take(src, self._stream)
        with self._behind_engine(buffer):
            for host, device in zip(src.pieces(), buffer.pieces(src.depth), strict=True):
                device.copy_(host, non_blocking=True)
            scatter(run, table, first, last, buffer)
        self._loading.give_back(self._stream)

    def after(self, action: Callable[[], None], failed: Callable[[], None] | None = None) -> None:
        """Run `action` on a thread once every copy so far has ended, or `failed` if the device reports an error."""
        event = self._module.Event()
        event.record(self._stream)
        self._pending.put((event, action, failed))

    def pin(self, region: torch.Tensor) -> None:
        """Page-lock the staging region, so that copies are asynchronous; without it they are only slower."""
        self._pinned = region
        try:
            code = int(torch.cuda.cudart().cudaHostRegister(region.data_ptr(), region.numel(), 0))
        except (AttributeError, RuntimeError, AssertionError) as error:
            logger.warning("tplayout: staging is not page-locked (%s), copies are slower", error)
            return
        if code:
            logger.warning("tplayout: staging is not page-locked (CUDA error %d), copies are slower", code)

    def close(self) -> None:
        """Wait for the copies in flight."""
        self._pending.put(None)
        self._thread.join(timeout=10)

    @contextlib.contextmanager
    def _behind_engine(self, buffer: Canonical) -> Any:
        self._stream.wait_stream(self._module.current_stream(self._device))
        # The allocator must not give the buffer away while our stream uses it.
        if hasattr(buffer.block, "record_stream") and self._device.type != "cpu":
            buffer.block.record_stream(self._stream)
        with self._module.stream(self._stream):
            yield

    def _finish(self) -> None:
        while (item := self._pending.get()) is not None:
            event, action, failed = item
            try:
                event.synchronize()
                action()
            except Exception:
                logger.exception("tplayout: a copy between staging and device failed")
                self._note(failed or action)

    @staticmethod
    def _note(failed: Callable[[], None]) -> None:
        try:
            failed()
        except Exception:
            logger.exception("tplayout: the end of a copy could not be noted")


def copies_for(device: torch.device) -> HostCopies | StreamCopies:
    """The way of copying for pages on a device."""
    return HostCopies() if device.type == "cpu" else StreamCopies(device)
