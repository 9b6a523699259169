"""What the scheduler's side decides, one call at a time; whole engines are in test_engine_*.py."""

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tplayout.format.geometry import Geometry, Group, Part
from tplayout.staging.lookups import LookupState
from tplayout.staging.region import RegionRef
from tplayout.staging.slots import SlotRef
from tplayout_vllm.admission import Admission
from tplayout_vllm.blocks import Tables
from tplayout_vllm.guard import Guarded
from tplayout_vllm.metadata import ChunkCopy, StagingRef
from tplayout_vllm.scheduler import SchedulerSide

CHUNK = 16
GEOMETRY = Geometry(CHUNK, (Group("full", "full", (0,), 1, (Part("k", 4), Part("v", 4)), "F32"),))


class FakeStager:
    """Has `ready` chunks of everything, once it is `done`; remembers what is held and how often it was waited for."""

    def __init__(self, ready: int = 0, done: bool = True) -> None:
        self.ready, self.done = ready, done
        self.chunks: dict[str, int] = {}
        self.claimed: dict[str, list[SlotRef]] = {}
        self.saved: list[tuple[int, tuple[int, ...]]] = []
        self.abandoned: list[SlotRef] = []
        self.given_up: list[tuple[int, int, int, int]] = []
        self.waits = 0
        self.refuse = False
        self.broken = -1  # chunk whose save cannot begin, for an error of our own

    def start_lookup(self, name: str, chunks: Any, groups: Any) -> None:
        assert name not in self.chunks
        self.chunks[name] = len(chunks)

    def lookup(self, name: str, worth: float | None = None) -> LookupState:
        self.worth = worth
        return LookupState(min(self.ready, self.chunks[name]), self.done, "")

    def claim(self, name: str, first: int, last: int) -> list[SlotRef]:
        self.claimed[name] = [SlotRef(10 + i, 1, (0,)) for i in range(first, last)]
        return self.claimed[name]

    def release(self, name: str) -> None:
        self.chunks.pop(name, None)
        self.claimed.pop(name, None)

    def begin_save(self, chunk: Any, groups: Any) -> SlotRef | None:
        self.saved.append((chunk.index, tuple(groups)))
        if chunk.index == self.broken:
            raise RuntimeError("planted")
        return None if self.refuse else SlotRef(chunk.index, 1, tuple(groups))

    def abandon_save(self, ref: SlotRef) -> None:
        self.abandoned.append(ref)

    def give_up_part(self, *part: int) -> None:
        self.given_up.append(part)

    def wait(self, timeout: float) -> bool:
        self.waits += 1
        return False


def side(stager: FakeStager, loads: bool = True, saves: bool = True, never_slower: bool = True) -> SchedulerSide:
    staging = StagingRef(RegionRef(1, 2, 3, "t"), GEOMETRY, "xxh3-128", None, {}, (((0, 0),),))
    tables = Tables((8,), ((0,),))
    admission = Admission((), None)
    return SchedulerSide(
        stager, staging, tables, bytes(32), admission, loads=loads, saves=saves, never_slower=never_slower
    )


def request(tokens: int, name: str = "r", **fields: Any) -> Any:
    values: dict[str, Any] = {
        "request_id": name,
        "all_token_ids": list(range(tokens)),
        "prompt_token_ids": list(range(tokens)),
        "num_tokens": tokens,
        "num_computed_tokens": 0,
        "num_prompt_tokens": tokens,
        "skip_reading_prefix_cache": False,
        "prompt_embeds": None,
        "mm_features": [],
        "lora_request": None,
        "pooling_params": None,
        "resumable": False,
        "cache_salt": None,
    }
    return SimpleNamespace(**{**values, **fields})


def output(scheduled: dict[str, int] | None = None, drafts: dict[str, list[int]] | None = None) -> Any:
    tables = ([*range(1, 30)],)
    return SimpleNamespace(
        num_scheduled_tokens=scheduled or {},
        scheduled_spec_decode_tokens=drafts or {},
        kv_connector_block_state=SimpleNamespace(get_block_ids=lambda name: tables),
    )


def add(deciding: SchedulerSide, one: Any, local: int = 0) -> None:
    deciding.add(one, lambda _: local)


def test_what_the_engine_holds_is_not_looked_up() -> None:
    stager = FakeStager()
    add(side(stager), request(100), local=40)
    assert stager.chunks == {"r": 4}  # chunks 2 to 5


def test_who_waits_for_blocks_keeps_what_was_found_and_does_not_spin(monkeypatch: pytest.MonkeyPatch) -> None:
    stager = FakeStager(ready=3)
    deciding, one = side(stager), request(100)
    add(deciding, one)
    monkeypatch.setattr(deciding._admission, "admits", lambda *_: False)
    for waits in (1, 2):
        assert deciding.matched(one, 0) is None
        deciding.step(output())
        assert stager.waits == waits
    assert stager.chunks == {"r": 6}
    assert deciding.matched(one, 48) == 0  # the engine has it by now: nothing to wait for
    monkeypatch.undo()
    assert deciding.matched(one, 0) == 48
    deciding.step(output())
    assert stager.waits == 2


def test_the_answer_is_none_until_it_is_known() -> None:
    stager = FakeStager(ready=3, done=False)
    deciding, one = side(stager), request(100)
    add(deciding, one)
    assert deciding.matched(one, 0) is None
    stager.done = True
    assert deciding.matched(one, 0) == 48
    assert deciding.matched(one, 24) == 24
    assert deciding.matched(one, 64) == 0


def test_a_local_hit_that_shrinks_behind_the_search_starts_it_anew() -> None:
    stager = FakeStager(ready=9)
    deciding, one = side(stager), request(100)
    add(deciding, one, local=64)
    assert stager.chunks == {"r": 2}
    assert deciding.matched(one, 8) == 96 - 8
    assert stager.chunks == {"r": 6}


def test_a_load_holds_its_slots_until_all_ranks_have_ended_it() -> None:
    stager = FakeStager(ready=2)
    deciding, one = side(stager), request(33)
    add(deciding, one)
    assert deciding.matched(one, 8) == 24
    deciding.allocated(one, ([1, 2, 3, 4, 5],), 24)
    (transfer,) = deciding.step(output()).loads
    assert transfer.copies == (ChunkCopy(10, 1, 0, 8, 16, (0,)), ChunkCopy(11, 1, 16, 16, 32, (0,)))
    assert deciding.step(output()).loads == []
    deciding.finish("r")  # aborted
    assert "r" in stager.claimed
    deciding.step_ended({"r"}, set(), None)
    assert stager.claimed == {}


@pytest.mark.parametrize("never_slower", [True, False])
def test_waiting_is_worth_what_the_engine_needs_to_compute_a_chunk(never_slower: bool) -> None:
    stager = FakeStager(done=False)
    deciding, one = side(stager, never_slower=never_slower), request(100)
    add(deciding, one)
    deciding.matched(one, 0)
    assert stager.worth is None  # nothing was computed yet
    meta = deciding.step(output({"other": 64}))
    time.sleep(0.04)
    deciding.step_ended(set(), set(), meta.timed)
    deciding.matched(one, 0)
    if never_slower:
        assert stager.worth is not None
        assert stager.worth >= 0.01  # a chunk has 16 tokens
    else:
        assert stager.worth is None


@pytest.mark.parametrize(("tokens", "groups"), [(33, (0,)), (32, ())])
def test_blocks_that_a_load_fills_in_part_are_zeroed_by_the_engine(tokens: int, groups: tuple[int, ...]) -> None:
    stager = FakeStager(ready=2)
    deciding, one = side(stager), request(tokens)
    add(deciding, one)
    assert deciding.filled("r") == ()
    assert deciding.matched(one, 8) == min(32, tokens - 1) - 8
    assert deciding.filled("r") == groups
    deciding.allocated(one, ([1, 2, 3, 4, 5],), 8)
    assert deciding.filled("r") == deciding.filled("unknown") == ()


def test_workers_hear_of_the_adapter_with_each_step_and_each_copy(tmp_path: Path) -> None:
    (tmp_path / "adapter_config.json").write_text("{}")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"weights")
    lora = SimpleNamespace(lora_int_id=5, lora_path=str(tmp_path))
    stager = FakeStager(ready=1)
    deciding, one = side(stager), request(33, lora_request=lora)
    add(deciding, one)
    assert deciding.matched(one, 0) == 16
    deciding.allocated(one, ([1, 2, 3, 4, 5],), 16)
    (load,) = deciding.step(output()).loads
    assert load.adapter is not None
    assert load.adapter.number == 5
    deciding.step_ended({"r"}, set(), None)
    meta = deciding.step(output({"r": 33}))
    assert meta.adapters == (load.adapter,)
    assert [save.adapter for save in meta.saves] == [load.adapter]
    assert deciding.step(output({"other": 1})).adapters == ()


def test_a_request_that_got_no_blocks_for_a_hit_lets_go() -> None:
    stager = FakeStager(ready=2)
    deciding, one = side(stager), request(33)
    add(deciding, one)
    assert deciding.matched(one, 0) == 32
    deciding.allocated(one, ([1, 2, 3, 4, 5],), 0)
    assert stager.chunks == {}
    assert deciding.step(output()).loads == []


@pytest.mark.parametrize("fails", [False, True])
def test_after_a_failed_load_the_store_is_not_asked_again(fails: bool) -> None:
    stager = FakeStager(ready=2)
    deciding, one = side(stager), request(33)
    add(deciding, one)
    deciding.matched(one, 0)
    deciding.allocated(one, ([1, 2, 3, 4, 5],), 32)
    deciding.step(output())
    deciding.step_ended({"r"}, {"r"} if fails else set(), None)
    assert deciding.matched(one, 0) == (0 if fails else 32)


@pytest.mark.parametrize(
    ("known", "computed", "scheduled", "drafts", "chunks"),
    [
        (100, 0, 31, 0, 1),
        (100, 0, 32, 0, 2),
        (100, 16, 16, 0, 2),
        (100, 30, 6, 4, 2),
        (100, 30, 6, 5, 1),  # token 31 is a draft
        (31, 30, 2, 0, 1),  # token 31 is not known yet
        (32, 30, 2, 0, 2),
    ],
)
def test_only_what_is_computed_known_and_no_draft_is_saved(
    known: int, computed: int, scheduled: int, drafts: int, chunks: int
) -> None:
    stager = FakeStager()
    deciding, one = side(stager, loads=False), request(known, num_computed_tokens=computed)
    add(deciding, one)
    meta = deciding.step(output({"r": scheduled}, {"r": [0] * drafts}))
    assert [index for index, _ in stager.saved] == list(range(chunks))
    assert [len(transfer.copies) for transfer in meta.saves] == [chunks]


def test_a_chunk_is_offered_once() -> None:
    """Also when there was no slot for it."""
    stager = FakeStager()
    stager.refuse = True
    deciding, one = side(stager), request(100)
    add(deciding, one)
    assert deciding.step(output({"r": 20})).saves == []
    one.num_computed_tokens = 20
    stager.refuse = False
    deciding.step(output({"r": 20}))
    assert [index for index, _ in stager.saved] == [0, 1]


def test_it_waits_only_when_there_is_nothing_else_to_do() -> None:
    stager = FakeStager(done=False)
    deciding, one, other = side(stager), request(33), request(20, "other")
    add(deciding, other)
    deciding.step(output())
    assert stager.waits == 0  # nobody has been told to wait
    add(deciding, one)
    assert deciding.matched(one, 0) is None
    deciding.step(output({"other": 5}))
    assert stager.waits == 0
    deciding.step(output())
    assert stager.waits == 1
    deciding.finish("r")
    deciding.step(output())
    assert stager.waits == 1


def test_a_consumer_saves_nothing_and_a_producer_asks_nothing() -> None:
    for loads, saves in ((True, False), (False, True)):
        stager = FakeStager(ready=2)
        deciding, one = side(stager, loads, saves), request(33)
        add(deciding, one)
        assert deciding.matched(one, 0) == (32 if loads else 0)
        assert bool(deciding.step(output({"r": 33})).saves) == saves


def test_an_error_in_mid_step_lets_go_of_what_was_begun_and_keeps_the_rest() -> None:
    """A slot that no rank hears of is marked by none, and would never be free again."""
    stager = FakeStager(ready=2)
    deciding, bad, good, loading = side(stager), request(100, "bad"), request(40, "good"), request(40, "loading")
    for one in (bad, good, loading):
        add(deciding, one)
    deciding.matched(loading, 0)
    deciding.allocated(loading, ([1, 2, 3, 4, 5],), 32)
    stager.broken = 3
    meta = Guarded(deciding).step(output({"bad": 80, "good": 40}))
    assert stager.abandoned == [SlotRef(index, 1, (0,)) for index in range(3)]
    assert [(transfer.request, len(transfer.copies)) for transfer in meta.saves] == [("good", 2)]
    assert [transfer.request for transfer in meta.loads] == ["loading"]
    assert meta.staging is not None
    assert "bad" not in stager.chunks  # it is served without the cache from now on
    stager.saved.clear()
    bad.num_computed_tokens = 80
    assert deciding.step(output({"bad": 20})).saves == []
    assert stager.saved == []


def test_what_a_rank_cannot_mark_is_marked_for_it() -> None:
    stager = FakeStager()
    copies = (ChunkCopy(5, 7, 0, 0, 16, (0,)), ChunkCopy(6, 2, 16, 16, 32, (0,)))
    side(stager).given_up({(0, 0): copies, (0, 1): copies})  # rank 1 holds replicas and marks nothing
    assert stager.given_up == [(5, 7, 0, 0), (6, 2, 0, 0)]


def test_requests_unknown_to_it_are_ignored() -> None:
    """Such that cannot be keyed, and such of before a restart."""
    deciding = side(FakeStager(ready=2))
    stranger = request(33, "stranger")
    assert deciding.matched(stranger, 0) == 0
    deciding.allocated(stranger, ([1, 2],), 0)
    assert deciding.step(output({"stranger": 33})).saves == []
    deciding.step_ended({"stranger"}, {"stranger"}, None)
    deciding.finish("stranger")


def test_once_stopped_it_neither_loads_nor_saves() -> None:
    stager = FakeStager(ready=2)
    stopped = side(stager)
    early, late = request(2 * CHUNK + 1, "early"), request(2 * CHUNK + 1, "late")
    stopped.add(early, lambda _: 0)
    stopped.stop("weights-changed")
    stopped.add(late, lambda _: 0)
    assert [stopped.matched(each, 0) for each in (early, late)] == [0, 0]
    assert stopped.step(output({"early": 2 * CHUNK, "late": 2 * CHUNK})).saves == []
    assert stager.saved == []
    assert stopped._unkeyable == {"weights-changed": 1}
