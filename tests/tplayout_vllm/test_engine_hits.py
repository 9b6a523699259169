"""What one engine stores, others load: any block size, chunk size, TP, page order; no more and no less than they can.

All of it with vLLM's own scheduler and without a model, see sim_engine.py, which checks every byte that is attended to.
"""

from pathlib import Path
from typing import Any

import pytest
from sim_model import SimModel
from sim_store import Sim

from tplayout.admin.catalog import Secrets
from tplayout.admin.copy import recode
from tplayout.admin.namespaces import names, open_namespace
from tplayout.format.encryption_key import EncryptionKey
from tplayout.storage.url import open_store


@pytest.mark.parametrize("chunk", [64, 96, 256, 512])
def test_block_sizes_and_tp_cross(sim: Sim, chunk: int) -> None:
    """Also where neither of block and chunk size divides the other."""
    text, tokens = sim.text(1), 1100
    full = tokens // chunk * chunk
    writer = sim.engine(tp=4, block=128, chunk=chunk, budget=500)
    assert writer.loaded(writer.run(text, tokens, 1)) == 0
    assert sim.stored(text, tokens) == [True] * (tokens // chunk)
    before = {path: path.read_bytes() for _, _, path in sim.objects()}
    readers: list[dict[str, Any]] = [
        {"tp": 2, "block": 32},
        {"tp": 1, "block": 256, "kernel": 64, "order": "rows"},
        {"tp": 4, "block": 96, "caching": False},
        {"tp": 8, "block": 64, "order": "rows"},
    ]
    for setup in readers:
        reader = sim.engine(chunk=chunk, **setup)
        name = reader.run(text, tokens)
        assert reader.loaded(name) == full
        assert reader.stager.snapshot()["saves"] == 0
    assert {path: path.read_bytes() for _, _, path in sim.objects()} == before
    assert sim.check_store() == len(before)


@pytest.mark.parametrize(("tokens", "loaded"), [(63, 0), (64, 63), (65, 64), (127, 64), (128, 127), (129, 128), (1, 0)])
def test_the_last_token_is_always_computed(sim: Sim, tokens: int, loaded: int) -> None:
    """Requests shorter than a chunk, of one chunk exactly, and a token more."""
    text = sim.text(2)
    sim.engine().run(text, 200, 1)
    reader = sim.engine(block=32)
    assert reader.loaded(reader.run(text, tokens, 2)) == loaded


def test_nothing_is_stored_of_less_than_a_chunk(sim: Sim) -> None:
    engine = sim.engine()
    engine.run(sim.text(3), 40, 24)
    assert sim.check_store() == 0
    engine.run(sim.text(4), 40, 25)  # 64 tokens have KV: all but the last one sampled
    assert sim.check_store() == 1


@pytest.mark.parametrize("asynchronous", [False, True])
def test_generated_tokens_are_stored_for_the_next_turn(sim: Sim, asynchronous: bool) -> None:
    text = sim.text(5)
    engine = sim.engine(asynchronous=asynchronous)
    engine.run(text, 100, 160)
    # What is sampled last has no KV; behind asynchronous scheduling the last chunk's ids may come too late.
    assert sim.stored(text, 259)[:3] == [True] * 3
    turn = sim.engine(tp=2, asynchronous=asynchronous)
    assert turn.loaded(turn.run(text, 300, 4)) >= 192
    sim.check_store()


@pytest.mark.parametrize(("budget", "caching"), [(17, True), (37, False), (63, True), (129, False)])
def test_chunked_prefill_with_odd_budgets(sim: Sim, budget: int, caching: bool) -> None:
    texts = [sim.text(10 + i) for i in range(3)]
    engine = sim.engine(budget=budget, caching=caching, tp=2)
    names = [engine.add(text, 150 + 31 * i, 10) for i, text in enumerate(texts)]
    engine.until(lambda: all(map(engine.finished, names)))
    engine.settle()
    for i, text in enumerate(texts):
        assert all(sim.stored(text, 150 + 31 * i + 9))
    sim.check_store()


def test_a_local_hit_that_ends_inside_a_chunk_is_continued_from_the_store(sim: Sim) -> None:
    text = sim.text(20)
    sim.engine().run(text, 300, 1)
    engine = sim.engine(block=32)
    engine.connector.reset_cache()
    warm = engine.add(text, 110, 1, skip=True)
    engine.until(lambda: engine.finished(warm))
    name = engine.run(text, 300)
    assert engine.claims[name] == [(96, 256 - 96)]


@pytest.mark.parametrize("caching", [False, True])
def test_requests_that_share_a_prefix_share_what_is_loaded(sim: Sim, caching: bool) -> None:
    text = sim.text(30)
    branches = [sim.text(31 + i, text, 200 + i) for i in range(4)]
    sim.engine().run(text, 300, 1)
    engine = sim.engine(caching=caching, delayed=True, tp=2)
    names = [engine.add(branch, 260, 5) for branch in branches]
    engine.until(lambda: all(map(engine.finished, names)))
    engine.settle()
    # One that is asked about just before the answer comes finds, a step later, what another has loaded by then.
    assert {192} <= {engine.loaded(name) for name in names} <= ({0, 192} if caching else {192})
    assert engine.stager.snapshot()["loads"] == 3
    assert sim.check_store() == 4 + 4  # each branch has a fourth chunk of its own


def test_a_prefix_larger_than_the_staging_pool_is_loaded_as_far_as_it_fits(sim: Sim) -> None:
    text = sim.text(40)
    sim.engine().run(text, 900, 1)
    slot = sim.engine().stager.plan.region_plan.slot_bytes
    engine = sim.engine(tp=2, options={"staging_bytes": 5 * slot})
    name = engine.run(text, 900)
    assert engine.loaded(name) == 5 * 64
    assert engine.stager.snapshot()["slots"]["pinned"] == 0
    sim.check_store()


def test_prompt_logprobs_skip_every_cache(sim: Sim) -> None:
    text = sim.text(50)
    sim.engine().run(text, 300, 1)
    engine = sim.engine()
    name = engine.run(text, 300, skip=True)
    assert engine.loaded(name) == 0
    assert engine.stager.snapshot()["lookups"] == {}


@pytest.mark.parametrize(("role", "saves", "loads"), [("kv_producer", True, False), ("kv_consumer", False, True)])
def test_roles(sim: Sim, role: str, saves: bool, loads: bool) -> None:
    old, new = sim.text(60), sim.text(61)
    sim.engine().run(old, 200, 1)
    engine = sim.engine(role=role)
    assert bool(engine.loaded(engine.run(old, 200))) == loads
    engine.run(new, 200)
    assert any(sim.stored(new, 200)) == saves
    sim.check_store()


def test_salted_requests_are_separate(sim: Sim) -> None:
    plain = sim.text(70)
    salted = sim.text(70, salt="a")
    other = sim.text(70, salt="b")
    assert plain.upto(300) != salted.upto(300)  # the oracle's KV depends on the salt, and so do its continuations
    prompt = plain.upto(17)
    assert salted.upto(17) == other.upto(17) == prompt
    engine = sim.engine(chunk=16, block=32)
    for text in (plain, salted, other):
        assert engine.loaded(engine.run(text, 17, 20)) == 0
    again = sim.engine(chunk=16, block=32, tp=2)
    for text in (plain, salted, other):
        assert again.loaded(again.run(text, 17, 2)) == 16
    sim.check_store()


def test_the_digest_of_a_namespace_is_taken_over(sim: Sim) -> None:
    """As written by a server of an older or newer version with another default."""
    text = sim.text(80)
    sim.engine().run(text, 100, 1)
    (document,) = sim.store.rglob("namespace.json")
    for _, _, path in list(sim.objects()):
        path.unlink()
    document.write_text(document.read_text().replace("xxh3-128", "blake3"))
    engine = sim.engine(tp=2)
    engine.run(text, 200, 1)
    assert sim.check_store() == 3
    reader = sim.engine()
    assert reader.loaded(reader.run(text, 200, 1)) == 192


def test_a_model_of_many_layers_and_one_head(sim: Sim) -> None:
    """More ranks than heads: replicas are stored once, and all are loaded."""
    model = SimModel((None,) * 7, heads=4, dim=2)
    text = sim.text(90)
    sim.engine(model=model, tp=8, order="rows").run(text, 200, 1)
    sim.check_store()
    reader = sim.engine(model=model, tp=8, block=128)
    assert reader.loaded(reader.run(text, 200)) == 192


def test_a_packed_namespace_is_adopted(sim: Sim) -> None:
    """Loaded from and saved into in its codec: what is unpacked from it is what engines store without one."""
    old, new = sim.text(70), sim.text(71)
    sim.engine(tp=2).run(old, 300, 1)
    plain, packed, back = sim.store, sim.store.with_name("packed"), sim.store.with_name("back")
    in_codec(plain, packed, "shuffle-zstd")
    sim.store, sim.url = packed, f"file://{packed}"
    engine = sim.engine(tp=4, block=32)
    assert engine.loaded(engine.run(old, 300)) == 256
    engine.run(new, 300, 1)
    assert all(sim.stored(new, 256))
    assert all(b'"codec":"shuffle-zstd"' in path.read_bytes()[:4096] for _, _, path in sim.objects())
    assert engine.stager.snapshot()["lookups"].get("damaged", 0) == 0
    reader = sim.engine(tp=1)
    assert reader.loaded(reader.run(new, 300)) == 256
    in_codec(packed, back, "none")
    for path in plain.rglob("*.safetensors"):
        assert (back / path.relative_to(plain)).read_bytes() == path.read_bytes()
    sim.store = back
    assert sim.check_store() == 8


@pytest.mark.parametrize("tp", [1, 2])
def test_how_fast_prompts_are_computed_is_learnt_from_the_results_of_steps(sim: Sim, tp: int) -> None:
    engine = sim.engine(tp=tp)
    assert engine.side._prefill.seconds(256) is None
    engine.run(sim.text(70), 300, 1)
    assert engine.side._prefill.seconds(256) is not None


def test_an_encrypted_namespace_is_adopted(sim: Sim, tmp_path: Path) -> None:
    """[M46] Loaded from and saved into by engines with the key; decrypted it is what engines store without one."""
    old, new = sim.text(70), sim.text(71)
    key = EncryptionKey(bytes(range(32)))
    (tmp_path / "key").write_text(key.reveal())
    options = {"encryption_key_file": str(tmp_path / "key")}
    sim.engine(tp=2).run(old, 300, 1)
    plain, sealed, back = sim.store, sim.store.with_name("sealed"), sim.store.with_name("back")
    in_codec(plain, sealed, "aes-256-gcm", key)
    sim.store, sim.url = sealed, f"file://{sealed}"
    engine = sim.engine(tp=4, block=32, options=options)
    assert engine.loaded(engine.run(old, 300)) == 256
    engine.run(new, 300, 1)
    assert all(sim.stored(new, 256))
    assert all(key.id.encode() in path.read_bytes()[:4096] for _, _, path in sim.objects())
    assert engine.stager.snapshot()["lookups"].get("damaged", 0) == 0
    reader = sim.engine(tp=1, options=options)
    assert reader.loaded(reader.run(new, 300)) == 256
    in_codec(sealed, back, "none", key)
    hidden = [key.reveal().encode(), bytes(range(32))]
    for path in plain.rglob("*.safetensors"):
        assert (back / path.relative_to(plain)).read_bytes() == path.read_bytes()
    for path in back.rglob("*.safetensors"):
        data = path.read_bytes()
        hidden += [data[4096 : 4096 + 64], data[-4096 - 64 : -4096]]  # token ids, and KV
    for path in sealed.rglob("*"):
        assert path.is_dir() or not [text for text in hidden if len(set(text)) > 4 and text in path.read_bytes()]
    sim.store = back
    assert sim.check_store() == 8


def in_codec(source: Path, destination: Path, codec: str, key: EncryptionKey | None = None) -> None:
    with open_store(source) as origin, open_store(destination) as target:
        (name,) = names(origin)
        namespace = open_namespace(origin, name, Secrets(None, key))
        assert recode(namespace, target, codec, Secrets(None, key)).complete
