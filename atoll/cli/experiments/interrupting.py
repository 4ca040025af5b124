"""The end in order of a simulated run on SIGINT, SIGTERM or SIGHUP."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from atoll.protocol.signals import end_by_default, handled_by


class Interruptible(Protocol):
    """A simulated run that a signal ends in order."""

    def interrupt(self) -> None:
        """Let the run end as soon as it can."""


@contextmanager
def with_signals(federation: "Interruptible") -> Iterator[None]:
    """Interrupt the run on SIGINT, SIGTERM or SIGHUP; a second signal ends the process at once."""

    def interrupt(_number: int, _frame: FrameType | None) -> None:
        federation.interrupt()
        end_by_default()

    with handled_by(interrupt):
        yield
