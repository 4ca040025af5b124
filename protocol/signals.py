"""The signals that make a process of Atoll exit cleanly, and SIGHUP, which a service without a terminal survives."""

import errno
import logging
import os
import signal
import termios
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from atoll.protocol import service_manager

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that end a command cleanly: Ctrl-C, a supervisor, and a terminal that closes."""

logger = logging.getLogger(__name__)

Handler = Callable[[int, FrameType | None], object]


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
