"""A deadline for the end of a command's process, which neither a peer nor a thread nor a library can delay."""

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager

END_S = 20
"""Seconds that the process may take to end; less than a supervisor waits (30 s in docs/systemd)."""

EXIT_LATE = 128 + signal.SIGALRM
"""The exit code of a process that missed the deadline, as a shell reports SIGALRM."""

_owns_process = False


@contextmanager
def own_process() -> Iterator[None]:
    """Mark this process as one that runs a single command and ends with it, for the duration of the block."""
    global _owns_process
    _owns_process = True
    try:
        yield
    finally:
        _owns_process = False


def end_in_time(seconds: int = END_S) -> None:
    """Give this process `seconds` to end; then SIGALRM kills it, and the stacks of all threads are written out.

    Nothing is lost: durable state is already on disk, and the next process replays the journal. The kernel's timer and
    a handler in C need neither the event loop nor Python's global lock. Outside of `own_process` (in a test's process)
    the call has no effect.
    """
    if _owns_process:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
        signal.alarm(seconds)
