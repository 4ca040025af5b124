"""The end of a command's process, in time: whatever a peer, a thread or a library does meanwhile."""

import faulthandler
import signal
from collections.abc import Iterator
from contextlib import contextmanager

END_S = 20
"""Seconds that a process has for its end; a supervisor's patience is longer (30 s in docs/systemd)."""

EXIT_LATE = 128 + signal.SIGALRM
"""As a shell tells it."""

_is_ours = False


@contextmanager
def own_process() -> Iterator[None]:
    """Within the block, this process is there for one command, and ends with it."""
    global _is_ours
    _is_ours = True
    try:
        yield
    finally:
        _is_ours = False


def end_in_time(seconds: int = END_S) -> None:
    """From now on this process has so long to end. Then it dies of SIGALRM, and says where each of its threads was.

    What is durable is so already, and the next process replays the journal: nothing is lost that way. It is done by
    the kernel and in C, so it needs neither the event loop nor Python's lock. A process that is not ours (a test's) is
    left alone.
    """
    if _is_ours:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
        signal.alarm(seconds)
