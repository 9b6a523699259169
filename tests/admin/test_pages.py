"""Pages of every order there and back, and values that betray a wrong statement."""

import ml_dtypes
import numpy as np
import pytest

from tplayout.admin.pages import ORDERS, PagedSource, check_statement, join_page, only_group, split_page
from tplayout.errors import ConfigError, GeometryError
from tplayout.format.geometry import Geometry, Group, Part

PARTS = (Part("k", 16), Part("v", 16))
GROUP = Group("full", "full", (0,), 2, PARTS, "F16")
NUMPY = {"F16": "f2", "BF16": ml_dtypes.bfloat16}


@pytest.mark.parametrize("order", ORDERS)
def test_there_and_back(order):
    k, v = np.random.default_rng(0).integers(0, 2**16, (2, 2, 8, 16), "u2")
    data = join_page(k, v, order)
    back = split_page(data, GROUP, order, 2, 8)
    assert np.array_equal(back[0], k)
    assert np.array_equal(back[1], v)


def test_element_order():
    """Element (head 1, token 2, dim 3) of V is where the order's name says."""
    k, v = np.zeros((2, 2, 8, 16), "u2")
    v[1, 2, 3] = 7
    places = {
        "nhd": 2 * 64 + 1 * 32 + 16 + 3,
        "hnd": 1 * 256 + 2 * 32 + 16 + 3,
        "split-nhd": 256 + 2 * 32 + 1 * 16 + 3,
        "split-hnd": 256 + 1 * 128 + 2 * 16 + 3,
        "cpu": 1 * 256 + 128 + 2 * 16 + 3,
    }
    for order, place in places.items():
        assert np.frombuffer(join_page(k, v, order), "u2")[place] == 7
    k[1, 2, 3] = 9
    assert np.frombuffer(join_page(k, v, "cpu"), "u2")[1 * 256 + 3 * 8 + 2] == 9


def source(written: str, read_as: str) -> tuple[PagedSource, list[int]]:
    """Four tokens, each twice, written in one dtype and read as another of its width."""
    tokens = [0, 1, 2, 3, 3, 1, 2, 0]
    random = np.random.default_rng(1)
    k = (random.standard_normal((2, 8, 16)) * 3).astype(NUMPY[written]).view("u2")
    v = random.standard_normal((4, 2, 16))[tokens].transpose(1, 0, 2).astype(NUMPY[written]).view("u2")
    data = join_page(k, np.ascontiguousarray(v), "hnd")
    group = Group("full", "full", (0,), 2, PARTS, read_as)
    return PagedSource(group, "hnd", 8, 8, lambda page, layer: [(range(2), data)]), tokens


@pytest.mark.parametrize("dtype", NUMPY)
def test_the_right_dtype_fits(dtype):
    check_statement(*source(dtype, dtype), "it")


@pytest.mark.parametrize(("written", "read_as"), [("BF16", "F16"), ("F16", "BF16")])
def test_another_dtype_of_the_same_width_is_refused_by_name(written, read_as):
    with pytest.raises(ConfigError, match=f"not KV of dtype {read_as}"):
        check_statement(*source(written, read_as), "it")


def test_models_that_are_not_converted_are_refused_by_name():
    window = Group("window-8", "window", (0,), 2, PARTS, "F16", window=8)
    latent = Group("latent", "latent", (0,), 1, (Part("latent", 6), Part("rope", 2)), "F16")
    uneven = Group("full", "full", (0,), 1, (Part("k", 6), Part("v", 2)), "F16")
    assert only_group(Geometry(16, (GROUP,))) is GROUP
    for groups in ((window,), (latent,), (uneven,), (GROUP, Group("window-8", "window", (1,), 2, PARTS, "F16", 8))):
        with pytest.raises(GeometryError):
            only_group(Geometry(16, groups))


def test_values_that_say_nothing_are_refused():
    """Equal everywhere is not V; one head that is alike for all tokens, by a bias, may be."""
    tokens = [0, 1, 2, 3, 3, 1, 2, 0]
    random = np.random.default_rng(3)
    group = Group("full", "full", (0,), 4, PARTS, "F16")
    k = random.standard_normal((4, 8, 16)).astype("f2").view("u2")
    table = random.standard_normal((4, 4, 16))
    for alike, fine in ((1, True), (4, False)):
        table[:, :alike] = table[:1, :alike]
        v = np.ascontiguousarray(table[tokens].transpose(1, 0, 2).astype("f2")).view("u2")
        data = join_page(k, v, "hnd")
        paged = PagedSource(group, "hnd", 8, 8, lambda page, layer, data=data: [(range(4), data)])
        if fine:
            check_statement(paged, tokens, "it")
        else:
            with pytest.raises(ConfigError, match="do not fit"):
                check_statement(paged, tokens, "it")
