"""Sliding windows: only the window is read, blocks that left it are not touched, hits end where their windows are."""

import pytest
from sim_model import SimModel
from sim_store import Sim

MIXED = SimModel((None, None, 128, 128))  # canonical groups: 0 full, 1 window


@pytest.mark.parametrize(
    ("block", "other", "chunk"), [(32, 64, 64), (64, 32, 128), (128, 96, 64), (96, 128, 128), (32, 128, 48)]
)
def test_windows_cross_block_sizes(sim: Sim, block: int, other: int, chunk: int) -> None:
    text = sim.text(1)
    sim.engine(model=MIXED, block=block, chunk=chunk, blocks=150, budget=77, tp=2).run(text, 900, 1)
    reader = sim.engine(model=MIXED, block=other, chunk=chunk, blocks=150)
    assert reader.loaded(reader.run(text, 900, 40)) == 900 // chunk * chunk
    assert all(sim.stored(text, 900, groups=(0, 1)))
    sim.check_store()


def test_only_the_window_is_read(sim: Sim) -> None:
    text = sim.text(2)
    writer = sim.engine(model=MIXED, blocks=150)
    writer.run(text, 1024, 1)
    assert writer.stager.snapshot()["saves"] == 16
    full, window = (layout.nbytes for layout in writer.stager.plan.layouts)
    reader = sim.engine(model=MIXED, blocks=150, block=64)
    assert reader.loaded(reader.run(text, 1024, 1)) == 1023
    # Token 1023 sees 896 to 1022, which is two chunks.
    assert reader.stager.snapshot()["load_bytes"] == 16 * full + 2 * window
    later = sim.engine(model=MIXED, blocks=150, block=64)
    assert later.loaded(later.run(text, 1000, 1)) == 960
    # Token 960 sees 833 on, and its block begins with 832.
    assert later.stager.snapshot()["load_bytes"] == 15 * full + 2 * window


def test_a_hit_ends_where_its_window_is(sim: Sim) -> None:
    text = sim.text(3)
    sim.engine(model=MIXED, blocks=150).run(text, 700, 1)
    sim.path(text, 8, group=1).unlink()
    reader = sim.engine(model=MIXED, blocks=150)
    # Ends from 576 on need chunk 8 until its last token, 575, is out of the window of the end: 640 sees 513 on.
    assert reader.loaded(reader.run(text, 700, 1)) == 512
    assert all(sim.stored(text, 640, groups=(0, 1)))  # made up for
    for chunk in range(3):
        sim.path(text, chunk, group=1).unlink()
    again = sim.engine(model=MIXED, blocks=150)
    assert again.loaded(again.run(text, 700, 1)) == 640  # what is out of the window is not missed


def test_a_chunk_that_outgrows_the_window_is_stored_without_it(sim: Sim) -> None:
    model = SimModel((None, 32))
    text = sim.text(4)
    engine = sim.engine(model=model, chunk=256, budget=40, blocks=150)
    engine.run(text, 600, 1)
    assert sim.stored(text, 512, groups=(0,)) == [True, True]
    assert sim.stored(text, 512, groups=(1,)) == [False, False]
    reader = sim.engine(model=model, chunk=256, blocks=150, budget=600)
    assert reader.loaded(reader.run(text, 600, 1)) == 0
    assert sim.stored(text, 512, groups=(1,)) == [True, True]  # computed in one step, they are there
    sim.check_store()


def test_blocks_of_a_loaded_window_serve_shorter_local_hits(sim: Sim) -> None:
    """The engine keeps the block where a loaded window begins, and offers all of it to the next request."""
    text = sim.text(5)
    sim.engine(model=MIXED, blocks=150, chunk=48).run(text, 1100, 1)
    reader = sim.engine(model=MIXED, blocks=150, chunk=48)
    # Token 1007 sees 880 on, which is in the middle of a block.
    assert reader.loaded(reader.run(text, 1008, 1)) == 1007
    # Found by the engine itself: 992 tokens, of which the next one sees 865 on.
    assert reader.loaded(reader.run(text, 1000, 1)) == 0
    sim.check_store()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_decoding_past_the_window_stores_it(sim: Sim, asynchronous: bool) -> None:
    text = sim.text(6)
    engine = sim.engine(model=MIXED, blocks=100, asynchronous=asynchronous)
    engine.run(text, 100, 300)
    assert all(sim.stored(text, 384, groups=(0, 1)))
    sim.check_store()
    turn = sim.engine(model=MIXED, blocks=100, tp=4, block=64)
    assert turn.loaded(turn.run(text, 420, 2)) == 384


def test_a_model_of_windows_only(sim: Sim) -> None:
    model = SimModel((100, 100, 100))
    text = sim.text(7)
    sim.engine(model=model, blocks=60).run(text, 500, 1)
    reader = sim.engine(model=model, blocks=60, tp=2, block=64)
    assert reader.loaded(reader.run(text, 500, 20)) == 448
    sim.check_store()


def test_two_windows_of_different_size(sim: Sim) -> None:
    model = SimModel((200, 64, None, 64))
    text = sim.text(8)
    sim.engine(model=model, blocks=150, budget=64).run(text, 640, 1)
    reader = sim.engine(model=model, blocks=150, tp=2, block=128)
    assert reader.loaded(reader.run(text, 700, 20)) == 640
    sim.check_store()


def test_windows_that_give_no_blocks_back_are_loaded_for_whole(sim: Sim) -> None:
    """With --disable-hybrid-kv-cache-manager the engine offers every block to the next request."""
    model = SimModel(MIXED.windows, hybrid=False)
    text = sim.text(9)
    sim.engine(model=model, blocks=150, tp=2).run(text, 1100, 1)
    reader = sim.engine(model=model, blocks=60, block=64)
    assert reader.loaded(reader.run(text, 1001, 1)) == 960
    for tokens in (500, 800, 200):
        reader.run(text, tokens, 1)
    sim.check_store()
    # An engine whose window layers do give blocks back reads the same store, and the other way round.
    hybrid = sim.engine(model=MIXED, blocks=150)
    assert hybrid.loaded(hybrid.run(text, 1001, 200)) == 960
    assert reader.loaded(reader.run(sim.text(10, text, 1001), 1100, 1)) == 0  # held by the engine itself
    sim.check_store()
