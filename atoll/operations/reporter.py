"""The reporter of an operation: notes and waits, of which its caller learns while it works, and interruptions."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass


class Wait:
    """A wait whose block reports how much is done; this base class shows nothing."""

    def advance(self, more: float, total: float) -> None:
        """Show that `more` of `total` is done, in any unit: bytes, lines; threads may call it."""


@dataclass(frozen=True, slots=True)
class Reporter:
    """The caller's side of an operation; by default it discards notes and waits."""

    note: Callable[[str], object] = lambda text: None
    """Receives one line for a person."""
    waiting: Callable[[str, str], AbstractContextManager[Wait]] = lambda what, limit: nullcontext(Wait())
    """Surrounds a block that waits for something: (its name, the end of the wait in words) -> a context manager."""
    interrupting: Callable[[Callable[[], object]], AbstractContextManager[None]] = lambda interrupt: nullcontext()
    """Surrounds a block that saves its work if asked: (the function that asks it to end) -> a context manager."""


SILENT = Reporter()
_reporter: ContextVar[Reporter] = ContextVar("reporter", default=SILENT)


@contextmanager
def reporting_to(reporter: Reporter) -> Iterator[None]:
    """Set the reporter of the operations that this thread calls in the block."""
    token = _reporter.set(reporter)
    try:
        yield
    finally:
        _reporter.reset(token)


def note(text: str) -> None:
    """Report one line to the operation's caller."""
    _reporter.get().note(text)


def waiting_for(what: str, limit: str) -> AbstractContextManager[Wait]:
    """Report to the operation's caller what the block waits for, if it takes long.

    Args:
        what: the thing that the block waits for, such as `the coordinator at 127.0.0.1:7070`.
        limit: the end of the wait, in words: `up to 30 s`, or what ends it.
    """
    return _reporter.get().waiting(what, limit)


def interruptible(interrupt: Callable[[], object]) -> AbstractContextManager[None]:
    """Make the block interruptible by the operation's caller: it then saves its work. In the main thread.

    Args:
        interrupt: asks the block to end.
    """
    return _reporter.get().interrupting(interrupt)
