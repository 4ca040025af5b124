"""Prefetching: a thread draws the items of an iterator before they are needed."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_END: Any = object()


def ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """Yield the same items in the same order, while one thread draws the next `depth` of them.

    An error is raised in the place of its item. The thread ends when this iterator is closed or garbage-collected.
    """
    executor = ThreadPoolExecutor(1, thread_name_prefix="atoll-data")
    waiting: deque[Future[T]] = deque()
    try:
        while True:
            while len(waiting) <= depth:
                waiting.append(executor.submit(next, items, _END))
            if (item := waiting.popleft().result()) is _END:
                return
            yield item
    finally:
        executor.shutdown(cancel_futures=True)
