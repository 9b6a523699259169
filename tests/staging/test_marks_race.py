"""A rank that marks its part while the I/O process looks at the marks has not given up."""

from types import SimpleNamespace

from tplayout.staging.io_process import IoProcess
from tplayout.staging.protocol import Save, Saved


class RacingRegion:
    """Marks that become complete between any two questions."""

    def __init__(self) -> None:
        self.asked = 0

    def _answer(self) -> bool:
        self.asked += 1
        return self.asked > 1

    def marked(self, *_: int) -> bool:
        return self._answer()

    def settled(self, *_: int) -> bool:
        return self._answer()


def test_a_mark_between_two_looks_is_no_refusal() -> None:
    save = Save(1, 0, 1, (0,), "00" * 32, False, sealed=False)
    dropped: list[Saved] = []
    taken: list[Save] = []
    process = IoProcess.__new__(IoProcess)
    process._bench = SimpleNamespace(region=RacingRegion())  # type: ignore[assignment]
    process._waiting = {save: float("inf")}
    process._cancelled, process._unsaved = set(), set()
    process._saves = SimpleNamespace(put=taken.append)  # type: ignore[assignment]
    process._send = dropped.append  # type: ignore[method-assign, assignment]
    for _ in range(3):
        process._look_at_marks()
    assert (taken, dropped) == ([save], [])
