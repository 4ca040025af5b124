"""Threads that several runs share: of the work that waits, each run's comes in turn.

However much one run has handed in, another one waits for the work that is under way and for one piece of each run
before it, never for all that is queued.
"""

import threading
from collections import deque
from collections.abc import Callable, Hashable
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from functools import partial
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


class Turns:
    """So many threads, and a queue for each owner; may be used from any thread."""

    def __init__(self, num_threads: int, name: str) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)
        self._lock = threading.Lock()
        self._is_ending = False
        self._waiting: dict[Hashable, deque[tuple[Future[Any], Callable[[], Any]]]] = {}  # the next owner first

    def of(self, owner: Hashable) -> Executor:
        """The threads, as one owner uses them; its own work begins in the order in which it was handed in."""
        return _Lane(self, owner)

    def hand_in(self, owner: Hashable, work: Callable[[], T]) -> "Future[T]":
        """Let `work` be done when it is the owner's turn.

        Raises:
            RuntimeError: after `shutdown`.
        """
        future: Future[T] = Future()
        with self._lock:
            if self._is_ending:  # the pool may still take what it will not do
                raise RuntimeError("these threads take no work any more: the process ends")
            self._pool.submit(self._do_next)
            self._waiting.setdefault(owner, deque()).append((future, work))
        return future

    def _do_next(self) -> None:
        """One piece of work of the owner whose turn it is, who then is the last."""
        with self._lock:
            if not self._waiting:
                return  # cancelled meanwhile
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
        """Cancel what has not begun, and wait for what has."""
        with self._lock:
            self._is_ending = True
            waiting, self._waiting = self._waiting, {}
        for queue in waiting.values():
            for future, _ in queue:
                future.cancel()
        self._pool.shutdown(cancel_futures=True)


class _Lane(Executor):
    """One owner's share of the threads, which end with `Turns.shutdown`."""

    def __init__(self, turns: Turns, owner: Hashable) -> None:
        self._turns, self._owner = turns, owner

    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> "Future[T]":
        """See `Turns.hand_in`."""
        return self._turns.hand_in(self._owner, partial(fn, *args, **kwargs))
