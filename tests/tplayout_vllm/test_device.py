"""Copies through a device buffer and a stream of their own, with an accelerator that is made up: the host's memory.

No GPU is needed: what is checked is that the bytes are right, that nothing is announced before its copy has ended,
and that the order on the streams is asked for.
"""

import contextlib
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from sim_store import Sim

from tplayout_vllm.device import SAVE_BUFFERS, HostCopies, StreamCopies, copies_for
from tplayout_vllm.pages import Canonical, LayerPages, Run, group_runs
from tplayout_vllm.probe import PageLayout, PartLayout

CPU = torch.device("cpu")
HEADS, LAYERS, TOKENS, DIM, BLOCKS = 2, 3, 4, 8, 6


class Stream:
    """Work runs at once; `log` is what waited for what."""

    def __init__(self, module: "Accelerator", name: str) -> None:
        self._module, self._name = module, name

    def wait_stream(self, other: "Stream") -> None:
        self._module.log.append(f"{self._name} waits for {other._name}")

    def wait_event(self, event: "Event") -> None:
        self._module.log.append(f"{self._name} waits for an event on {event.stream}")


class Event:
    """Ends when the accelerator says so."""

    def __init__(self, module: "Accelerator") -> None:
        self._module = module

    def record(self, stream: Stream) -> None:
        self.stream = stream._name
        self._module.log.append(f"event on {stream._name}")

    def synchronize(self) -> None:
        if not self._module.running.wait(10):
            raise TimeoutError
        if self._module.broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")


class Accelerator:
    """Stands for `torch.cuda`. Its events end while `running` is set."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.broken = False
        self.running = threading.Event()
        self.running.set()
        self._engine = Stream(self, "engine")

    def Stream(self, device: torch.device) -> Stream:
        return Stream(self, "ours")

    def Event(self) -> Event:
        return Event(self)

    def current_stream(self, device: torch.device) -> Stream:
        return self._engine

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        self.log.append("copy on ours")
        yield


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Accelerator:
    module = Accelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    return module


@pytest.fixture
def copies(accelerator: Accelerator) -> Iterator[StreamCopies]:
    copies = StreamCopies(CPU)
    yield copies
    accelerator.running.set()
    copies.close()
    assert not copies._thread.is_alive()


def pages() -> Run:
    """Rows of one allocation: [block][part][token][head][dim]."""
    size = TOKENS * HEADS * DIM
    parts = tuple(PartLayout((TOKENS, HEADS, DIM), part * size, (HEADS * DIM, DIM, 1)) for part in range(2))
    layout = PageLayout(TOKENS, 2 * size, parts)
    memory = torch.zeros((LAYERS, BLOCKS, 2 * size), dtype=torch.float32)
    (run,) = group_runs([LayerPages(f"l{i}", 0, 0, i, memory[i], layout, 1) for i in range(LAYERS)])
    return run


def cells(first: int, last: int, chunk: int = 3 * TOKENS) -> Canonical:
    """A view of a slot that holds more tokens than are copied."""
    slot = torch.zeros((HEADS, LAYERS, 2, chunk, DIM), dtype=torch.int32)
    return Canonical(slot, (DIM, DIM)).narrow(range(LAYERS), first, last)


@pytest.mark.parametrize(("first", "last"), [(0, 12), (1, 3), (3, 9), (5, 12), (4, 4)])
def test_bytes_are_those_of_host_copies(copies: StreamCopies, first: int, last: int) -> None:
    table = [4, 2, 5]
    source, target, reference = pages(), pages(), pages()
    wanted, got = cells(first, last), cells(first, last)
    for layer in source._owners:
        layer.view(torch.int32).random_(generator=torch.Generator().manual_seed(first))
    HostCopies().save(source, table, first, last, wanted)
    copies.save(source, table, first, last, got)
    assert torch.equal(got.block, wanted.block)
    copies.load(target, table, first, last, got)
    HostCopies().load(reference, table, first, last, wanted)
    for mine, other in zip(target._owners, reference._owners, strict=True):
        assert torch.equal(mine.view(torch.int32), other.view(torch.int32))


def test_copies_wait_for_the_engine_and_actions_for_the_copies(copies: StreamCopies, accelerator: Accelerator) -> None:
    done: list[str] = []
    ended = threading.Event()
    accelerator.running.clear()
    copies.save(pages(), [0, 1, 2], 0, 12, cells(0, 12))
    copies.after(lambda: done.append("saved"))
    copies.load(pages(), [0, 1, 2], 0, 12, cells(0, 12))
    copies.after(lambda: done.append("loaded"))
    copies.after(ended.set)
    behind = ["ours waits for engine", "copy on ours", "event on ours", "event on ours"]
    assert accelerator.log == [*behind, *behind, "event on ours"]
    assert not ended.wait(0.05)
    assert done == []
    accelerator.running.set()
    assert ended.wait(10)
    assert done == ["saved", "loaded"]


def test_many_copies_at_once_take_no_more_of_the_devices_memory(
    copies: StreamCopies, accelerator: Accelerator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine waits for a buffer on the device; loads wait on our own stream."""
    taken: list[int] = []
    empty = torch.empty

    def counted(size: Any, **more: Any) -> torch.Tensor:
        taken.append(size)
        return empty(size, **more)

    monkeypatch.setattr(torch, "empty", counted)
    for _ in range(SAVE_BUFFERS + 2):
        copies.save(pages(), [0, 1, 2], 0, 12, cells(0, 12))
        copies.load(pages(), [0, 1, 2], 0, 12, cells(0, 12))
    assert taken == [cells(0, 12).nbytes] * (SAVE_BUFFERS + 1)
    assert accelerator.log.count("engine waits for an event on ours") == 2
    assert accelerator.log.count("ours waits for an event on ours") == SAVE_BUFFERS + 1


def test_a_buffer_grows_with_what_goes_through_it(copies: StreamCopies) -> None:
    for last in (4, 12, 4):
        source, got, wanted = pages(), cells(0, last), cells(0, last)
        source._owners[0].view(torch.int32).random_(generator=torch.Generator().manual_seed(last))
        HostCopies().save(source, [4, 2, 5], 0, last, wanted)
        copies.save(source, [4, 2, 5], 0, last, got)
        assert torch.equal(got.block, wanted.block)


def test_a_failing_action_does_not_end_the_others(copies: StreamCopies) -> None:
    ended = threading.Event()
    copies.after(lambda: 1 // 0)
    copies.after(ended.set)
    assert ended.wait(10)


def test_an_error_of_the_device_is_told_from_the_end_of_a_copy(copies: StreamCopies, accelerator: Accelerator) -> None:
    done: list[str] = []
    ended = threading.Event()
    accelerator.broken = True
    copies.after(lambda: done.append("loaded"), lambda: done.append("failed"))
    copies.after(ended.set)
    assert ended.wait(10)
    assert done == ["failed"]


def test_an_end_that_cannot_be_noted_is_a_failure(copies: StreamCopies) -> None:
    """A request that waits for it must not wait for ever."""
    done: list[str] = []
    ended = threading.Event()
    copies.after(lambda: 1 // 0, lambda: done.append("failed"))
    copies.after(ended.set)
    assert ended.wait(10)
    assert done == ["failed"]


def test_closing_waits_for_what_is_in_flight(copies: StreamCopies, accelerator: Accelerator) -> None:
    done: list[int] = []
    accelerator.running.clear()
    copies.after(lambda: done.append(1))
    threading.Timer(0.1, accelerator.running.set).start()
    copies.close()
    assert done == [1]


def test_memory_that_cannot_be_page_locked_is_used_as_it_is(
    copies: StreamCopies, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_cuda() -> Any:
        raise AssertionError("Torch not compiled with CUDA enabled")

    monkeypatch.setattr(torch.cuda, "cudart", no_cuda)
    region = torch.zeros(8192, dtype=torch.uint8)
    copies.pin(region)
    assert copies._pinned is region


def test_page_locking_asks_for_the_whole_region(copies: StreamCopies, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    class Runtime:
        @staticmethod
        def cudaHostRegister(address: int, size: int, flags: int) -> int:
            asked.append((address, size, flags))
            return 0

    monkeypatch.setattr(torch.cuda, "cudart", Runtime)
    region = torch.zeros(8192, dtype=torch.uint8)
    copies.pin(region)
    assert asked == [(region.data_ptr(), 8192, 0)]


def test_pages_on_the_host_need_no_stream() -> None:
    assert isinstance(copies_for(CPU), HostCopies)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_an_engine_on_the_accelerator(sim: Sim, accelerator: Accelerator, asynchronous: bool) -> None:
    """Both ways through the connector, with marks and results that come from the copies' thread."""
    text = sim.text(1)
    for tp in (2, 4):
        engine = sim.engine(tp=tp, asynchronous=asynchronous)
        for rank in engine.ranks:
            rank.side._copies = StreamCopies(CPU)
        name = engine.run(text, 300, 20)
        assert engine.loaded(name) == (0 if tp == 2 else 256)
    assert sim.check_store() == 4
