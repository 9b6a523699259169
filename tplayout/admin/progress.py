"""How long work says how far it is."""

from typing import Protocol


class Progress(Protocol):
    """Called now and then, from the thread that called the work."""

    def __call__(self, done: int, total: int | None, nbytes: int) -> None:
        """done, total: objects (total is None if not known); nbytes: read or written so far."""


def silent(done: int, total: int | None, nbytes: int) -> None:
    """Progress that nobody watches."""
