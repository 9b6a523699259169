"""How fast the engine computes prompts, learnt from its steps: what a load has to beat."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

_FEWEST = 32  # tokens a step: fewer are decodes, whose time says nothing about prompts
_WEIGHT = 0.25  # of the latest step, in the running mean
_MOST_BEHIND = 16  # steps without a result, more than any engine has in flight: some ended without telling


class PrefillSpeed:
    """A running mean of seconds a token, over steps that compute many."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is known yet."""
        self._clock = clock
        self._running: deque[tuple[float, int]] = deque(maxlen=_MOST_BEHIND)
        self._ended = clock()
        self._token: float | None = None

    def began(self, tokens: int) -> None:
        """A step is on its way that computes so many tokens."""
        self._running.append((self._clock(), tokens))

    def ended(self) -> None:
        """The oldest of those steps has its results. Steps in flight together take their time one after another."""
        if not self._running:
            return
        now = self._clock()
        began, tokens = self._running.popleft()
        seconds = now - max(began, self._ended)
        self._ended = now
        if tokens >= _FEWEST:
            latest = seconds / tokens
            self._token = latest if self._token is None else self._token + _WEIGHT * (latest - self._token)

    def seconds(self, tokens: int) -> float | None:
        """How long so many tokens of a prompt take; None before anything is known."""
        return None if self._token is None else self._token * tokens
