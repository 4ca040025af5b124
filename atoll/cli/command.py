"""The command that this process runs: its signals, its exit code, and its end in time.

This module is imported before anything slow, so that a signal ends a command cleanly from the beginning.
"""

import atexit
import faulthandler
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Sequence
from contextlib import suppress
from types import FrameType

from atoll.protocol.signals import (
    ENDING,
    ExitCode,
    Stopped,
    end_by_default,
    ending,
    leave_closed_terminal,
    survive_hang_up,
)

SERVICES = (["coordinator"], ["agent"], ["aggregator"], ["authority", "serve"], ["chaos", "proxy"], ["dashboard"])
"""The commands that run until a signal comes."""

LAUNCHER = "TORCHELASTIC_RUN_ID"
"""The environment variable of a rank under `torchrun`, which ends it: it must end at once, also in a wait in C."""

TELL_S = 5.0
"""Seconds from the end of a command until the person is told of threads for which its process waits."""

END_S = 5.0
"""Seconds to close what is open, after which the process ends all the same."""

LATE_S = 20
"""Seconds to shut down, whatever hangs; less than a supervisor waits (30 s in docs/systemd)."""

AGAIN_S = 0.5
"""Seconds in which the main thread must begin to handle a signal, before it is sent to that thread again."""


class Command:
    """The command of a command line; within its `with` block it decides how this process ends.

    At SIGINT, SIGTERM or SIGHUP the person reads one line, `atoll: stopped by SIGTERM before a round began; nothing was
    written`; there is no traceback, and what the command had opened is closed. A command replaces the handlers while it
    can save its work, and says by `if_stopped` what is true at other times. Whatever exception leaves the block after a
    signal, the exit code is the signal's. Without one, an unexpected exception is a bug: traceback, exit code 70,
    recovery by replay.

    Python runs a handler between two instructions of the main thread, which may be in a call of C that no signal
    interrupts, or about to sleep; or another thread has got the signal, and the main one sleeps on. So a thread watches
    whether the handler has run.

    After the block the command has ended, and its exit code stands: a signal while Python shuts down does not change
    it, but a second one does, and the first does while Python waits for threads of the task's, of which the person is
    told.

    Args:
        arguments: the command line, without the name of the program.
    """

    def __init__(self, arguments: Sequence[str] = ()) -> None:
        self._is_service = any(list(arguments[: len(words)]) == words for words in SERVICES)
        is_check = "--check" in arguments  # which has not found the settings sound
        self.code_if_stopped = ExitCode.OK if self._is_service and not is_check else ExitCode.STOPPED
        self._when = "before it began; nothing was written"
        self._owns_process = self._is_stopped = False
        self._handled: Sequence[signal.Signals] = ()
        self._masks = threading.local()

    def __enter__(self) -> "Command":
        """Handle the signals of this process, unless its parent has it ignore them."""
        self._owns_process = True
        if self._is_service:
            survive_hang_up()
        self._handled = () if LAUNCHER in os.environ else ending()
        for number in self._handled:
            signal.signal(number, self._stop)
        self._watch()
        atexit.register(self._leave)  # the first of all, so that Python calls it last
        os.register_at_fork(before=self._block, after_in_parent=self._unblock, after_in_child=self._release_child)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _frames: object) -> None:
        self.check()
        for number in self._handled:
            signal.signal(number, self._ignore_one)
        signal.set_wakeup_fd(-1)
        timer = threading.Timer(TELL_S, self._tell_of_threads)
        timer.daemon = True
        timer.start()
        if isinstance(error, Exception):
            traceback.print_exception(error)
            raise SystemExit(ExitCode.BUG) from None

    def if_stopped(self, when: str) -> None:
        """Set the end of the message about a signal: what is true if a signal stops the command from now on.

        Raises:
            Stopped: as `check` does.
        """
        self.check()
        self._when = when

    def check(self) -> None:
        """Raise `Stopped` if a signal has come.

        Raises:
            Stopped: a signal has come, and code of the user's or of a library has swallowed the exception or replaced
                it.
        """
        if self._is_stopped:
            raise Stopped(self.code_if_stopped)

    def end_in_time(self, seconds: int = LATE_S) -> None:
        """Set a timer that kills this process after `seconds` (SIGALRM), and writes out the stacks of all threads.

        Nothing is lost: durable state is already on disk, and the next process replays the journal. The kernel's timer
        and a handler in C need neither the event loop nor Python's global lock. In a process that runs more than this
        command, as a test's, the call has no effect.
        """
        if self._owns_process:
            signal.signal(signal.SIGALRM, signal.SIG_DFL)
            faulthandler.register(signal.SIGALRM, all_threads=True, chain=True)
            signal.alarm(seconds)

    def _stop(self, number: int, _frame: FrameType | None) -> None:
        """Handle a signal: print one line, and end the process cleanly; the next signal ends it at once."""
        self._is_stopped = True  # first: what follows may wait for a reader, or for a lock
        end_by_default()
        leave_closed_terminal()
        os.write(2, self._line(number))
        sys.unraisablehook = lambda _: None  # a callback or a finalizer that the exception interrupts would print it
        if "logging" in sys.modules:  # and a library would log it that closes what it holds, as pools of connections do
            sys.modules["logging"].disable()
        raise Stopped(self.code_if_stopped)

    def _line(self, number: int) -> bytes:
        return f"atoll: stopped by {signal.Signals(number).name} {self._when}".rstrip().encode() + b"\n"

    def _watch(self) -> None:
        """Start the thread that is told of each signal by Python's handler in C, which runs at once on any thread."""
        reading, writing = os.pipe()
        os.set_blocking(writing, False)
        signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
        threading.Thread(target=self._see_to_signals, args=(reading,), name="signals", daemon=True).start()

    def _see_to_signals(self, reading: int) -> None:
        """Kill the process by a signal whose Python handler has not run, or has not ended the process, in time.

        A command that has handlers of its own, as it can save its work, ends by itself.
        """
        while numbers := os.read(reading, 64):
            for number in filter(ENDING.__contains__, numbers):
                time.sleep(AGAIN_S)
                if self._is_left_to_us(number):
                    signal.pthread_kill(threading.main_thread().ident or 0, number)
                elif not self._is_stopped:
                    continue
                time.sleep(END_S)
                if self._is_left_to_us(number):
                    if select.select([], [2], [], 0)[1]:  # else nobody reads the line
                        os.write(2, self._line(number))
                    self._is_stopped = True
                if self._is_stopped:
                    os._exit(self.code_if_stopped)

    def _is_left_to_us(self, number: int) -> bool:
        return not self._is_stopped and signal.getsignal(number) == self._stop

    def _block(self) -> None:
        """Block signals during a fork: Python drops one that reaches the child before it has begun."""
        self._masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, ENDING)

    def _unblock(self) -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, self._masks.before)

    def _release_child(self) -> None:
        """Restore the default signal handlers in a process that the task has forked: its parent ends it."""
        signal.set_wakeup_fd(-1)  # a signal of the child is none of the parent's
        for number in ENDING:
            if signal.getsignal(number) == self._stop:
                signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
        self._unblock()

    def _ignore_one(self, _number: int, _frame: FrameType | None) -> None:
        end_by_default()
        if _threads():
            os._exit(ExitCode.STOPPED)

    def _tell_of_threads(self) -> None:
        if names := _threads():
            waits = "the command has finished, and waits for threads that the task has started; Ctrl-C ends them"
            os.write(2, f"atoll: {waits}: {', '.join(names)}\n".encode())

    def _leave(self) -> None:
        """End a stopped process before Python ends its threads: from then on nothing would end a slow finalizer."""
        if self._is_stopped:
            for stream in (sys.stdout, sys.stderr):
                with suppress(OSError, ValueError):
                    stream.flush()
            os._exit(self.code_if_stopped)


def current() -> Command:
    """Return the command that this thread runs; in a test's process one that handles no signal."""
    import click

    return click.get_current_context().ensure_object(Command)


def if_stopped(when: str) -> None:
    """Set the end of the current command's message about a signal; see `Command.if_stopped`."""
    current().if_stopped(when)


def _threads() -> list[str]:
    """Return the names of the threads for which Python waits at its end, but this one and the first."""
    mine = (threading.main_thread(), threading.current_thread())
    return [each.name for each in threading.enumerate() if each not in mine and not each.daemon]
