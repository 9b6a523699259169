"""tplayout/arguments.py: arguments of a wrong type are named, and sizes mean the same wherever they are written."""

from typing import Any

import pytest

from tplayout.arguments import check_type, format_size, parse_size
from tplayout.errors import ConfigError

TEXTS = {
    "0": 0,
    "500": 500,
    "500B": 500,
    "64K": 64 << 10,
    "80G": 80 << 30,
    "8 G": 8 << 30,
    "2T": 2 << 40,
    "10M": 10 << 20,
    "10MiB": 10 << 20,
    "10 mib": 10 << 20,
    "1.5Gi": 3 << 29,
    " 1GiB ": 1 << 30,
    "2KB": 2000,
    "2MB": 2 * 10**6,
    "2GB": 2 * 10**9,
    "0.5 TB": 5 * 10**11,
    "123456789012345678": 123456789012345678,
}


@pytest.mark.parametrize("text", TEXTS)
def test_sizes(text: str) -> None:
    assert parse_size(text) == TEXTS[text]


@pytest.mark.parametrize(
    "text", ["", "G", "lots", "-5", "+5", "1e9", "5 X", "5 BB", "5iB", "5 K iB", "0x10", "\u0663GiB", "9" * 400, "1_0"]
)
def test_what_is_no_size(text: str) -> None:
    with pytest.raises(ValueError, match="is no size: write 4096, 64K"):
        parse_size(text)


def test_a_size_that_no_store_has() -> None:
    with pytest.raises(ValueError, match="more bytes than any store"):
        parse_size("999999999999T")


@pytest.mark.parametrize(
    ("value", "kinds", "found"),
    [
        ("s3cret", bytes, "a value of type str"),
        (None, str, "None"),
        (True, int, "a value of type bool"),
        ([], (str, bytes), "a value of type list"),
    ],
)
def test_a_wrong_type_is_named_and_the_value_not_shown(value: Any, kinds: Any, found: str) -> None:
    with pytest.raises(ConfigError, match=f"^thing must be something else, not {found}$"):
        check_type("thing", value, kinds, "something else")


@pytest.mark.parametrize(("value", "kinds"), [(True, bool), (True, (bool, int)), (1, int), (None, type(None))])
def test_a_right_type_passes(value: Any, kinds: Any) -> None:
    check_type("thing", value, kinds, "something else")


def test_sizes_for_people() -> None:
    sizes = (0, 1023, 1536, 3 << 30, 5 << 40)
    assert [format_size(nbytes) for nbytes in sizes] == ["0 B", "1023 B", "1.5 KiB", "3 GiB", "5 TiB"]
