"""A namespace as another of other chunk size or dtype: the same values under other keys."""

import numpy as np
import pytest

from tplayout.admin.chains import build_index
from tplayout.admin.convert import chunks_of
from tplayout.admin.namespaces import begin_namespace, open_namespace
from tplayout.admin.rechunk import carried_extras, changed_identity, rechunk
from tplayout.admin.transfer import read_prefix
from tplayout.admin.work import Work
from tplayout.errors import ConfigError, GeometryError, NamespaceMismatch
from tplayout.format.geometry import Part
from tplayout.format.keys import EXTRA_SALT, ChunkId, object_name

TOKENS = list(range(24))


class Collect:
    """A sink that keeps everything: group -> [heads, layers, parts, tokens, dim]."""

    def __init__(self, whole):
        self.arrays = [np.zeros_like(array) for array in whole.arrays]

    def take(self, group, tokens, bits):
        self.arrays[group][..., tokens.start : tokens.stop, :] = bits


def values_of(namespace, whole):
    """All KV of a namespace's only prefix."""
    index = build_index(namespace)
    (path,) = index.prefixes()
    sink = Collect(whole)
    read_prefix(namespace, chunks_of(index, path), sink)
    return sink.arrays


@pytest.mark.parametrize("size", [2, 3, 6, 8, 12, 24])
def test_any_chunk_size_and_back(kit, store, make_store, size):
    origin, whole = kit.fill(store, kit.identity(), TOKENS)
    there, back = make_store("there"), make_store("back")
    report = rechunk(origin, there, changed_identity(origin.identity, size))
    target = open_namespace(there, report.namespace)
    assert report.tally.written == 24 // size
    assert np.array_equal(values_of(target, whole)[0], whole.arrays[0])
    fresh = make_store("fresh")
    kit.fill(fresh, target.identity, TOKENS)
    assert kit.content(there) == kit.content(fresh)  # what a server of that chunk size would have written
    rechunk(target, back, origin.identity)
    assert kit.content(back) == kit.content(store)


def test_tokens_behind_the_last_full_chunk_are_counted(kit, store, make_store):
    origin, _ = kit.fill(store, kit.identity(), TOKENS)
    report = rechunk(origin, make_store("there"), changed_identity(origin.identity, 7))
    assert (report.tally.written, report.rest) == (3, 3)


def test_what_prefixes_share_is_written_once_and_a_rerun_writes_nothing(kit, store, make_store):
    origin, _ = kit.fill(store, kit.identity(), TOKENS)
    kit.fill(store, origin.identity, [*TOKENS[:16], *range(50, 58)])
    identity = changed_identity(origin.identity, 8)
    first = rechunk(origin, make_store("there"), identity, work=Work(jobs=3))
    assert (first.prefixes, first.tally.written) == (2, 4)
    again = rechunk(origin, make_store("there"), identity)
    assert (again.tally.written, again.tally.present) == (0, 4)  # each once, however many prefixes share it


def test_windows_that_are_gone_stay_gone(kit, store, make_store):
    groups = (kit.group(layers=(0,)), kit.group("window-6", "window", layers=(1, 2), window=6))
    origin, whole = kit.fill(store, kit.identity(*groups), TOKENS)
    index = build_index(origin)
    (path,) = index.prefixes()
    store.delete([object_name(origin.name, key, 1) for key in path[:3]])
    report = rechunk(origin, make_store("there"), changed_identity(origin.identity, 8))
    assert report.tally.absent == 2  # chunks 0 and 1 of 8 tokens would need chunks 0 to 3 of 4
    assert report.complete
    target = open_namespace(make_store("there"), report.namespace)
    assert np.array_equal(values_of(target, whole)[0], whole.arrays[0])


def test_states_need_a_multiple(kit, store, make_store):
    group = kit.group("state", "state", layers=(0,), parts=(Part("conv", 6), Part("ssm", 3)))
    identity = kit.identity(group)
    with pytest.raises(GeometryError, match="multiple of 4"):
        changed_identity(identity, 6)

    class States:
        """The state after token n is n, everywhere."""

        def fill(self, group, tokens, out):
            out[...] = tokens.stop
            return True

    from tplayout.admin.transfer import store_prefix
    from tplayout.format.keys import chain

    origin = begin_namespace(store, identity, "")
    store_prefix(States(), chain(origin.digest, TOKENS, 4), origin)
    report = rechunk(origin, make_store("there"), changed_identity(identity, 8))
    fresh = begin_namespace(make_store("fresh"), changed_identity(identity, 8), "")
    store_prefix(States(), chain(fresh.digest, TOKENS, 8), fresh)
    assert report.tally.written == 3
    assert kit.content(make_store("there")) == kit.content(make_store("fresh"))


def test_damage_is_named_and_ends_what_it_touches(kit, store, make_store):
    origin, _ = kit.fill(store, kit.identity(), TOKENS)
    index = build_index(origin)
    (path,) = index.prefixes()
    name = object_name(origin.name, path[1], 0)
    data = bytearray(store.get(name))
    data[origin.layout(0).cell_range(0, 0).start] ^= 1
    store.put(name, data)
    report = rechunk(origin, make_store("there"), changed_identity(origin.identity, 8))
    assert list(report.tally.damaged) == [name]
    assert not report.complete
    assert report.tally.written == 2


@pytest.mark.parametrize(
    ("old", "new", "lossless"),
    [
        ("F16", "F32", True),
        ("BF16", "F32", True),
        ("F16", "BF16", False),
        ("F32", "F16", False),
        ("F32", "BF16", False),
        ("BF16", "F8_E4M3", False),
        ("F8_E4M3", "BF16", True),
    ],
)
def test_dtypes(kit, store, make_store, old, new, lossless):
    origin, whole = kit.fill(store, kit.identity(kit.group(dtype=old)), TOKENS)
    identity = changed_identity(origin.identity, 8, new)
    assert identity.geometry.groups[0].dtype == new
    if not lossless:
        with pytest.raises(ConfigError, match="--lossy"):
            rechunk(origin, make_store("there"), identity)
        assert not list(make_store("there").list())
    report = rechunk(origin, make_store("there"), identity, lossy=not lossless)
    target = open_namespace(make_store("there"), report.namespace)
    wide = whole.arrays[0].astype("u4") if new == "F32" else whole.arrays[0].astype(f"u{target_width(identity)}")
    whole.arrays = [wide]
    before = floats(origin, store_values(origin, old), old)
    after = floats(target, values_of(target, whole)[0], new)
    errors = np.abs(before - after)
    if lossless:
        assert errors.max() == 0
        assert not report.losses
        back = rechunk(target, make_store("back"), origin.identity, lossy=True)
        assert back.losses["full"].max == 0
        assert kit.content(make_store("back")) == kit.content(store)
    else:
        losses = report.losses["full"]
        assert losses.max == pytest.approx(errors.max())
        assert losses.mean == pytest.approx(errors.mean())
        assert 0 < losses.max < 0.3
        assert losses.count == before.size


def target_width(identity) -> int:
    return identity.geometry.groups[0].element_bytes


def store_values(namespace, dtype):
    width = namespace.identity.geometry.groups[0].element_bytes

    class Shape:
        arrays = (np.zeros((4, 3, 2, 24, 8), f"u{width}"),)

    return values_of(namespace, Shape)[0]


def floats(namespace, bits, dtype):
    import ml_dtypes

    names = {"F32": "f4", "F16": "f2", "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}
    return bits.view(names[dtype]).astype("f8")


def test_values_beyond_the_range_are_clamped_and_counted(kit, store, make_store):
    identity = kit.identity(kit.group(dtype="F32", heads=1, layers=(0,)))

    class Big:
        def fill(self, group, tokens, out):
            out.view("f4")[...] = 1.0
            out.view("f4")[0, 0, 0, 0, :3] = (1e6, -1e6, np.inf)
            return True

    from tplayout.admin.transfer import store_prefix
    from tplayout.format.keys import chain

    origin = begin_namespace(store, identity, "")
    store_prefix(Big(), chain(origin.digest, TOKENS[:4], 4), origin)
    report = rechunk(origin, make_store("there"), changed_identity(identity, None, "F16"), lossy=True)
    assert report.losses["full"].clamped == 2
    assert report.losses["full"].max == 1e6 - 65504


def test_scales_are_applied(kit, store, make_store):
    scales = tuple((0.5, 2.0) for _ in range(3))
    identity = kit.identity(kit.group(dtype="F8_E4M3", scales=scales))
    origin, whole = kit.fill(store, identity, TOKENS[:4])
    new = changed_identity(identity, None, "F32")
    with pytest.raises(ConfigError, match="--lossy"):
        rechunk(origin, make_store("there"), new)
    rechunk(origin, make_store("there"), new, lossy=True)
    target = open_namespace(make_store("there"), new.namespace)
    raw = floats(origin, whole.arrays[0], "F8_E4M3")
    whole.arrays = [whole.arrays[0].astype("u4")]
    got = floats(target, values_of(target, whole)[0], "F32")
    assert np.array_equal(got[:, :, 0], raw[:, :, 0] * 0.5)
    assert np.array_equal(got[:, :, 1], raw[:, :, 1] * 2)


def test_bytes_without_values_are_not_converted(kit):
    with pytest.raises(ConfigError, match="U8 has no values"):
        changed_identity(kit.identity(kit.group(dtype="U8")), None, "F32")


def test_extras_are_carried_over_only_where_they_mean_the_same():
    def prefix(*extras):
        return [ChunkId(b"", b"", (0,) * 4, digest, at) for at, digest in enumerate(extras)]

    none, a, b = b"\0" * 32, b"a" * 32, b"b" * 32
    from tplayout.format.keys import NO_EXTRAS

    assert carried_extras(prefix(a, b), 4) == [a, b]
    assert carried_extras(prefix(NO_EXTRAS), 2) == [NO_EXTRAS] * 2
    assert carried_extras(prefix(a, a), 8) == [a]
    assert carried_extras(prefix(a), 2) is None  # an image in the only chunk?
    assert carried_extras(prefix(a, b), 2) is None
    assert carried_extras(prefix(NO_EXTRAS, a), 2) is None
    assert none != NO_EXTRAS


def test_prefixes_whose_extras_cannot_be_carried_over_are_named(kit, store, make_store):
    origin, _ = kit.fill(store, kit.identity(), TOKENS[:4], extras=((EXTRA_SALT, b"t"),))
    report = rechunk(origin, make_store("there"), changed_identity(origin.identity, 2))
    assert not report.complete
    assert "extras" in next(iter(report.skipped.values()))


def test_another_chunk_size_in_another_codec(kit, store, make_store):
    """The codec of the source is kept where nothing else is said, and the target's where it is there."""
    origin, whole = kit.fill(store, kit.identity(kit.group(parts=(Part("k", 64), Part("v", 64)))), TOKENS)
    identity = changed_identity(origin.identity, 8)
    plain, packed, kept = (make_store(name) for name in ("plain", "packed", "kept"))
    before = rechunk(origin, plain, identity)
    report = rechunk(origin, packed, identity, codec="shuffle-zstd")
    assert report.bytes_read == before.bytes_read == len(TOKENS) // 8 * 2 * origin.layout(0).nbytes
    sizes = [info.size for info in packed.list() if info.key.endswith(".safetensors")]
    assert report.tally.nbytes == sum(sizes) < before.tally.nbytes
    target = open_namespace(packed, report.namespace)
    assert np.array_equal(values_of(target, whole)[0], values_of(open_namespace(plain, report.namespace), whole)[0])
    smaller = rechunk(target, kept, changed_identity(identity, 4))
    assert open_namespace(kept, smaller.namespace).document.storage.codec == "shuffle-zstd"
    assert rechunk(target, store, changed_identity(identity, 4)).tally.present == len(TOKENS) // 8 * 2
    with pytest.raises(NamespaceMismatch, match="codec"):
        rechunk(target, store, changed_identity(identity, 4), codec="shuffle-zstd")
