"""The end of a command by SIGINT, SIGTERM or SIGHUP at a moment at which the command does not handle them itself.

The person reads one line, `atoll: stopped by SIGTERM before a round began; nothing was written`; there is no traceback,
and what the command had opened is closed. `atoll.cli.main` begins this before anything slow is imported. A command
replaces the handlers while it can save its work, and says by `if_stopped` what is true at other times.

Python runs a handler between two instructions of the main thread, which may be in a call of C that no signal
interrupts, or about to sleep; or another thread has got the signal, and the main one sleeps on. So a thread watches
whether the handler has run.
"""

import atexit
import faulthandler
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

from atoll.protocol.signals import ENDING, Stopped, end_by_default, ending, leave_closed_terminal, survive_hang_up

INTERRUPTED = 130
"""The exit code of a command that a signal has ended, and 0 for a service, which ends in no other way."""

SERVICES = (["coordinator"], ["agent"], ["aggregator"], ["authority", "serve"])
"""The commands that run until a signal comes."""

LAUNCHER = "TORCHELASTIC_RUN_ID"
"""The environment variable of a rank under `torchrun`, which ends it: it must end at once, also in a wait in C."""

TELL_S = 5.0
"""Seconds from the end of a command until the person is told of threads for which its process waits."""

END_S = 5.0
"""Seconds to close what is open, after which the process ends all the same."""

LATE_S = 20
"""Seconds to shut down, whatever hangs; less than a supervisor waits (30 s in docs/systemd)."""

EXIT_LATE = 128 + signal.SIGALRM
"""The exit code of a process that missed this deadline, as a shell reports SIGALRM."""

AGAIN_S = 0.5
"""Seconds in which the main thread must begin to handle a signal, before it is sent to that thread again."""

_left = " before it began; nothing was written"
_code: int | None = None
_owns_process = False
_masks = threading.local()


def if_stopped(what: str) -> None:
    """Set what is true when a signal comes from now on: the end of the line that the person then reads.

    Raises:
        Stopped: as `check` does.
    """
    global _left
    check()
    _left = f" {what}" if what else ""


def check() -> None:
    """End the process if a signal has come.

    Raises:
        Stopped: a signal has come, and code of the user's or of a library has swallowed the exception or replaced it.
    """
    if _code is not None:
        raise Stopped(_code)


@contextmanager
def one_line() -> Iterator[None]:
    """Handle the signals of this process for the duration of the block, unless its parent has it ignore them.

    Whatever exception leaves the block after a signal, the exit code is that of the signal. After the block the command
    has ended, and its exit code stands: a signal while Python shuts down does not change it, but a second one does, and
    the first does while Python waits for threads of the task's, of which the person is told.
    """
    global _owns_process
    _owns_process = True
    if _is_service(sys.argv[1:]):
        survive_hang_up()
    handled = () if LAUNCHER in os.environ else ending()
    for number in handled:
        signal.signal(number, _stop)
    _watch()
    atexit.register(_leave)  # the first of all, so that Python calls it last
    os.register_at_fork(before=_block, after_in_parent=_unblock, after_in_child=_unblock_in_child)
    try:
        yield
    finally:
        _owns_process = False
        check()
        for number in handled:
            signal.signal(number, _ignore_one)
        signal.set_wakeup_fd(-1)
        timer = threading.Timer(TELL_S, _tell_of_threads)
        timer.daemon = True
        timer.start()


def end_in_time(seconds: int = LATE_S) -> None:
    """Give this process `seconds` to end; then SIGALRM kills it, and the stacks of all threads are written out.

    Nothing is lost: durable state is already on disk, and the next process replays the journal. The kernel's timer and
    a handler in C need neither the event loop nor Python's global lock. Outside of `one_line` (in a test's process)
    the call has no effect.
    """
    if _owns_process:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
        signal.alarm(seconds)


def _stop(number: int, _frame: FrameType | None) -> None:
    """Print the line, and end the process in order; the next signal ends it at once."""
    global _code
    _code = _code_of(sys.argv[1:])
    signal.signal(signal.SIGALRM, _end)
    signal.setitimer(signal.ITIMER_REAL, END_S)  # first: what follows may wait for a reader, or for a lock
    end_by_default()
    leave_closed_terminal()
    os.write(2, _line(number))
    sys.unraisablehook = lambda _: None  # a callback or a finalizer that the exception interrupts would print it
    if "logging" in sys.modules:  # and a library would log it that closes what it holds, as pools of connections do
        sys.modules["logging"].disable()
    raise Stopped(_code)


def _line(number: int) -> bytes:
    return f"atoll: stopped by {signal.Signals(number).name}{_left}\n".encode()


def _watch() -> None:
    """Start the thread that learns of each signal from the handler in C, which runs at once in whatever thread."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    threading.Thread(target=_see_to_signals, args=(reading,), name="signals", daemon=True).start()


def _see_to_signals(reading: int) -> None:
    """End the process by a signal whose handler here has not run in time, or that has not ended it in time.

    A command that has handlers of its own, as it can save its work, ends by itself.
    """
    while numbers := os.read(reading, 64):
        for number in filter(ENDING.__contains__, numbers):
            time.sleep(AGAIN_S)
            if _is_left_to_us(number):
                signal.pthread_kill(threading.main_thread().ident or 0, number)
                time.sleep(END_S)
            elif _code is not None:
                time.sleep(END_S)
            if _code is not None:
                os._exit(_code)
            if _is_left_to_us(number):
                if select.select([], [2], [], 0)[1]:  # else nobody reads the line
                    os.write(2, _line(number))
                os._exit(_code_of(sys.argv[1:]))


def _is_left_to_us(number: int) -> bool:
    return _code is None and signal.getsignal(number) is _stop


def _block() -> None:
    """Keep signals waiting during a fork: Python drops one that reaches the child before it has begun."""
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)


def _unblock() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _unblock_in_child() -> None:
    """Give a process that the task forks the default handlers: its parent ends it."""
    signal.set_wakeup_fd(-1)  # a signal of the child is none of the parent's
    if signal.getsignal(signal.SIGINT) is _stop:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is _stop:
            signal.signal(number, signal.SIG_DFL)
    _unblock()


def _ignore_one(_number: int, _frame: FrameType | None) -> None:
    end_by_default()
    if _threads():
        os._exit(INTERRUPTED)


def _tell_of_threads() -> None:
    if names := _threads():
        waits = "the command has ended, and waits for threads of the task's; Ctrl-C ends them"
        os.write(2, f"atoll: {waits}: {', '.join(names)}\n".encode())


def _threads() -> list[str]:
    """Return the names of the threads for which Python waits at its end, but this one and the first."""
    mine = (threading.main_thread(), threading.current_thread())
    return [each.name for each in threading.enumerate() if each not in mine and not each.daemon]


def _end(_number: int, _frame: FrameType | None) -> None:
    os._exit(INTERRUPTED if _code is None else _code)


def _leave() -> None:
    """End a stopped process before Python takes its handlers away: from then on the alarm would kill it."""
    if _code is not None:
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(_code)


def _code_of(arguments: list[str]) -> int:
    """Return the exit code of the command after a signal; --check of a service has not found the settings sound."""
    return 0 if _is_service(arguments) and "--check" not in arguments else INTERRUPTED


def _is_service(arguments: list[str]) -> bool:
    return any(arguments[: len(words)] == words for words in SERVICES)
