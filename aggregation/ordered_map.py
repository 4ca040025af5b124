"""An ordered map over threads: jobs run ahead, their results come out in order."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Tag = TypeVar("Tag")
Result = TypeVar("Result")


def computed_ahead(
    jobs: Iterable[tuple[Tag, Callable[[], Result]]], *, threads: int
) -> Generator[tuple[Tag, Result], None, None]:
    """Yield the results in the order of the jobs, at most two for each thread of them running or finished.

    Args:
        jobs: each with a tag, which is yielded beside its result.
        threads: at least 1; the caller's thread is free for other work.

    Close it (`contextlib.closing`) if not all results are taken: no job runs afterwards.
    """
    ahead: deque[tuple[Tag, Future[Result]]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        try:
            for tag, job in jobs:
                if len(ahead) == 2 * threads:
                    first, future = ahead.popleft()
                    yield first, future.result()
                ahead.append((tag, pool.submit(job)))
            while ahead:
                first, future = ahead.popleft()
                yield first, future.result()
        finally:  # the caller may have stopped early
            for _, future in ahead:
                future.cancel()
