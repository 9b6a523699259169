"""tplayout/format/canonical.py: RFC 8785 out, strict JSON in."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tplayout.errors import ConfigError, FormatError, Reason
from tplayout.format.canonical import MAX_DEPTH, canonical_json, format_number, parse_json

# RFC 8785, appendix B, and the borders of ECMAScript's notation.
NUMBERS = [
    (0.0, "0"),
    (-0.0, "0"),
    (5e-324, "5e-324"),
    (-5e-324, "-5e-324"),
    (1.7976931348623157e308, "1.7976931348623157e+308"),
    (9007199254740992, "9007199254740992"),
    (295147905179352830000.0, "295147905179352830000"),
    (9.999999999999997e22, "9.999999999999997e+22"),
    (1e23, "1e+23"),
    (999999999999999700000.0, "999999999999999700000"),
    (1e21, "1e+21"),
    (333333333.33333329, "333333333.3333333"),
    (0.000001, "0.000001"),
    (1e-7, "1e-7"),
    (-0.0000033333333333333333, "-0.0000033333333333333333"),
    (1424953923781206.2, "1424953923781206.2"),
    (10000, "10000"),
    (10000.0, "10000"),
    (1.5, "1.5"),
    (100, "100"),
]


@pytest.mark.parametrize(("number", "text"), NUMBERS)
def test_numbers_are_written_as_rfc_8785_says(number: float, text: str) -> None:
    """[M8]"""
    assert format_number(number) == text
    assert canonical_json(number) == text.encode()


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_every_double_survives(number: float) -> None:
    """[M8]"""
    assert float(format_number(number)) == number


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf, 2**53 + 1, 10**400, -(2**64) - 1])
def test_what_is_no_finite_double_is_refused(number: float) -> None:
    """[M8]"""
    with pytest.raises(ConfigError, match="double"):
        canonical_json({"a": [number]})


def test_members_are_sorted_by_utf16_code_units() -> None:
    value = {"\ue000": 1, "\U0001f600": 2, "b": 3, "a": 4}
    assert canonical_json(value).decode() == '{"a":4,"b":3,"\U0001f600":2,"\ue000":1}'


def test_text_is_escaped_as_rfc_8785_says() -> None:
    text = '\u20ac$\u000f\u000aA\'B"\\\\"/\u007f'
    assert canonical_json(text).decode() == '"\u20ac$\\u000f\\nA\'B\\"\\\\\\\\\\"/\u007f"'


def test_literals_and_nesting() -> None:
    value = {"b": [True, False, None, (), {}], "a": {"y": -1, "x": "1"}}
    assert canonical_json(value) == b'{"a":{"x":"1","y":-1},"b":[true,false,null,[],{}]}'


@pytest.mark.parametrize("value", [{1: 2}, b"bytes", object(), {"a": {3}}, "\ud800", {"\ud800": 1}])
def test_what_has_no_encoding_is_refused(value: object) -> None:
    with pytest.raises(ConfigError):
        canonical_json(value)


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(st.characters(codec="utf-8"), max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(st.characters(codec="utf-8")), inner),
    max_leaves=12,
)


@given(JSON)
def test_canonical_json_is_json_and_a_fixed_point(value: object) -> None:
    data = canonical_json(value)
    assert parse_json(data, len(data)) == value
    assert canonical_json(parse_json(data, len(data))) == data
    assert canonical_json(json.loads(data, parse_int=float)) == data


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b'{"a":1,"a":1}', Reason.DUPLICATE_NAME),
        (b'{"b":{"a":1,"\\u0061":2}}', Reason.DUPLICATE_NAME),
        (b'{"a":NaN}', Reason.NOT_JSON),
        (b'{"a":-Infinity}', Reason.NOT_JSON),
        (b'{"a":1e999}', Reason.NOT_JSON),
        (b'{"a":' + b"9" * 5000 + b"}", Reason.NOT_JSON),
        (b'{"a":0.' + b"1" * 5000 + b"}", Reason.NOT_JSON),
        (b'{"a":1} x', Reason.NOT_JSON),
        (b"", Reason.NOT_JSON),
        (b"\xef\xbb\xbf{}", Reason.NOT_JSON),
        (b'{"a":"\xff"}', Reason.NOT_UTF8),
        (rb'{"a":["x\ud800"]}', Reason.NOT_UTF8),
        (rb'{"\uDFFF":1}', Reason.NOT_UTF8),
        (rb'["\udc00\ud800"]', Reason.NOT_UTF8),
        (b"[" * (MAX_DEPTH + 1), Reason.TOO_DEEP),
        (b'{"a":' * 20000, Reason.TOO_DEEP),
        (b"[" * 200, Reason.TOO_LARGE),
    ],
)
def test_strict_parser_names_the_defect(data: bytes, reason: Reason) -> None:
    """[M11] [M30]"""
    cap = 100 if reason is Reason.TOO_LARGE else 2**20
    with pytest.raises(FormatError) as caught:
        parse_json(data, cap)
    assert caught.value.reason is reason


def test_a_whole_surrogate_pair_is_a_character() -> None:
    assert parse_json(rb'"\ud83d\ude00 \\ud800"', 100) == "\U0001f600 \\ud800"


def test_brackets_in_text_are_not_depth() -> None:
    text = "[{" * 100 + '\\"'
    assert parse_json(canonical_json([text]), 2**20) == [text]


def test_depth_limits_of_writer_and_reader_agree() -> None:
    """[M11]"""
    deepest: list[object] = []
    for _ in range(MAX_DEPTH - 1):
        deepest = [deepest]
    assert parse_json(canonical_json(deepest), 2**20) == deepest
    with pytest.raises(ConfigError, match="deeper"):
        canonical_json([deepest])
