"""A circuit breaker: after failures in a row the store is left alone, and tried again ever more rarely.

Layer: no I/O. It counts results, says whether work may go out, and logs each change once.
"""

import logging
from collections.abc import Callable

log = logging.getLogger("tplayout")

_FAILURES = 3
_FIRST_S = 1.0
_LONGEST_S = 30.0
_CALM_S = 60.0  # a store that fails again sooner is left alone for longer than the last time


class Breaker:
    """Guards one direction, "loads" or "saves". Closed: work goes out. Open: one trial after each pause."""

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        """Closed."""
        self._name = name
        self._clock = clock
        self._in_a_row = 0
        self._pause = 0.0
        self._retry_at = 0.0
        self._trying = False
        self._lasting = False
        self._last_pause = 0.0
        self._closed_at = 0.0
        self.kind = ""

    @property
    def closed(self) -> bool:
        """Work may go out."""
        return not self._pause

    @property
    def state(self) -> str:
        """ "ok", or why and for how long work is suspended."""
        if self.closed:
            return "ok"
        wait = max(0.0, self._retry_at - self._clock())
        return f"suspended ({self.kind}), " + ("being tried" if self._trying else f"next try in {wait:.0f} s")

    def trial(self) -> bool:
        """Open, and it is time to try: the caller must now send one piece of work and report its result."""
        if self.closed or self._trying or self._clock() < self._retry_at:
            return False
        self._trying = True
        return True

    def succeeded(self) -> None:
        """The store did what it was asked."""
        if self._lasting and not self._trying:
            return  # an answer to older work
        self._in_a_row = 0
        if not self.closed:
            self._last_pause, self._closed_at = self._pause, self._clock()
            self._pause, self._trying, self._lasting, self.kind = 0.0, False, False, ""
            log.warning("tplayout: the store works again, %s are resumed", self._name)

    def failed(self, kind: str, detail: str, lasting: bool = False) -> None:
        """The store did not. kind: a StorageErrorKind's value, or another. lasting: so it will be the next time."""
        self._in_a_row += 1
        if self.closed and not lasting and self._in_a_row < _FAILURES:
            return
        if self.closed or (lasting and not self._lasting):
            log.warning(
                "tplayout: %s are suspended after %d failure(s) in a row, the last: %s; serving goes on without them,"
                " the store is tried again from time to time",
                *(self._name, self._in_a_row, detail if detail.startswith(kind) else f"{kind}: {detail}"),
            )
            again = self._last_pause and self._clock() - self._closed_at < _CALM_S
            self._open(min(self._last_pause * 2, _LONGEST_S) if again else _FIRST_S, kind)
            self._lasting = lasting
        elif self._trying:
            self._open(min(self._pause * 2, _LONGEST_S), kind)

    def undecided(self) -> None:
        """The work that was the trial ended without an answer of the store."""
        self._trying = False

    def _open(self, pause: float, kind: str) -> None:
        self._pause, self._trying, self.kind = pause, False, kind
        self._retry_at = self._clock() + pause
