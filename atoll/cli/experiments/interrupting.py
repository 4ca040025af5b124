"""The end in order of a simulated run on SIGINT or SIGTERM."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol


class Interruptible(Protocol):
    """A simulated run that a signal ends in order."""

    def interrupt(self) -> None:
        """Let the run end as soon as it can."""


@contextmanager
def with_signals(federation: "Interruptible") -> Iterator[None]:
    """Interrupt the run on SIGINT or SIGTERM; a second signal ends the process at once."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        federation.interrupt()
        for each in before:
            signal.signal(each, signal.SIG_DFL)

    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for each in before:
        signal.signal(each, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
