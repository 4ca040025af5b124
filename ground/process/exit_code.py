"""The exit codes of Atoll's processes; docs/running.md has a row for each."""

import signal
from enum import IntEnum


class ExitCode(IntEnum):
    """Exit code of a process of the program `atoll`."""

    OK = 0
    """The work is done, or a signal has ended a service."""
    FAILED = 1
    """A run has failed or was stopped."""
    OPERATOR = 2
    """An operator's mistake."""
    BUG = 70
    """A bug, with its traceback (EX_SOFTWARE of sysexits.h)."""
    AWAY = 75
    """A disk is full, or a disk, the database or a site's data are away: try again (EX_TEMPFAIL of sysexits.h)."""
    STOPPED = 128 + signal.SIGINT
    """A signal has ended a command before it was done; of whichever signal, as a shell reports Ctrl-C."""
    PIPE = 128 + signal.SIGPIPE
    """The reader of a pipe has closed it, as a shell reports SIGPIPE."""
    LATE = 128 + signal.SIGALRM
    """The process missed the deadline of its shutdown: what a shell reports of the kernel's SIGALRM."""
