"""What an iterator gives, drawn by a thread before it is wanted."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

T = TypeVar("T")

_END: Any = object()


def ahead(items: Iterator[T], depth: int) -> Iterator[T]:
    """The same items in the same order; one thread draws `depth` of them while the last one is worked on.

    An error is raised where its item would have come. The thread ends when this iterator is closed or forgotten.
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
