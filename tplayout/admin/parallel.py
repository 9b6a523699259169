"""Many store operations at a time, a bounded number in flight, results in order."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from tplayout.storage.base import Store

_BATCH = 256

T = TypeVar("T")
R = TypeVar("R")


def in_order(function: Callable[[T], R], items: Iterable[T], jobs: int) -> Iterator[R]:
    """function(item) of each item, computed by `jobs` threads, in the items' order.

    At most twice as many calls as threads are begun ahead of the consumer. An error, Ctrl-C or a consumer that stops
    cancels what has not begun, and waits for what has: each operation has its deadline.
    """
    pool = ThreadPoolExecutor(jobs, thread_name_prefix="tplayout")
    pending: deque[Future[R]] = deque()
    try:
        for item in items:
            pending.append(pool.submit(function, item))
            if len(pending) >= 2 * jobs:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def are_there(store: Store, names: Sequence[str]) -> list[bool]:
    """Which objects are there, of any number: a batch at a time, since each has the deadline of one operation."""
    batches = [names[start : start + _BATCH] for start in range(0, len(names), _BATCH)]
    return [found for batch in batches for found in store.exists(batch)]
