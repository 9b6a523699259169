"""A limit on bytes a second that several threads share."""

import threading
import time


class RateLimit:
    """Spreads bytes over time. None: no limit."""

    def __init__(self, bytes_per_second: float | None) -> None:
        self._rate = bytes_per_second
        self._lock = threading.Lock()
        self._free_at = 0.0

    def take(self, nbytes: int) -> None:
        """Wait until nbytes more may be moved. What is moved first is not waited for."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            start = max(now, self._free_at)
            self._free_at = start + nbytes / self._rate
        if start > now:
            time.sleep(start - now)
