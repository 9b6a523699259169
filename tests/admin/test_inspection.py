"""Chunks from the inside: finding them, their cells, statistics against NumPy, and the picture."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from tests.support.filled_store import fill, flip, group, identity, layout_of_group, name_of, rewrite
from tplayout.admin.catalog import QUARANTINE, Secrets
from tplayout.admin.heatmap import colour, draw
from tplayout.admin.inspection import Opened, cells, find, norms, read, statistics
from tplayout.cache import Cache
from tplayout.errors import ConfigError, FormatError, NotFound, Reason
from tplayout.format.geometry import Part
from tplayout.format.sharding import whole
from tplayout.storage.base import Store
from tplayout.storage.url import open_store


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return open_store(tmp_path / "store")


def opened(store: Store, chunk: str, secret: bytes | None = None, **options: str) -> Opened:
    space, stored, siblings = find(store, chunk, **options)
    return read(store, space, stored, Secrets(secret), siblings)


def test_a_chunk_is_found_by_the_beginning_of_its_key_or_by_its_name(store):
    cache = Cache.open(store, identity())
    (chunk, other) = fill(cache, range(8))
    for text in (chunk.key.hex()[:6], chunk.key.hex(), chunk.key.hex().upper(), name_of(cache, chunk)):
        found = opened(store, text)
        assert (found.name, found.fault) == (name_of(cache, chunk), None)
        assert found.chunk == chunk
    assert opened(store, name_of(cache, other)).chunk.parent == chunk.key


@pytest.mark.parametrize("text", ["abc", "xyzw", "some/name", f"{'0' * 32}/namespace.json"])
def test_what_is_no_chunk_is_refused(store, text):
    with pytest.raises(ConfigError):
        find(store, text)


def test_what_is_not_there(store):
    cache = Cache.open(store, identity(group(), group("other", layers=(4,))))
    (chunk,) = fill(cache, range(4), groups=[0])
    absent = next(digits for digits in ("0000", "1111") if not chunk.key.hex().startswith(digits))
    with pytest.raises(NotFound):
        find(store, absent)
    with pytest.raises(NotFound):
        find(store, name_of(cache, chunk, 1))
    with pytest.raises(NotFound, match="only of 0"):
        find(store, chunk.key.hex(), group="other")


def test_several_chunks_that_begin_so_are_listed(store):
    ours, theirs = Cache.open(store, identity()), Cache.open(store, identity(weights="files:01"))
    keys = [chunk.key.hex() for cache in (ours, theirs) for chunk in fill(cache, range(4000))]
    twice = next(key[:4] for key in sorted(keys) if sum(other.startswith(key[:4]) for other in keys) > 1)
    with pytest.raises(ConfigError, match=f"2 chunks begin with {twice}|3 chunks"):
        find(store, twice)


def test_groups_by_name_and_index(store):
    cache = Cache.open(store, identity(group(), group("other", layers=(4,))))
    (chunk,) = fill(cache, range(4))
    key = chunk.key.hex()
    assert opened(store, key).siblings == (name_of(cache, chunk, 1),)
    for text in ("1", "other"):
        found = opened(store, key, group=text)
        assert (found.layout.group.name, found.siblings) == ("other", (name_of(cache, chunk, 0),))


def test_every_cell_is_checked_on_its_own(store):
    cache = Cache.open(store, identity())
    (chunk,) = fill(cache, range(4))
    rewrite(store, name_of(cache, chunk), flip(layout_of_group(cache).cell_range(1, 0).start))
    found = opened(store, chunk.key.hex())
    assert [(cell.head, cell.layer, cell.ok) for cell in cells(found)] == [
        (0, 0, True),
        (0, 1, True),
        (1, 0, False),
        (1, 1, True),
    ]
    assert found.fault is not None
    assert found.fault.reason is Reason.DIGEST_MISMATCH


def test_a_damaged_object_is_shown_as_far_as_it_goes(store):
    cache = Cache.open(store, identity())
    (chunk,) = fill(cache, range(4))
    cut = layout_of_group(cache).cell_range(0, 1).stop
    rewrite(store, name_of(cache, chunk), lambda data: bytes(data[:cut]))
    found = opened(store, chunk.key.hex())
    assert (found.chunk, found.fault.reason, len(list(cells(found)))) == (chunk, Reason.TRUNCATED, 2)
    assert np.isnan(norms(found)["k"]).tolist() == [[False, False], [True, True]]
    with pytest.raises(FormatError, match="ends before head 1"):
        statistics(found, 1, 0)
    rewrite(store, name_of(cache, chunk), lambda data: b"")
    found = opened(store, chunk.key.hex())
    assert (found.chunk, list(cells(found))) == (None, [])


def test_an_object_in_quarantine_or_without_a_document_is_still_read(store):
    cache = Cache.open(store, identity())
    (chunk,) = fill(cache, range(4))
    name = name_of(cache, chunk)
    store.put(f"{QUARANTINE}/{name}", store.get(name))
    assert opened(store, f"{QUARANTINE}/{name}").fault is None
    store.delete([f"{cache.namespace}/namespace.json"])
    found = opened(store, name)
    assert found.fault.reason is Reason.BAD_NAMESPACE
    assert len(list(cells(found))) == 4
    assert statistics(found, 0, 0)[0].nans == 0
    store.delete([name])
    assert opened(store, f"{QUARANTINE}/{name}").fault.reason is Reason.BAD_NAMESPACE


def test_keyed_digests_need_the_secret(store):
    secret = b"0123456789abcdef"
    cache = Cache.open(store, identity(), secret=secret)
    (chunk,) = fill(cache, range(4))
    found = opened(store, chunk.key.hex())
    assert (found.unsure, {cell.ok for cell in cells(found)}) == (True, {None})
    found = opened(store, chunk.key.hex(), secret)
    assert (found.unsure, {cell.ok for cell in cells(found)}) == (False, {True})
    with pytest.raises(ConfigError, match="secret"):
        opened(store, chunk.key.hex(), secret * 2)


def with_values(store: Store, parts: tuple[Part, ...], dtype: str = "F16") -> tuple[Opened, np.ndarray]:
    """A chunk of random KV [heads, layers, …], opened."""
    import ml_dtypes

    own = group(layers=(3, 7, 8), heads=3, parts=parts, dtype=dtype)
    cache = Cache.open(store, identity(own))
    shape = (3, 3, *own.cell_shape(4))
    types = {"F16": np.float16, "F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}
    values = np.random.default_rng(1).standard_normal(shape).astype(types[dtype])
    values[1, 1].flat[0] = np.nan
    (chunk,) = cache.chunks(range(4))
    cache.put(chunk, {whole(own): values})
    return opened(store, chunk.key.hex()), values.astype("f8")


@pytest.mark.parametrize("dtype", ["F16", "F32", "BF16", "F8_E4M3"])
def test_statistics_are_those_of_the_values(store, dtype):
    found, values = with_values(store, (Part("k", 2), Part("v", 2)), dtype)
    for head, layer, position in ((0, 3, 0), (2, 8, 2)):
        for part, one in enumerate(statistics(found, head, layer)):
            cell = values[head, position, part]
            assert one.part == "kv"[part]
            assert (one.minimum, one.maximum, one.nans) == (cell.min(), cell.max(), 0)
            assert (one.mean, one.std) == (pytest.approx(cell.mean()), pytest.approx(cell.std()))
    k, v = statistics(found, 1, 7)
    assert (k.nans, v.nans) == (1, 0)
    assert k.minimum == np.nanmin(values[1, 1, 0])


def test_parts_of_unequal_width_are_kept_apart(store):
    found, values = with_values(store, (Part("latent", 5), Part("rope", 2)))
    latent, rope = statistics(found, 2, 7)
    assert latent.maximum == values[2, 1, :, :5].max()
    assert rope.maximum == values[2, 1, :, 5:].max()
    drawn = norms(found)
    assert drawn["rope"][0, 2] == pytest.approx(np.sqrt((values[0, 2, :, 5:] ** 2).mean()))


@pytest.mark.parametrize("cell", [(3, 3), (0, 0), (0, 4), (-1, 3)])
def test_a_cell_that_is_not_there(store, cell):
    found, _ = with_values(store, (Part("k", 2),))
    with pytest.raises(ConfigError, match="heads 0 to 2, layers 3, 7, 8"):
        statistics(found, *cell)


def test_the_picture_shows_the_broken_head(tmp_path, store):
    found, _ = with_values(store, (Part("k", 2), Part("v", 2)))
    file = tmp_path / "chunk.png"
    draw(file, "title", norms(found), (3, 7, 8), {(2, 0)})
    with Image.open(file) as picture:
        assert picture.format == "PNG"
        colours = {color for _, color in picture.convert("RGB").getcolors(1 << 20)}
    assert (255, 0, 255) in colours  # the cell with a NaN
    assert (255, 0, 0) in colours  # the frame of the damaged one
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["chunk.png"]
    with pytest.raises(ConfigError, match="cannot be written"):
        draw(tmp_path / "none" / "x.png", "", norms(found), (3, 7, 8))


def test_colours_go_from_dark_to_light():
    assert colour(1, 1, 100) == (68, 1, 84)
    assert colour(100, 1, 100) == (253, 231, 37)
    assert colour(10, 1, 100) == (33, 145, 140)
    assert colour(0, 1, 100) == (68, 1, 84)
    assert colour(5, 5, 5) == (33, 145, 140)
    assert colour(float("nan"), 1, 100) == (255, 0, 255)
    assert colour(float("inf"), 1, 100) == (255, 0, 255)


def test_packed_chunks_are_shown_plain(store):
    shape = {"parts": (Part("k", 64), Part("v", 64))}
    cache = Cache.open(store, identity(group(**shape)), codec="shuffle-zstd")
    (chunk,) = fill(cache, range(4))
    values = cache.get(chunk).astype("f8")
    found = opened(store, chunk.key.hex())
    assert (found.fault, found.codec, found.size) == (None, "shuffle-zstd", len(store.get(found.name)))
    assert all(cell.ok for cell in cells(found))
    assert statistics(found, 1, 1)[0].maximum == values[1, 1, 0].max()
    assert norms(found)["v"].shape == (2, 2)


def test_damaged_packed_chunks_are_shown_as_far_as_they_go(store):
    cache = Cache.open(store, identity(), codec="shuffle-zstd")
    (chunk,) = fill(cache, range(4))
    name = name_of(cache, chunk)
    good = store.get(name)
    rewrite(store, name, flip(len(good) - 1))
    found = opened(store, name)
    assert found.fault.reason is Reason.DIGEST_MISMATCH
    assert [(cell.head, cell.layer) for cell in cells(found) if not cell.ok] == [(1, 1)]
    assert found.chunk == chunk
    store.put(name, good[:-1])
    found = opened(store, name)
    assert found.fault.reason is Reason.TRUNCATED
    assert [(cell.head, cell.layer) for cell in cells(found) if not cell.ok] == [(1, 1)]
    store.put(name, good[:4100])
    with pytest.raises(FormatError) as caught:
        opened(store, name)
    assert (caught.value.reason, caught.value.where) == (Reason.TRUNCATED, name)


def test_a_packed_chunk_without_its_document_or_secret(store):
    cache = Cache.open(store, identity(), secret=b"0123456789abcdef", codec="shuffle-zstd")
    (chunk,) = fill(cache, range(4))
    name = name_of(cache, chunk)
    found = opened(store, name)
    assert found.unsure
    assert found.fault is None
    assert opened(store, name, b"0123456789abcdef").chunk == chunk
    store.delete([f"{cache.namespace}/namespace.json"])
    found = opened(store, name)
    assert (found.codec, found.fault.reason) == ("shuffle-zstd", Reason.BAD_NAMESPACE)
    assert len(list(cells(found))) == 4
