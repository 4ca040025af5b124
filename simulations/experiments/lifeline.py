"""A sweep's cells end when the sweep is gone, also when it was killed and could tell them nothing.

Each cell's standard input is a pipe into which nobody writes and whose other end the sweep holds: that it ends means
that the sweep has. A variable of the environment says so to the cell.
"""

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

VARIABLE = "ATOLL_ENDS_WITH_ITS_INPUT"


@contextmanager
def lifeline() -> Iterator[int]:
    """The descriptor that is to be the cells' standard input."""
    reader, writer = os.pipe()
    try:
        yield reader
    finally:
        os.close(reader)
        os.close(writer)


def end_with_the_sweep() -> None:
    """Let this process end, as if it was killed, when the sweep that began it is gone; nothing where there is none."""
    if os.environ.pop(VARIABLE, None):
        threading.Thread(target=_wait_and_end, name="end-with-the-sweep", daemon=True).start()


def _wait_and_end() -> None:
    while os.read(0, 1):
        pass
    os._exit(1)
