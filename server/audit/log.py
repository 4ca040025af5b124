"""Says who did what, from a thread of its own: whoever says it waits for nothing.

What is said goes into a queue; the thread writes all that waits there at once, and lets a checkpoint follow after
every EVENTS_MAX events and SIGN_S seconds after the first that none signs. What is written outlives the process;
what is signed, the machine.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from pathlib import Path
from queue import Empty, SimpleQueue
from types import MappingProxyType
from typing import Self

from atoll.protocol.audit.chain import Checkpoint, Event, instant
from atoll.protocol.audit.files import APPEND_MAX, AuditFiles
from atoll.server.audit.actions import Action
from atoll.server.audit.budget import Budget

logger = logging.getLogger(__name__)

SIGN_S = 5.0
"""Seconds for which an event may be signed by no checkpoint."""
WITHHELD_S = 60.0
"""Seconds after which what was not written is counted."""
RETRY_S = 1.0
WAITING_MAX = 100_000
"""Events that wait for a disk that is full; further ones are lost, and counted."""
CLOSE_S = 5.0
"""Seconds that the end of the process waits for the last line."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who does something, as the log names them."""

    name: str
    role: str


COORDINATOR = Caller("coordinator", "coordinator")

_caller: ContextVar[Caller] = ContextVar("atoll_audit_caller", default=COORDINATOR)


@contextmanager
def acting(caller: Caller) -> Iterator[None]:
    """Whatever is said within the block, also by tasks that are begun there, was done by this caller."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)


class AuditLog:
    """An audit log that is being written. Methods may be called from any thread; `say` never waits, and never fails.

    Args:
        folder: see `audit_files.AuditFiles`.
        clock: seconds since the epoch.

    Raises:
        AuditUnusable, OSError: see `AuditFiles`.
    """

    def __init__(self, folder: Path, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._files = AuditFiles(folder, clock)
        self._queue: SimpleQueue[Event | threading.Event] = SimpleQueue()
        self._num_lost = 0
        self._budget, self._mutex = Budget(), threading.Lock()
        self._is_closing = False
        self._sign_by: float | None = None
        self._withheld_by = time.monotonic() + WITHHELD_S
        self._thread = threading.Thread(target=self._write, name="audit", daemon=True)
        self._thread.start()

    @property
    def checkpoint(self) -> Checkpoint | None:
        """The newest one: whoever remembers it will know when the log is cut off or written anew."""
        return self._files.checkpoint

    def say(
        self,
        action: Action,
        object_: str = "",
        outcome: str = "ok",
        digests: Mapping[str, str] = MappingProxyType({}),
        *,
        caller: Caller | None = None,
    ) -> None:
        """Somebody did something.

        Args:
            action: what.
            object_: to what: a run's id, a client's name, a method.
            outcome: what came of it. Neither payloads nor secrets.
            digests: of what it was about, by name.
            caller: who; None: whoever is `acting`, or the coordinator itself.
        """
        if self._queue.qsize() >= WAITING_MAX:
            with self._mutex:
                self._num_lost += 1
            return
        by = caller or _caller.get()
        event = Event(
            time=instant(self._clock()),
            actor=by.name,
            role=by.role,
            action=action,
            object=object_,
            outcome=outcome,
            digests=digests,
        )
        self._queue.put(event)

    def say_seldom(
        self,
        action: Action,
        object_: str = "",
        outcome: str = "ok",
        *,
        caller: Caller | None = None,
        counted_as: str = "",
    ) -> None:
        """The same of what a stranger can repeat as often as he likes: beyond his allowance it is only counted.

        Args:
            action, object_, outcome, caller: see `say`.
            counted_as: what shares one allowance, when strangers choose the object; empty: the object.
        """
        who = f"{action} {counted_as or object_} by {(caller or _caller.get()).name}"
        with self._mutex:
            is_allowed = self._budget.allows(who, time.monotonic())
        if is_allowed:
            self.say(action, object_, outcome, caller=caller)

    def flush(self) -> None:
        """Wait until what was said so far is written and signed."""
        done = threading.Event()
        self._queue.put(done)
        while not done.wait(1.0):
            assert self._thread.is_alive(), "the audit log's thread has ended"

    def close(self) -> None:
        """Write and sign the rest; nothing is said afterwards. A full disk does not hold it up for long."""
        self._is_closing = True
        self._queue.put(threading.Event())
        self._thread.join(CLOSE_S)
        if not self._thread.is_alive():
            self._files.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------ the thread

    def _write(self) -> None:
        is_last = False
        while not is_last:
            events, waiting = self._take()
            is_last = self._is_closing and self._queue.empty()
            events += self._of_itself(is_last=is_last)
            is_due = self._sign_by is not None and time.monotonic() >= self._sign_by
            if events or waiting or is_due:
                self._append(events, sign=bool(waiting) or is_due or is_last)
            for done in waiting:
                done.set()

    def _take(self) -> tuple[list[Event], list[threading.Event]]:
        """All that waits, up to what may be written at once; or nothing, when something else is due."""
        now, until = time.monotonic(), min(self._sign_by or self._withheld_by, self._withheld_by)
        events: list[Event] = []
        waiting: list[threading.Event] = []
        try:
            item = self._queue.get(timeout=max(0.0, until - now))
            while True:
                (events if isinstance(item, Event) else waiting).append(item)  # type: ignore[arg-type]
                if len(events) >= APPEND_MAX - 2:
                    break
                item = self._queue.get_nowait()
        except Empty:
            pass
        return events, waiting

    def _of_itself(self, *, is_last: bool) -> list[Event]:
        """What the log has to say of itself: what was not written."""
        if not (is_last or self._num_lost or time.monotonic() >= self._withheld_by):
            return []
        self._withheld_by = time.monotonic() + WITHHELD_S
        with self._mutex:
            withheld, lost, self._num_lost = self._budget.withheld(), self._num_lost, 0
        now, by = instant(self._clock()), ("coordinator", "coordinator")
        said: list[Event] = []
        if withheld:
            whose = ", ".join(f"{count} {who}" for who, count in sorted(withheld.items(), key=lambda item: -item[1]))
            said.append(Event(now, *by, Action.AUDIT_WITHHELD, f"{sum(withheld.values())} lines", whose))
        if lost:
            said.append(Event(now, *by, Action.AUDIT_LOST, f"{lost} lines", "the disk has been full for too long"))
        return said

    def _append(self, events: list[Event], *, sign: bool) -> None:
        """Write, and while the disk does not take it, try again: others wait in the queue."""
        is_told = False
        while True:
            try:
                self._files.append(events, sign=sign)
                break
            except OSError as error:
                if not is_told:
                    logger.error("the audit log cannot be written, its lines wait: %s", error)
                is_told = True
                if self._is_closing:
                    return
                time.sleep(RETRY_S)
        if not self._files.unsigned:
            self._sign_by = None
        elif self._sign_by is None:
            self._sign_by = time.monotonic() + SIGN_S
