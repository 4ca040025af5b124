"""The note about a wait: a command that waits for longer than a second prints what it waits for."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from atoll.cli.printing import is_silent, note

SAY_S = 1.0
"""Seconds of waiting after which the person reads what the command waits for."""


@contextmanager
def waiting_for(what: str, limit: str) -> Iterator[None]:
    """Print `waiting for WHAT (LIMIT)` to standard error once, if the block still runs after `SAY_S`.

    Args:
        what: the thing that the block waits for, such as `the coordinator at 127.0.0.1:7070`.
        limit: the end of the wait, in words: `up to 30 s`, or what ends it.
    """
    if is_silent.get():  # which the timer's thread would not know
        yield
        return
    timer = threading.Timer(SAY_S, note, [f"waiting for {what} ({limit})"])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
