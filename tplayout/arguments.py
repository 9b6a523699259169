"""Arguments and options of any part: the error for a wrong type, and sizes as people write them.

Pure; imports nothing of the project but its errors.
"""

import re
from decimal import Decimal
from typing import Any

from tplayout.errors import ConfigError

SIZE_EXAMPLES = (
    "4096, 64K, 10MiB, 1.5G (K, M, G and T are powers of 1024, with or without iB; KB, MB, GB and TB of 1000)"
)

_SIZE = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)\s*(?:([KMGT])(i?B?))?B?", re.ASCII | re.IGNORECASE)
_MOST = 2**63 - 1


def check_type(name: str, value: Any, kinds: type | tuple[type, ...], wanted: str) -> None:
    """ConfigError unless value is one of kinds. A bool is no int. wanted: in words. Only the value's type is shown.

    It may be a secret.
    """
    if isinstance(value, kinds) and not (isinstance(value, bool) and bool not in _each(kinds)):
        return
    found = "None" if value is None else f"a value of type {type(value).__name__}"
    raise ConfigError(f"{name} must be {wanted}, not {found}")


def _each(kinds: type | tuple[type, ...]) -> tuple[type, ...]:
    return kinds if isinstance(kinds, tuple) else (kinds,)


def parse_size(text: str) -> int:
    """Bytes of a size such as those of SIZE_EXAMPLES, in any case, blanks allowed in front of the unit.

    Raises ValueError for anything else, and for sizes of 2**63 bytes or more.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text[:40]!r} is no size: write {SIZE_EXAMPLES}")
    base = 1000 if (match[3] or "").upper() == "B" else 1024
    nbytes = int(Decimal(match[1]) * base ** ("KMGT".index(match[2].upper()) + 1 if match[2] else 0))
    if nbytes > _MOST:
        raise ValueError(f"{text[:40]!r} is more bytes than any store has")
    return nbytes


def format_size(nbytes: float) -> str:
    """Bytes for people: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(nbytes) < 1024:
            return f"{nbytes:.4g} {unit}"
        nbytes /= 1024
    return f"{nbytes:.4g} TiB"
