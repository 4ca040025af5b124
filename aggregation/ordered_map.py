"""Work that is done ahead on threads, and comes out in its order."""

from collections import deque
from collections.abc import Callable, Generator, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

Tag = TypeVar("Tag")
Result = TypeVar("Result")


def computed_ahead(
    jobs: Iterable[tuple[Tag, Callable[[], Result]]], *, threads: int
) -> Generator[tuple[Tag, Result], None, None]:
    """The results in the order of the jobs, of which no more than two for each thread are under way or finished.

    Args:
        jobs: each with a tag that comes out beside its result.
        threads: at least 1; the caller's own does something else meanwhile.

    Close it (`contextlib.closing`) when not all results are taken: no job runs afterwards.
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
        finally:  # whoever asks may have stopped asking
            for _, future in ahead:
                future.cancel()
