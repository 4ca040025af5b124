"""The lock by which the trainings of this process take turns: torch has one generator for all threads.

A training restores the state of the process that the caller had.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock

_turn = RLock()


@contextmanager
def in_turn() -> Iterator[None]:
    """Wait for the trainings of other threads; restore generators and torch's number of threads after the block."""
    from atoll.task.randomness import generators_kept

    with _turn, generators_kept(), threads_kept():
        yield


@contextmanager
def threads_kept() -> Iterator[None]:
    """Restore torch's number of threads after the block, if torch is in use already."""
    torch = sys.modules.get("torch")
    threads = torch.get_num_threads() if torch else 0
    try:
        yield
    finally:
        if torch and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)
