"""How long work says how far it is."""

from typing import Protocol


class Progress(Protocol):
    """Called now and then, from the thread that called the work."""

    def __call__(self, done: int, total: int | None, nbytes: int) -> None:
        """done, total: objects (total is None if not known); nbytes: read or written so far."""


class Parts:
    """The progress of work that is done in parts, one after the other, as one."""

    def __init__(self, progress: Progress, total: int | None = None) -> None:
        """total: objects of all parts; None where only those of the parts so far are known."""
        self._progress = progress
        self._total = total
        self._end = 0
        self._nbytes = 0

    def part(self, objects: int | None = None) -> Progress:
        """Of the next part. objects: that it has, whether it tells of them or not; None for what it says itself."""
        begun, before = self._end, self._nbytes
        self._end += objects or 0

        def tick(done: int, total: int | None, nbytes: int) -> None:
            self._nbytes = before + nbytes
            if objects is None:
                self._end = begun + (done if total is None else total)
            self._progress(begun + done, self._end if self._total is None else self._total, self._nbytes)

        return tick


def silent(done: int, total: int | None, nbytes: int) -> None:
    """Progress that nobody watches."""
