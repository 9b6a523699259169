"""tools/cost_model.py: docs/cost-model.md holds what it computes, and it counts what the connector's code does."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

import cost_model
import cost_model_report as report
from cost_model import DEFAULT, MODELS, TP_SIZES, TRAFFIC, TUNED, Model, RankWork, gets, rank_work
from scripted_s3 import ScriptedS3

from tplayout.format.sharding import head_range
from tplayout.storage import open_store, s3
from tplayout_vllm.device import StreamCopies
from tplayout_vllm.pages import Canonical, LayerPages, Run, canonical_view, group_runs
from tplayout_vllm.probe import PageLayout, PartLayout

ROOT = Path(__file__).resolve().parents[2]
LLAMA_8B, LLAMA_70B, DEEPSEEK = MODELS
CPU = torch.device("cpu")
DOCUMENT = ROOT / "docs" / "cost-model.md"


# -- the document ----------------------------------------------------------------------------------------------------


def test_the_document_holds_what_the_script_computes() -> None:
    text = DOCUMENT.read_text()
    assert report.replaced(text, report.tables()) == text, "run: python tools/cost_model.py --write"


def test_its_plots_are_there_and_small() -> None:
    plots = re.findall(r"!\[.*?\]\((.*?)\)", DOCUMENT.read_text())
    assert sorted(plots) == sorted(path.name for path in DOCUMENT.parent.glob("*.png"))
    for plot in plots:
        assert 1_000 < (DOCUMENT.parent / plot).stat().st_size < 60_000


def test_a_table_without_a_place_is_an_error() -> None:
    text = "a\n<!-- one: written by tools/cost_model.py -->\nold\n<!-- end -->\nb\n"
    assert report.replaced(text, {"one": "new\n"}) == text.replace("old", "new")
    with pytest.raises(ValueError, match=r"has places for \['one'\], the tables are \['one', 'two'\]"):
        report.replaced(text, {"one": "", "two": ""})


def test_it_prints_the_tables(capsys: pytest.CaptureFixture[str]) -> None:
    assert cost_model.main([]) == 0
    printed = capsys.readouterr().out
    assert all(table in printed for table in report.tables().values())


def test_plots_can_be_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="NOT TESTED: drawing docs/*.png, which needs tplayout[dev]: no matplotlib")
    report.plot_reload(tmp_path / "reload.png")
    report.plot_fleet(tmp_path / "fleet.png")
    assert all(1_000 < file.stat().st_size < 60_000 for file in tmp_path.iterdir())


# -- what the code does with a chunk on a device ---------------------------------------------------------------------


class Accelerator:
    """Stands for `torch.cuda`. waits: events, of which a stream that is ordered behind another takes one too."""

    def __init__(self) -> None:
        self.waits = 0

    def Stream(self, device: torch.device) -> Accelerator:
        return self

    def current_stream(self, device: torch.device) -> Accelerator:
        return self

    def Event(self) -> Accelerator:
        return self

    def record(self, stream: Accelerator) -> None:
        self.waits += 1

    def wait_stream(self, other: Accelerator) -> None:
        self.waits += 1

    @contextlib.contextmanager
    def stream(self, stream: Accelerator) -> Iterator[None]:
        yield


class Counted(TorchDispatchMode):
    """Counts copies instead of making them: those that touch the slot cross the bus, those on pages are kernels."""

    def __init__(self, slot: torch.Tensor, pages: torch.Tensor) -> None:
        super().__init__()
        self._places = {slot.untyped_storage().data_ptr(): "bus", pages.untyped_storage().data_ptr(): "kernel"}
        self.copies: dict[str, list[int]] = {"bus": [], "kernel": []}
        self.contiguous = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.aten.copy_.default:
            return func(*args, **(kwargs or {}))
        (place,) = {self._places.get(tensor.untyped_storage().data_ptr()) for tensor in args[:2]} - {None}
        self.copies[place].append(args[0].numel() * args[0].element_size())
        if place == "bus":
            self.contiguous &= args[0].is_contiguous() and args[1].is_contiguous()
        return args[0]


def pages_of(model: Model, heads: int, block: int) -> tuple[Run, torch.Tensor]:
    """All layers of a rank in one allocation, as vLLM makes it: blocks of one chunk, tokens before heads."""
    dims = [part.dim for part in model.group.parts]
    row = heads * sum(dims)
    bases = [heads * sum(dims[:index]) for index in range(len(dims))]
    parts = tuple(PartLayout((block, heads, d), base, (row, d, 1)) for d, base in zip(dims, bases, strict=True))
    layers, blocks = len(model.group.layers), model.layout.chunk_tokens // block
    memory = torch.empty((layers, blocks, block, row), dtype=torch.bfloat16)  # never touched, so it takes no memory
    layout = PageLayout(block, block * row, parts)
    (run,) = group_runs([LayerPages(f"l{i}", 0, 0, i, memory[i], layout, 1) for i in range(layers)])
    return run, memory


def cells_of(model: Model, tp: int) -> tuple[Canonical, torch.Tensor]:
    """Rank 0's cells in a slot, as WorkerSide views them."""
    layout, group, heads = model.layout, model.group, head_range(model.group.heads, tp, 0)
    slot = torch.empty(layout.nbytes, dtype=torch.uint8)
    shape = (len(heads), len(group.layers), layout.chunk_tokens)
    dims = [part.dim for part in group.parts]
    section = layout.section_bytes if group.heads > 1 else 0
    return canonical_view(slot, layout.kv_offset(heads.start), section, group.element_bytes, shape, dims), slot


def done(monkeypatch: pytest.MonkeyPatch, verb: str, model: Model, tp: int, block: int, last: int) -> RankWork:
    """What the code does for tokens [0, last) of a chunk; part_copies are not looked at."""
    accelerator = Accelerator()
    monkeypatch.setattr(torch, "get_device_module", lambda device: accelerator)
    cells, slot = cells_of(model, tp)
    run, memory = pages_of(model, len(head_range(model.group.heads, tp, 0)), block)
    cells = cells.narrow(run.positions, 0, last)
    copies = StreamCopies(CPU)
    try:
        with Counted(slot, memory) as counted:
            getattr(copies, verb)(run, range(memory.shape[1]), 0, last, cells)
    finally:
        copies.close()
    assert counted.contiguous
    bus, kernels = counted.copies["bus"], counted.copies["kernel"]
    assert sum(bus) == sum(kernels) == cells.nbytes
    return RankWork(sum(bus), len(bus), max(bus), len(kernels), accelerator.waits, 0)


@pytest.mark.parametrize("verb", ["load", "save"])
@pytest.mark.parametrize("block", [16, 64])
@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_copies_and_kernels_of_a_chunk_are_those_of_the_code(
    monkeypatch: pytest.MonkeyPatch, model: Model, tp: int, block: int, verb: str
) -> None:
    assert done(monkeypatch, verb, model, tp, block, 256) == replace(rank_work(model, tp, block), part_copies=0)


@pytest.mark.parametrize("tp", TP_SIZES)
@pytest.mark.parametrize("model", MODELS, ids=lambda model: model.name)
def test_copies_of_a_partial_chunk_are_those_of_the_code(
    monkeypatch: pytest.MonkeyPatch, model: Model, tp: int
) -> None:
    assert done(monkeypatch, "load", model, tp, 16, 255).copies == rank_work(model, tp).part_copies


@pytest.mark.parametrize("nbytes", [1, 4096, 8192, 8193, 12288, 12289, 40960])
def test_requests_of_an_object_are_those_of_the_store(monkeypatch: pytest.MonkeyPatch, nbytes: int) -> None:
    monkeypatch.setattr(s3, "PART", 4096)
    monkeypatch.setattr(cost_model, "PART", 4096)
    name = "0" * 32 + "/aa/" + "aa" * 32 + ".0.safetensors"
    with ScriptedS3() as server, open_store("s3://bucket", server.options) as store:
        server.objects[f"/bucket/{name}"] = bytes(nbytes)
        assert store.get_into(name, memoryview(bytearray(nbytes))) == nbytes
    assert len(server.requests) == gets(nbytes)


# -- cases computed by hand ------------------------------------------------------------------------------------------


def test_a_chunk_of_llama_8b() -> None:
    work = rank_work(LLAMA_8B, 4)
    assert work.nbytes == 2 * 32 * 2 * 256 * 128 * 2  # heads, layers, parts, tokens, dim, bytes
    assert (work.copies, work.copy_bytes) == (2, 4 << 20)
    assert work.calls == 2 + 2 * 16 + 2 * 2
    assert LLAMA_8B.layout.nbytes == (32 << 20) + 40960  # header, tokens, and digests of 8 heads
    assert gets(LLAMA_8B.layout.nbytes) == 3


def test_replicas_load_but_do_not_save() -> None:
    assert [cost_model.savers(DEEPSEEK, tp) for tp in TP_SIZES] == [1, 1, 1, 1]
    assert [cost_model.savers(LLAMA_8B, tp) for tp in TP_SIZES] == [1, 2, 4, 8]
    assert rank_work(DEEPSEEK, 8).nbytes == 61 * 256 * (512 + 64) * 2


def test_the_device_is_limited_by_the_bus_or_by_launches() -> None:
    one, eight = rank_work(LLAMA_8B, 1), rank_work(LLAMA_8B, 8)
    assert cost_model.device_seconds(one, 16, DEFAULT) == pytest.approx(16 * (32 << 20) / 55e9)
    assert cost_model.device_seconds(eight, 16, DEFAULT) == pytest.approx((16 * (1 + 32 + 4) + 1) * 10e-6)


def test_staging_at_the_default_waits_for_streams() -> None:
    """16 objects at a time; 17 are two rounds."""
    one = 0.15 + (16 << 20) / 87.5e6 + LLAMA_8B.layout.nbytes / 50e9
    assert cost_model.staging_seconds(LLAMA_8B, 4096, DEFAULT) == pytest.approx(one)
    assert cost_model.staging_seconds(LLAMA_8B, 17 * 256, DEFAULT) == pytest.approx(2 * one)
    assert cost_model.staging_limit(LLAMA_8B, 4096, DEFAULT) == "streams"
    assert cost_model.tokens_in_time(LLAMA_8B, DEFAULT) == 8 * 16 * 256  # 3 s are 8 rounds of 0.34


def test_staging_with_many_processes_waits_for_the_network() -> None:
    assert cost_model.staging_limit(LLAMA_8B, 131072, TUNED) == "network"
    assert cost_model.staging_seconds(LLAMA_8B, 131072, TUNED) == pytest.approx(512 * LLAMA_8B.layout.nbytes / 11e9)
    slow = replace(TUNED, fetch=0.1e9)
    assert cost_model.staging_limit(LLAMA_8B, 131072, slow) == "I/O processes"


def test_prefill_has_a_linear_and_a_quadratic_part() -> None:
    wanted = 2 * 8.03e9 * 4096 + 4096**2 * 32 * 32 * 256
    assert cost_model.prefill_flops(LLAMA_8B, 4096) == pytest.approx(wanted)
    assert cost_model.prefill_seconds(LLAMA_8B, 4096, 2, DEFAULT) == pytest.approx(wanted / 989e12)


def test_break_even() -> None:
    """At this rate a reload takes as long as computing; where that is shorter than the first byte, none does."""
    bits = cost_model.break_even(LLAMA_70B, 16384, 8, DEFAULT)
    assert bits is not None
    nbytes, device = 64 * LLAMA_70B.layout.nbytes, cost_model.device_seconds(rank_work(LLAMA_70B, 8), 64, DEFAULT)
    reload = 0.15 + 8 * nbytes / bits + device
    assert reload == pytest.approx(cost_model.prefill_seconds(LLAMA_70B, 16384, 8, DEFAULT))
    assert cost_model.break_even(LLAMA_8B, 4096, 8, DEFAULT) is None


@pytest.mark.parametrize(("model", "tp"), [(LLAMA_70B, 8), (LLAMA_8B, 2)])
def test_where_reloading_begins_to_pay(model: Model, tp: int) -> None:
    tokens = cost_model.pays_from(model, tp, TUNED)
    assert tokens is not None

    def faster(n: int) -> bool:
        return cost_model.load_seconds(model, n, tp, TUNED) < cost_model.prefill_seconds(model, n, tp, TUNED)

    assert faster(tokens)
    assert faster(131072)
    assert not faster(tokens - 256)
    assert cost_model.pays_from(LLAMA_8B, 8, DEFAULT) is None


def test_which_models_fit() -> None:
    assert [cost_model.fits(LLAMA_70B, tp, DEFAULT) for tp in TP_SIZES] == [False, True, True, True]
    assert [cost_model.fits(DEEPSEEK, tp, DEFAULT) for tp in TP_SIZES] == [False, False, False, True]


def test_a_fleet() -> None:
    """64 chunks of 3 GETs, and 4 chunks stored: a HEAD and a PUT each."""
    load = cost_model.fleet_load(LLAMA_8B, 1000, TRAFFIC, DEFAULT)
    assert (load.gets, load.puts) == (196_000, 4_000)
    assert load.partitions == 36
    assert load.nbytes == pytest.approx(1000 * 68 * LLAMA_8B.layout.nbytes)
    writers = replace(TRAFFIC, reloaded=0, stored=16384)
    assert cost_model.fleet_load(DEEPSEEK, 1000, writers, DEFAULT).partitions == 19  # 64,000 PUT/s / 3,500


def test_dollars() -> None:
    cost = cost_model.token_cost(LLAMA_8B, 16384, DEFAULT)
    assert cost.reload == pytest.approx(1e6 / 256 * 3 * 0.0004 / 1000)
    assert cost.store == pytest.approx(1e6 / 256 * 0.0054 / 1000)
    assert cost.month == pytest.approx(1e6 / 256 * LLAMA_8B.layout.nbytes * 0.023 / 1e9)
    seconds = cost_model.prefill_seconds(LLAMA_8B, 16384, 1, DEFAULT) / 16384
    assert cost.compute == pytest.approx(1e6 * seconds * 63.296 / 8 / 3600)
    assert cost.reloads_a_month == pytest.approx(cost.month / (cost.compute - cost.reload))


def test_the_set_up_is_the_connectors_default() -> None:
    assert (DEFAULT.io_processes, DEFAULT.load_threads, DEFAULT.load_deadline) == (4, 4, 3.0)
