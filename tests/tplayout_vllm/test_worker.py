"""One rank's copies: what it writes, marks and reports, and that no failure of it leaves the worker."""

import copy
import logging
import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from sim_config import Setup, report
from sim_model import DelayedCopies, Rank, SimModel, Text, layer_name

from tplayout.format.layout import chunk_layout
from tplayout.staging.region import Region, RegionPlan
from tplayout_vllm.metadata import AdapterRef, ChunkCopy, StagingRef, StepMetadata, Transfer, WorkerNews, WorkerReport
from tplayout_vllm.placement import Placement, place

MODEL = SimModel((None, 64), heads=4)
CHUNK = 64
TABLES = ([3, 5, 2], [1, 4, 6])


class Machine:
    """All ranks of one engine and a region for them, without a Stager."""

    def __init__(self, tp: int) -> None:
        setup = Setup(model=MODEL, tp=tp)
        self.ranks = [Rank(MODEL, (tp, rank), 32, 32, 8, "column") for rank in range(tp)]
        reports = {(0, number): report(setup, rank) for number, rank in enumerate(self.ranks)}
        self.placement: Placement = place(reports, CHUNK, MODEL.heads, tp)
        self.layouts = [chunk_layout(self.placement.geometry, group, "xxh3-128") for group in range(2)]
        self.writers = tuple(map(len, self.placement.writers))
        self.region = self.new_region()
        self.text = Text(range(10, 20))

    def new_region(self) -> Region:
        return Region.create(RegionPlan(3, tuple(layout.nbytes for layout in self.layouts), self.writers))

    def ref(self, region: Region | None = None) -> StagingRef:
        places, writers = self.placement.places, self.placement.writers
        ref = (region or self.region).ref
        return StagingRef(ref, self.placement.geometry, "xxh3-128", None, places, writers)

    def compute(self, tokens: int) -> None:
        for rank in self.ranks:
            for layer in range(2):
                rank.write(layer, TABLES[MODEL.table_of(layer)], 0, self.text.history(0, tokens))

    def heads(self, slot: int, layer: int) -> list[torch.Tensor]:
        """A chunk in the region: of each head a view, int32 [2, tokens, dim]."""
        group, position = self.placement.places[layer_name(layer)]
        view, layout = self.region.slot(slot, group), self.layouts[group]
        spans = [layout.cell_range(head, position) for head in range(MODEL.heads)]
        return [torch.frombuffer(view[s.start : s.stop], dtype=torch.int32).view(2, CHUNK, -1) for s in spans]

    def cells(self, slot: int, layer: int) -> torch.Tensor:
        """int32 [tokens, heads, 2, dim] of a chunk in the region."""
        return torch.stack(self.heads(slot, layer)).permute(2, 0, 1, 3)

    def wanted(self, layer: int, first: int = 0, last: int = CHUNK) -> torch.Tensor:
        return MODEL.kv(layer, range(MODEL.heads), self.text.history(first, last))


def step(kind: str, ref: StagingRef | None, *copies: ChunkCopy, request: str = "r") -> StepMetadata:
    return StepMetadata(ref, **{kind: [Transfer(request, TABLES, copies)]})


@pytest.mark.parametrize("tp", [1, 2, 4, 8])
def test_ranks_fill_and_mark_an_object_together(tp: int) -> None:
    machine = Machine(tp)
    machine.compute(CHUNK)
    for number, rank in enumerate(machine.ranks):
        assert number > 3 or not machine.region.marked(1, 0, 7)
        rank.side.save(step("saves", machine.ref(), ChunkCopy(1, 7, 0, 0, CHUNK, (0, 1))))
    for layer in range(2):
        assert machine.region.marked(1, layer, 7)
        assert torch.equal(machine.cells(1, layer), machine.wanted(layer))
    moved = sum(rank.side.take_counters().get("save_copy_bytes", 0) for rank in machine.ranks)
    assert moved == 2 * machine.wanted(0).numel() * 4  # of replicas one writes


def test_only_the_named_groups_are_copied_and_marked() -> None:
    machine = Machine(2)
    machine.compute(CHUNK)
    for rank in machine.ranks:
        rank.side.save(step("saves", machine.ref(), ChunkCopy(0, 3, 0, 0, CHUNK, (1,))))
    assert machine.region.marked(0, 1, 3)
    assert not machine.region.settled(0, 0, 3)
    assert int(machine.cells(0, 0).abs().sum()) == 0


@pytest.mark.parametrize("tp", [1, 4, 8])
def test_what_is_loaded_lies_where_the_tables_say(tp: int) -> None:
    """Tokens 70 to 99 of a request, from its second chunk; all others keep what they hold."""
    machine = Machine(tp)
    for layer in range(2):
        for view, cells in zip(
            machine.heads(2, layer), machine.wanted(layer, CHUNK, 2 * CHUNK).permute(1, 2, 0, 3), strict=True
        ):
            view.copy_(cells)
    blocks = [block for block in range(8) if block not in {*TABLES[0], *TABLES[1]}]
    for rank in machine.ranks:
        rank.side.load(step("loads", machine.ref(), ChunkCopy(2, 1, CHUNK, 70, 96, (0, 1))))
        assert rank.side.take_results() == ({"r"}, set())
        assert rank.side.take_results() == (set(), set())
        for layer in range(2):
            found = rank.read(layer, TABLES[MODEL.table_of(layer)], 0, 96)
            assert torch.equal(found[70:], MODEL.kv(layer, rank.heads, machine.text.history(70, 96)))
            assert len(found[:70].unique()) == 1  # poison
        assert rank.changed(blocks) == []  # as they were made


def test_a_load_ends_when_its_copies_have() -> None:
    machine = Machine(1)
    side = machine.ranks[0].side
    side._copies = copies = DelayedCopies()
    side.load(step("loads", machine.ref(), ChunkCopy(0, 1, 0, 0, CHUNK, (0, 1))))
    assert side.take_results() == (set(), set())
    copies.flush()
    assert side.take_results() == ({"r"}, set())


def test_failures_are_reported_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(1)
    side = machine.ranks[0].side
    gone = copy.copy(machine.ref())
    object.__setattr__(gone, "region", gone.region.__class__(gone.region.pid, 999_999, gone.region.nbytes, "x"))
    logger = logging.getLogger("vllm.tplayout")
    logger.addHandler(caplog.handler)
    try:
        side.load(step("loads", gone, ChunkCopy(0, 1, 0, 0, CHUNK, (0,)), request="lost"))
        side.load(step("loads", None, ChunkCopy(0, 1, 0, 0, CHUNK, (0,)), request="nowhere"))
        side.save(step("saves", gone, ChunkCopy(0, 1, 0, 0, CHUNK, (0,)), request="kept"))
    finally:
        logger.removeHandler(caplog.handler)
    assert side.take_results() == ({"lost", "nowhere"}, {"lost", "nowhere"})
    for name in ("lost", "kept"):  # the second load is left out: one line a minute
        assert any(f"request {name} failed" in record.getMessage() for record in caplog.records)


def test_a_failed_save_gives_its_slots_back(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(1)
    machine.compute(CHUNK)
    side = machine.ranks[0].side
    copies = (ChunkCopy(0, 4, 0, 0, CHUNK, (0, 1)), ChunkCopy(1, 9, CHUNK, CHUNK, 10**6, (0, 1)))
    side.save(step("saves", machine.ref(), *copies))  # the second one is outside its chunk
    for slot, generation in ((0, 4), (1, 9)):
        assert machine.region.settled(slot, 0, generation)
        assert not machine.region.marked(slot, 0, generation)


class Watch:
    """A WeightWatch as the worker sees it. answers: of the looks, in turn."""

    def __init__(self, *answers: bool) -> None:
        self._answers, self.changed = list(answers), False

    def check(self) -> Callable[[], bool]:
        answer = self._answers.pop(0)
        self.changed |= not answer
        return lambda: answer


def test_when_weights_change_nothing_is_stored_or_used_any_more() -> None:
    machine = Machine(1)
    machine.compute(CHUNK)
    (rank,) = machine.ranks
    rank.side.register(rank.side._layers, Watch(True, False, False))
    rank.side.save(step("saves", machine.ref(), ChunkCopy(1, 7, 0, 0, CHUNK, (0, 1))))
    assert machine.region.marked(1, 0, 7)
    assert rank.side.take_news() is None
    rank.side.save(step("saves", machine.ref(), ChunkCopy(2, 8, 0, 0, CHUNK, (0, 1))))
    assert machine.region.settled(2, 0, 8)
    assert not machine.region.marked(2, 0, 8)
    assert rank.side.take_news() == WorkerNews(weights_changed=True)
    rank.side.load(step("loads", machine.ref(), ChunkCopy(1, 7, 0, 0, CHUNK, (0, 1))))
    assert rank.side.take_results() == ({"r"}, {"r"})
    rank.side.save(StepMetadata())  # without work there is no look


def unreachable(machine: Machine) -> StagingRef:
    """The region by a descriptor that the scheduler's process does not have."""
    ref = machine.ref()
    return replace(ref, region=replace(ref.region, fd=999_999))


def test_what_cannot_even_be_marked_is_told_to_the_scheduler() -> None:
    machine = Machine(1)
    machine.compute(CHUNK)
    side = machine.ranks[0].side
    side.save(step("saves", machine.ref(), ChunkCopy(0, 1, 0, 0, CHUNK, (0,))))
    assert side.take_news() is None
    lost = [ChunkCopy(slot, 2, 0, 0, CHUNK, (0, 1)) for slot in (0, 1, 2)]
    side.save(step("saves", unreachable(machine), *lost[:2]))
    side.save(step("saves", unreachable(machine), lost[2]))
    assert not any(machine.region.settled(slot, 0, 2) for slot in range(3))  # not in a region of before either
    assert side.take_news() == WorkerNews(given_up={(0, 0): tuple(lost)})
    assert side.take_news() is None
    side.save(step("saves", machine.ref(), ChunkCopy(1, 3, 0, 0, CHUNK, (0,))))
    assert machine.region.marked(1, 0, 3)


def test_a_rank_that_cannot_reach_the_region_says_so_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(1)
    side = machine.ranks[0].side
    logger = logging.getLogger("vllm.tplayout")
    logger.addHandler(caplog.handler)
    try:
        for _ in range(20):
            side.save(step("saves", unreachable(machine), ChunkCopy(0, 1, 0, 0, CHUNK, (0,))))
            side.load(step("loads", unreachable(machine), ChunkCopy(0, 1, 0, 0, CHUNK, (0,))))
    finally:
        logger.removeHandler(caplog.handler)
    assert len(set(map(id, caplog.records))) == 2
    assert "fd/999999 cannot be opened" in caplog.text


def test_a_rank_that_does_not_fit_the_region_leaves_no_mapping_behind() -> None:
    machine = Machine(1)
    side = machine.ranks[0].side
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(5):
        wrong = replace(machine.ref(), digest="no-such-digest")
        side.save(step("saves", wrong, ChunkCopy(0, 1, 0, 0, CHUNK, (0,))))
    assert len(os.listdir("/proc/self/fd")) == before


def test_news_of_several_ranks_add_up() -> None:
    copies = tuple(ChunkCopy(slot, 2, 0, 0, CHUNK, (0,)) for slot in range(3))
    first, second = WorkerNews(given_up={(0, 0): copies[:1]}), WorkerNews(given_up={(0, 1): copies[1:2]})
    both = first.aggregate(second).aggregate(WorkerNews(weights_changed=True))
    assert both == WorkerNews(True, {(0, 0): copies[:1], (0, 1): copies[1:2]})
    assert both.aggregate(WorkerNews(given_up={(0, 1): copies[2:]})).given_up[0, 1] == copies[1:]


def test_the_number_of_a_step_is_told_back_once_by_all_ranks() -> None:
    side = Machine(1).ranks[0].side
    assert side.take_news(7) == WorkerNews(timed=7)
    assert side.take_news() is None
    assert WorkerNews(timed=7).aggregate(WorkerNews(timed=7)) == WorkerNews(timed=7)
    assert WorkerNews().aggregate(WorkerNews(timed=7)) == WorkerNews(timed=7)


def test_a_new_region_is_taken_over() -> None:
    """The scheduler's process has started anew."""
    machine = Machine(1)
    machine.compute(CHUNK)
    side = machine.ranks[0].side
    side.save(step("saves", machine.ref(), ChunkCopy(0, 1, 0, 0, CHUNK, (0,))))
    other = machine.new_region()
    side.save(step("saves", machine.ref(other), ChunkCopy(0, 1, 0, 0, CHUNK, (0,))))
    assert other.marked(0, 0, 1)
    machine.region = other
    assert torch.equal(machine.cells(0, 0), machine.wanted(0))
    side.close()
    side.close()


def test_stages_of_a_pipeline_fill_an_object_together() -> None:
    """PP=2 with an uneven split, TP=2: each rank writes its heads of its layers, and what it loads are these."""
    model = SimModel((None, None, None), heads=4)
    setup = Setup(model=model, tp=2)
    stages = (range(2), range(2, 3))
    ranks, reports = {}, {}
    for stage, layers in enumerate(stages):
        for tp_rank in range(2):
            rank = Rank(model, (2, tp_rank), 32, 32, 8, "rows")
            rows = report(setup, rank).layers
            rank.side._pp_rank = stage
            rank.side.register([found for found in rank.side._layers if found.name in {rows[i].name for i in layers}])
            ranks[stage, tp_rank] = rank
            reports[stage, tp_rank] = WorkerReport(tuple(rows[i] for i in layers))
    placement = place(reports, CHUNK, model.heads, 2)
    layout = chunk_layout(placement.geometry, 0, "xxh3-128")
    region = Region.create(RegionPlan(2, (layout.nbytes,), (len(placement.writers[0]),)))
    ref = StagingRef(region.ref, placement.geometry, "xxh3-128", None, placement.places, placement.writers)
    text, tables = Text(range(5)), ([4, 2],)
    for (stage, _), rank in ranks.items():
        for layer in stages[stage]:
            rank.write(layer, tables[0], 0, text.history(0, CHUNK))
        assert not region.marked(1, 0, 5)
        rank.side.save(StepMetadata(ref, saves=[Transfer("r", tables, (ChunkCopy(1, 5, 0, 0, CHUNK, (0,)),))]))
    assert region.marked(1, 0, 5)
    for head in range(4):
        for layer in range(3):
            span = layout.cell_range(head, layer)
            cell = torch.frombuffer(region.slot(1, 0)[span.start : span.stop], dtype=torch.int32).view(2, CHUNK, -1)
            wanted = model.kv(layer, range(head, head + 1), text.history(0, CHUNK))[:, 0].permute(1, 0, 2)
            assert torch.equal(cell, wanted)
    for (stage, _), rank in ranks.items():
        rank.poison(range(8))
        rank.side.load(StepMetadata(ref, loads=[Transfer("r", ([6, 3],), (ChunkCopy(1, 5, 0, 0, CHUNK, (0,)),))]))
        for layer in range(3):
            found = rank.read(layer, [6, 3], 0, CHUNK)
            if layer in stages[stage]:
                assert torch.equal(found, model.kv(layer, rank.heads, text.history(0, CHUNK)))
            else:
                assert len(found.unique()) == 1


def test_caches_that_are_registered_again_end_the_copies_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after a sleep."""
    machine = Machine(1)
    side = machine.ranks[0].side
    side._copies = copies = DelayedCopies()
    side.load(step("loads", machine.ref(), ChunkCopy(0, 1, 0, 0, CHUNK, (0, 1))))
    side.register(side._layers)
    assert side.take_results() == ({"r"}, set())
    assert side._copies is not copies


class Adapters:
    """A watch that says what it is told to."""

    def __init__(self, agrees: bool, loaded: bool = True) -> None:
        self._agrees, self._loaded = agrees, loaded
        self.asked: list[AdapterRef] = []

    def agrees(self, adapter: AdapterRef) -> bool:
        self.asked.append(adapter)
        return self._agrees

    def loaded(self, adapter: AdapterRef) -> bool:
        return self._loaded


ADAPTER = AdapterRef(3, bytes(32))


def adapted(kind: str, ref: StagingRef, copy: ChunkCopy) -> StepMetadata:
    return StepMetadata(ref, **{kind: [Transfer("r", TABLES, (copy,), ADAPTER)]}, adapters=(ADAPTER,))


@pytest.mark.parametrize("agrees", [True, False])
def test_what_another_version_of_an_adapter_computed_is_not_stored(agrees: bool) -> None:
    machine = Machine(1)
    machine.compute(CHUNK)
    side = machine.ranks[0].side
    side._adapters = Adapters(agrees)
    side.save(adapted("saves", machine.ref(), ChunkCopy(1, 7, 0, 0, CHUNK, (0, 1))))
    assert machine.region.settled(1, 0, 7)
    assert machine.region.marked(1, 0, 7) is agrees


@pytest.mark.parametrize(
    ("agrees", "loaded", "failed"), [(True, True, set()), (False, True, {"r"}), (False, False, set())]
)
def test_nothing_is_loaded_into_a_request_of_another_version(agrees: bool, loaded: bool, failed: set[str]) -> None:
    machine = Machine(1)
    side = machine.ranks[0].side
    side._adapters = Adapters(agrees, loaded)
    side.load(adapted("loads", machine.ref(), ChunkCopy(2, 1, 0, 0, CHUNK, (0, 1))))
    assert side.take_results() == ({"r"}, failed)


def test_adapters_are_looked_at_from_the_first_step_on() -> None:
    side = Machine(1).ranks[0].side
    watch = side._adapters = Adapters(True)
    side.load(StepMetadata(adapters=(ADAPTER,)))
    assert watch.asked == [ADAPTER]


def test_an_adapter_that_cannot_be_looked_at_is_not_stored(caplog: pytest.LogCaptureFixture) -> None:
    machine = Machine(1)
    machine.compute(CHUNK)
    machine.ranks[0].side.save(adapted("saves", machine.ref(), ChunkCopy(1, 7, 0, 0, CHUNK, (0, 1))))
    assert not machine.region.marked(1, 0, 7)
    assert "LoRA adapter 3" in caplog.text
