"""An I/O process that notes when it fetches and verifies: run as tplayout.staging.io_process is, for `timeline.py`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.timeline import Trace
from tplayout.staging import io_jobs, io_process


def _traced(trace: Trace, what: str, call: Callable[..., Any]) -> Callable[..., Any]:
    def traced(*args: Any, **kwargs: Any) -> Any:
        with trace.span(what):
            return call(*args, **kwargs)

    return traced


def main() -> None:
    """Never returns."""
    open_bench = io_process.open_bench

    def traced_bench(*args: Any) -> io_jobs.Bench:
        trace = Trace("I/O")  # not before the process is detached: its pid is another then
        bench = open_bench(*args)
        for owner, name, what in ((bench.store, "get_into", "fetch"), (io_jobs, "verify", "verify")):
            setattr(owner, name, _traced(trace, what, getattr(owner, name)))
        return bench

    setattr(io_process, "open_bench", traced_bench)  # noqa: B010
    io_process.main()


if __name__ == "__main__":
    main()
