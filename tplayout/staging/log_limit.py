"""Log lines that may come by the thousand: the first of a kind, then one a minute that says how many were left out."""

import time
from collections.abc import Callable

_SECONDS = 60.0
_MOST_KINDS = 256


class LogLimit:
    """Decides a line at a time, by its kind. Used from one thread."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing was logged yet."""
        self._clock = clock
        self._kinds: dict[str, tuple[float, int]] = {}  # kind -> when the last line came, lines left out since

    def allow(self, kind: str) -> str | None:
        """None: leave this line out. Else what to append to it: how many were left out before, or nothing."""
        now = self._clock()
        last, left_out = self._kinds.get(kind, (now - _SECONDS, 0))
        if now - last < _SECONDS:
            self._kinds[kind] = (last, left_out + 1)
            return None
        if len(self._kinds) >= _MOST_KINDS:  # kinds come from a closed set; this is in case they do not
            self._kinds.clear()
        self._kinds[kind] = (now, 0)
        return f" ({left_out} more like it since the last such line)" if left_out else ""
