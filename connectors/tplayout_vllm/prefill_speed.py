"""How fast the engine computes prompts, learnt from its steps: what a load has to beat."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable

_FEWEST = 32  # tokens of a request in a step: fewer are decodes, whose time says nothing about prompts
_WEIGHT = 0.25  # of the latest step, in the running mean
_MOST_BEHIND = 16  # steps without a result, more than any engine has in flight: some ended without telling


class PrefillSpeed:
    """A running mean of seconds a token, over steps that compute prompts more than anything else."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is known yet."""
        self._clock = clock
        self._running: deque[tuple[float, int]] = deque(maxlen=_MOST_BEHIND)
        self._ended = clock()
        self._token: float | None = None

    def began(self, tokens: Iterable[int]) -> None:
        """A step is on its way. tokens: how many it computes of each of its requests."""
        of_each = list(tokens)
        of_prompts = sum(count for count in of_each if count >= _FEWEST)
        self._running.append((self._clock(), of_prompts if 2 * of_prompts >= sum(of_each) else 0))

    def ended(self) -> None:
        """The oldest of those steps has its results. Steps in flight together take their time one after another."""
        if not self._running:
            return
        now = self._clock()
        began, tokens = self._running.popleft()
        seconds = now - max(began, self._ended)
        self._ended = now
        if tokens:
            latest = seconds / tokens
            self._token = latest if self._token is None else self._token + _WEIGHT * (latest - self._token)

    def seconds(self, tokens: int) -> float | None:
        """How long so many tokens of a prompt take; None before anything is known."""
        return None if self._token is None else self._token * tokens
