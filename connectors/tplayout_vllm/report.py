"""What the scheduler's side tells the metrics: increases of the Stager's counters, and how its slots stand.

Layer: below scheduler.py. Called every step, so what looks at every slot is done once a second.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping

from tplayout.staging.stager import Stager
from tplayout_vllm.metrics import COUNTERS, TPLayoutStats

_GAUGES_S = 1.0
_FAMILIES = {"save_skips": "save", "save_errors": "save-error", "load_errors": "load-error"}


class Report:
    """Remembers what was reported, so that each call returns what is new."""

    def __init__(self, stager: Stager) -> None:
        self._stager = stager
        self._counted: Counter[str] = Counter()
        self._skipped: Counter[str] = Counter()
        self._gauges_at = 0.0

    def take(self, own: Mapping[str, int], unkeyable: Mapping[str, int]) -> TPLayoutStats:
        """Increases since the last call. own, unkeyable: the scheduler's counts, the latter by reason."""
        now = {**self._stager.counters(), **own}
        counted = Counter({name: now[name] for name in COUNTERS if name in now})
        skipped = Counter({f"request-{reason}": count for reason, count in unkeyable.items()})
        for family, prefix in _FAMILIES.items():
            skipped.update({f"{prefix}-{reason}": count for reason, count in now[family].items()})
        fresh, skips = counted - self._counted, skipped - self._skipped
        self._counted, self._skipped = counted, skipped
        return TPLayoutStats.of(fresh, skips, self._gauges())

    def _gauges(self) -> dict[str, float]:
        if time.monotonic() - self._gauges_at < _GAUGES_S:
            return {}
        self._gauges_at = time.monotonic()
        slots = self._stager.snapshot()["slots"]
        return {
            "staging_slots": self._stager.plan.slots,
            "staging_used": slots["used"],
            "staging_clean": slots["clean"],
            "store_healthy": float(all(state == "ok" for state in self._stager.health.values())),
        }
