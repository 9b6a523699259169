"""How long loads will take, learnt from those that were made."""

from __future__ import annotations

_WEIGHT = 0.2  # of the latest load, in running means: a store that is fast again is known as such after some ten loads
_ENOUGH = 1e-3  # relative spread of parallelism from which on a slope means something


class LoadSpeed:
    """seconds of a load = latency + share * loads at the same time, fitted to running means over recent loads.

    The two terms tell a store that is far away from one that is narrow: the first serves many loads in the time of
    one, the second does not. Least squares over exponentially weighted moments.
    """

    def __init__(self, parallel: int) -> None:
        """parallel: loads that can run at the same time. Nothing is known yet."""
        self._parallel = parallel
        self._moments: tuple[float, float, float, float] | None = None

    def add(self, seconds: float, together: int) -> None:
        """A load took so long, while so many ran, itself included."""
        k = float(min(max(together, 1), self._parallel))
        new = (k, seconds, k * k, k * seconds)
        old = self._moments or new
        mixed = [before + _WEIGHT * (now - before) for before, now in zip(old, new, strict=True)]
        self._moments = (mixed[0], mixed[1], mixed[2], mixed[3])

    def late(self, seconds: float, together: int) -> None:
        """Of loads that began together the first has not ended after so long, or the last. Counts if that is news."""
        expected = self.seconds(together)
        if expected is None or seconds > expected:
            self.add(seconds / max(1.0, together / self._parallel), together)  # most of them waited for a thread

    def seconds(self, count: int) -> float | None:
        """How long `count` loads will take that start together; None before anything is known."""
        if self._moments is None or count <= 0:
            return None if count > 0 else 0.0
        k, s, kk, ks = self._moments
        spread = kk - k * k
        # Without a spread the store is taken to be narrow: few loads then look quick, are tried, and make the spread.
        share = min(max((ks - k * s) / spread, 0.0), s / k) if spread > _ENOUGH * k * k else s / k
        together = min(count, self._parallel)
        return (s - share * k + share * together) * max(1.0, count / self._parallel)
