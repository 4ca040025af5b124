"""The reporter of an operation: notes and waits, of which its caller learns while it works, and interruptions."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from dataclasses import dataclass


class Wait:
    """A wait whose content can say how much of it is done; this one shows nothing."""

    def advance(self, more: float, total: float) -> None:
        """Show that `more` of `total` is done, in any unit: bytes, lines; threads may call it."""


@dataclass(frozen=True, slots=True)
class Reporter:
    """The caller's side of an operation; by default notes and waits go nowhere."""

    note: Callable[[str], object] = lambda text: None
    """Takes one line for a person."""
    waiting: Callable[[str, str], AbstractContextManager[Wait]] = lambda what, limit: nullcontext(Wait())
    """Surrounds a block that waits for something: (its name, the end of the wait in words) -> a context manager."""
    interrupting: Callable[[Callable[[], object]], AbstractContextManager[None]] = lambda interrupt: nullcontext()
    """Surrounds a block that saves its work if asked: (the function that asks it to end) -> a context manager."""


SILENT = Reporter()
_reporter: ContextVar[Reporter] = ContextVar("reporter", default=SILENT)


@contextmanager
def reporting_to(reporter: Reporter) -> Iterator[None]:
    """Let the operations that this thread calls in the block report to a caller."""
    token = _reporter.set(reporter)
    try:
        yield
    finally:
        _reporter.reset(token)


def note(text: str) -> None:
    """Tell the caller one line."""
    _reporter.get().note(text)


def waiting_for(what: str, limit: str) -> AbstractContextManager[Wait]:
    """Tell the caller what the block waits for, if it takes long.

    Args:
        what: the thing that the block waits for, such as `the coordinator at 127.0.0.1:7070`.
        limit: the end of the wait, in words: `up to 30 s`, or what ends it.
    """
    return _reporter.get().waiting(what, limit)


def interruptible(interrupt: Callable[[], object]) -> AbstractContextManager[None]:
    """Let the caller interrupt the block, which then saves its work; in the main thread.

    Args:
        interrupt: asks the block to end.
    """
    return _reporter.get().interrupting(interrupt)
