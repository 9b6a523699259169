"""Canonical JSON out, strict JSON in.

Out is RFC 8785 (JCS): members sorted by UTF-16 code units, no white space, UTF-8, and every number written as
the shortest decimal of an IEEE double, so 10000 and 10000.0 are the same bytes in every language. In refuses
what a lenient parser guesses about: duplicate members, NaN, deep nesting, numbers no double holds.
"""

import json
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tplayout.errors import ConfigError, FormatError, Reason

MAX_DEPTH = 16
MAX_EXACT = 2**53  # up to here every integer is a double
# Matches an unfinished text too and never backtracks: hostile input costs linear time.
_BRACKETS = re.compile(r'"(?:[^"\\]++|\\.)*+"?|[\[{\]}]', re.DOTALL)
_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
_escape = json.encoder.encode_basestring


def canonical_json(value: Any) -> bytes:
    """RFC 8785 bytes of a value made of dict, list, tuple, str, int, float, bool and None.

    Raises ConfigError for anything else: NaN, infinities, integers that no double holds exactly, member names
    that are not strings, lone surrogates.
    """
    try:
        return _encode(value, 0).encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(f"text with a lone surrogate has no canonical encoding: {error}") from None


def _encode(value: Any, depth: int) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _escape(value)
    if isinstance(value, int | float):
        return format_number(value)
    if depth >= MAX_DEPTH:
        raise ConfigError(f"value nested deeper than {MAX_DEPTH} levels")
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise ConfigError("member names must be strings")
        names = sorted(value, key=lambda name: name.encode("utf-16-be", "surrogatepass"))
        return "{" + ",".join(f"{_escape(name)}:{_encode(value[name], depth + 1)}" for name in names) + "}"
    if isinstance(value, Sequence) and not isinstance(value, bytes | bytearray | memoryview):
        return "[" + ",".join(_encode(item, depth + 1) for item in value) + "]"
    raise ConfigError(f"{type(value).__name__} has no canonical encoding")


def format_number(value: int | float) -> str:
    """ECMAScript's Number::toString of a double, which RFC 8785 prescribes."""
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number) or number != value:
        raise ConfigError(f"{str(value)[:40]} is not a finite IEEE double")
    if number == 0:
        return "0"
    sign = "-" if number < 0 else ""
    mantissa, _, exponent = repr(abs(number)).partition("e")
    whole, _, fraction = mantissa.partition(".")
    if fraction == "0":
        fraction = ""
    point = len(whole) + int(exponent or 0)  # digits in front of the decimal point
    digits = (whole + fraction).lstrip("0")
    point -= len(whole + fraction) - len(digits)
    digits = digits.rstrip("0")
    if 0 < point <= 21:
        text = digits.ljust(point, "0") if len(digits) <= point else f"{digits[:point]}.{digits[point:]}"
    elif -6 < point <= 0:
        text = "0." + "0" * -point + digits
    else:
        tail = f".{digits[1:]}" if len(digits) > 1 else ""
        text = f"{digits[0]}{tail}e{point - 1:+d}"
    return sign + text


def parse_json(data: bytes | memoryview, max_bytes: int) -> Any:
    """Parse UTF-8 JSON strictly; the size cap is checked before anything is decoded.

    Raises FormatError: too-large, not-utf8 (escaped halves of surrogate pairs included), too-deep, duplicate-name,
    not-json (NaN, infinities and numbers out of the range of a double included).
    """
    if len(data) > max_bytes:
        raise FormatError(Reason.TOO_LARGE, f"{len(data)} bytes of JSON, at most {max_bytes}")
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as error:
        raise FormatError(Reason.NOT_UTF8, f"at byte {error.start}") from None
    _check_depth(text)
    try:
        value = json.loads(text, object_pairs_hook=_unique, parse_constant=_refuse, parse_int=_int, parse_float=_float)
    except ValueError as error:
        raise FormatError(Reason.NOT_JSON, str(error)) from None
    if _SURROGATE.search(text):  # of a whole pair, most likely
        _check_text(value)
    return value


def _check_text(value: Any) -> None:
    try:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise FormatError(Reason.NOT_UTF8, "an escape that is half a surrogate pair") from None


def _check_depth(text: str) -> None:
    depth = 0
    for match in _BRACKETS.finditer(text):
        bracket = match.group()
        if bracket in "[{":
            depth += 1
            if depth > MAX_DEPTH:
                raise FormatError(Reason.TOO_DEEP, f"nested deeper than {MAX_DEPTH} levels")
        elif bracket in "]}":
            depth -= 1


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    members = dict(pairs)
    if len(members) != len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))  # type: ignore[func-returns-value]
        raise FormatError(Reason.DUPLICATE_NAME, repr(twice)[:100])
    return members


def _refuse(text: str) -> Any:
    raise ValueError(f"{text} is not JSON")


def _int(text: str) -> int | float:
    """RFC 8785 pads a large double's shortest digits with zeros, so such digits mean the nearest double."""
    if len(text) > 32:
        raise ValueError(f"integer of {len(text)} digits")
    value = int(text)
    return value if abs(value) <= MAX_EXACT else float(value)


def _float(text: str) -> float:
    number = float(text) if len(text) <= 64 else math.inf
    if not math.isfinite(number):
        raise ValueError(f"number {text[:40]} is out of range")
    return number
