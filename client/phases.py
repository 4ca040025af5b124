"""Phases of a round's work at a site: load, train, spool, upload, each with its instants, for the site's traces."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from atoll.client.session.events import Key
from atoll.protocol.log_fields import number_of

LOAD, TRAIN, SPOOL, UPLOAD = "load", "train", "spool", "upload"


@dataclass(frozen=True, slots=True)
class Phase:
    """One phase that has ended."""

    name: str
    run_number: int
    run_id: str
    round_id: int
    begun: float
    """Instants [s since the epoch]; durations are those of a clock that never jumps."""
    ended: float
    fault: str = ""
    """What went wrong, as a word; empty: nothing."""


class Phases:
    """Listeners of the phases of an agent's rounds; without listeners a phase costs nothing."""

    def __init__(self) -> None:
        self.listeners: list[Callable[[Phase], None]] = []
        """Called on the event loop, once for each phase of a round that has ended."""

    def note(self, name: str, key: Key, begun: float, ended: float | None = None, *, fault: str = "") -> None:
        """Tell the listeners of a phase, if its run has a number, from which ids of spans follow.

        Args:
            name: the phase.
            key: the job of the round.
            begun: its beginning, by `time.monotonic`.
            ended: its end; None: now.
            fault: what went wrong.
        """
        kind, run_id, round_id = key
        if not self.listeners or kind != "round" or not (number := number_of(run_id)):
            return
        now, instant = time.monotonic(), time.time()
        end = instant - (0.0 if ended is None else now - ended)
        phase = Phase(name, number, run_id, round_id, instant - (now - begun), end, fault)
        for listener in self.listeners:
            listener(phase)

    @contextmanager
    def timed(self, name: str, key: Key) -> Iterator[None]:
        """Note the block as a phase, with its error if it raises one."""
        begun = time.monotonic()
        try:
            yield
        except BaseException as error:
            self.note(name, key, begun, fault=fault_of(error))
            raise
        self.note(name, key, begun)


def fault_of(error: BaseException) -> str:
    """Return an error as a word: the reason of a failure, or the name of its class; its text may be about the data."""
    if isinstance(error, asyncio.CancelledError):
        return "cancelled"
    return str(getattr(error, "reason", "") or type(error).__name__)
