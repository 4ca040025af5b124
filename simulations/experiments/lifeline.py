"""The pipe that ends a sweep's cells with the sweep, even if it is killed.

Each cell's standard input is a pipe without data whose write end the sweep holds: end of file means that the sweep has
ended. An environment variable tells the cell to watch it.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "ATOLL_ENDS_WITH_ITS_INPUT"


@contextmanager
def lifeline() -> Iterator[int]:
    """Open the pipe, and yield the descriptor for the cells' standard input."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(reader)
        os.close(writer)


def end_with_the_sweep() -> None:
    """End this process abruptly when the sweep that started it ends; without a sweep, do nothing."""
    if os.environ.pop(VARIABLE, None):
        threading.Thread(target=_wait_and_end, name="end-with-the-sweep", daemon=True).start()


def _wait_and_end() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
