"""The end of a process of Atoll: its exit codes, the signals that end it cleanly, and those that it survives."""

import errno
import logging
import os
import signal
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from enum import IntEnum
from types import FrameType

from atoll.protocol import service_manager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command cleanly: Ctrl-C, a supervisor, and a terminal that closes."""

logger = logging.getLogger(__name__)

Handler = Callable[[int, FrameType | None], object]


class ExitCode(IntEnum):
    """Exit code of a process of the program `atoll`; docs/running.md has a row for each."""

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


class Stopped(SystemExit):
    """Exit of the process by a signal; a SystemExit, which event loops and libraries let pass."""


def ending() -> tuple[signal.Signals, ...]:
    """Return the signals that end this process: `ENDING` without those that it ignores or survives.

    A parent such as `nohup` makes it ignore some; a service survives SIGHUP (`survive_hang_up`).
    """
    spared = (signal.SIG_IGN, _keep_running)
    return tuple(number for number in ENDING if signal.getsignal(number) not in spared)


def survive_hang_up() -> None:
    """Keep this service running at SIGHUP, unless its log goes to a terminal, which has closed then."""
    if not os.isatty(2) and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        signal.signal(signal.SIGHUP, _keep_running)


def _keep_running(_number: int, _frame: FrameType | None) -> None:
    """Log that the service keeps running; writing this line reopens a log file that was moved away."""
    line = "SIGHUP: a service keeps running; a log file that was moved away is reopened"
    threading.Thread(target=logger.info, args=(line,), daemon=True).start()  # the signal may interrupt another line


@contextmanager
def handled_by(handler: Handler) -> Iterator[None]:
    """Let a function handle the signals that end this process, within the block; in the main thread."""

    def handle(number: int, frame: FrameType | None) -> None:
        leave_closed_terminal()
        handler(number, frame)

    before = {number: signal.signal(number, handle) for number in ending()}
    try:
        yield
    finally:
        for number, previous in before.items():
            signal.signal(number, previous)


@contextmanager
def interrupting(interrupt: Callable[[], object]) -> Iterator[None]:
    """Call a function at the first signal that ends this process; a second signal ends the process at once."""

    def handle(_number: int, _frame: FrameType | None) -> None:
        interrupt()
        end_by_default()

    with handled_by(handle):
        yield


def end_by_default() -> None:
    """Let the next signal end this process at once."""
    for number in ending():
        signal.signal(number, signal.SIG_DFL)


def call_at_end(end: Callable[[], object], line: str) -> Callable[[], None]:
    """Call a function in the running event loop at each signal that ends this process.

    Args:
        end: the function, which begins the shutdown.
        line: the line of the log, with a place for the name of the signal: `stopped by %s: the rank ends`.

    Returns:
        A function that removes the handlers.
    """
    import asyncio  # imported here: a command that computes nothing imports little

    loop, numbers = asyncio.get_running_loop(), ending()

    def handle(number: signal.Signals) -> None:
        leave_closed_terminal()
        service_manager.tell(service_manager.STOPPING)
        logger.info(line, number.name)
        end()

    def remove() -> None:
        for number in numbers:
            loop.remove_signal_handler(number)

    for number in numbers:
        loop.add_signal_handler(number, handle, number)
    return remove


def leave_closed_terminal() -> None:
    """Redirect standard output and error to nowhere if their terminal has closed: each line would be an error (EIO)."""
    for stream in (1, 2):
        try:
            termios.tcgetattr(stream)
        except termios.error as error:
            if error.args[0] != errno.EIO:
                continue
            with suppress(OSError):
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, stream)
                os.close(nowhere)
