"""How fast the engine computes prompts, learnt from its steps: what a load has to beat."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable

_FEWEST = 32  # tokens of a request in a step: fewer are decodes, whose time says nothing about prompts
_WEIGHT = 0.25  # of the latest step, in the running mean


class PrefillSpeed:
    """A running mean of seconds a token, over steps that compute prompts more than anything else."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Nothing is known yet."""
        self._clock = clock
        self._numbers = itertools.count(1)
        self._running: dict[int, tuple[float, int]] = {}  # steps of prompts: when it began, and its tokens
        self._ended = clock()
        self._token: float | None = None

    def began(self, tokens: Iterable[int]) -> int | None:
        """A step is on its way. tokens: how many it computes of each of its requests.

        Returns the number by which to tell its end; None for a step whose time says nothing about prompts.
        """
        of_each = list(tokens)
        of_prompts = sum(count for count in of_each if count >= _FEWEST)
        if not of_prompts or 2 * of_prompts < sum(of_each):
            return None
        number = next(self._numbers)
        self._running[number] = (self._clock(), of_prompts)
        return number

    def ended(self, number: int | None = None) -> None:
        """A step has its results. Steps in flight together take their time one after another, in order."""
        now, last = self._clock(), self._ended
        self._ended = now
        if number is None or number not in self._running:
            return
        began, tokens = self._running[number]
        self._running = {later: step for later, step in self._running.items() if later > number}
        latest = (now - max(began, last)) / tokens
        self._token = latest if self._token is None else self._token + _WEIGHT * (latest - self._token)

    def seconds(self, tokens: int) -> float | None:
        """How long so many tokens of a prompt take; None before anything is known."""
        return None if self._token is None else self._token * tokens
