"""A thread pool that several runs share, with round-robin scheduling between them.

However much work one run has queued, another run waits only for the running items and for one item of each run before
it in the rotation.
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class FairExecutor:
    """Pool of `num_threads` threads with one queue for each owner; usable from any thread."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._is_ending = False
        self._waiting: dict[Hashable, deque[tuple[Future[Any], Callable[[], Any]]]] = {}  # in order of rotation

    def of(self, owner: Hashable) -> Executor:
        """Return the pool as one owner uses it; the owner's work begins in the order of submission."""
        return _OwnerExecutor(self, owner)

    def hand_in(self, owner: Hashable, work: Callable[[], T]) -> "Future[T]":
        """Queue work for an owner.

        Raises:
            RuntimeError: after `shutdown`.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._is_ending:  # the pool itself may still accept work and never do it
                raise RuntimeError("this pool no longer accepts work: the process ends")
            self._pool.submit(self._do_next)
            self._waiting.setdefault(owner, deque()).append((future, work))
        return future

    def _do_next(self) -> None:
        """Run one item of the owner at the head of the rotation, which moves to its end."""
        with self._lock:
            if not self._waiting:
                return  # `shutdown` has cancelled it
            owner, queue = next(iter(self._waiting.items()))
            future, work = queue.popleft()
            del self._waiting[owner]
            if queue:
                self._waiting[owner] = queue
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    def shutdown(self) -> None:
        """Cancel all work that has not begun, and wait for the rest."""
        with self._lock:
            self._is_ending = True
            waiting, self._waiting = self._waiting, {}
        for queue in waiting.values():
            for future, _ in queue:
                future.cancel()
        self._pool.shutdown(cancel_futures=True)


class _OwnerExecutor(Executor):
    """Pool as one owner uses it; its threads end with `FairExecutor.shutdown`."""

    def __init__(self, pool: FairExecutor, owner: Hashable) -> None:
        self._pool, self._owner = pool, owner

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """Queue a call; see `FairExecutor.hand_in`."""
        return self._pool.hand_in(self._owner, partial(fn, *args, **kwargs))
