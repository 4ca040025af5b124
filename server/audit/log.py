"""The audit log while it is written, on a separate thread: `record` waits for nothing.

Events go into a queue. The thread writes all queued events at once; a checkpoint, which signs the chain, follows after
EVENTS_MAX events, and SIGN_S seconds after the first unsigned one. A written event survives a crash of the process, a
signed one also a crash of the machine.
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

from atoll.ground.printable import count_of
from atoll.protocol.audit.chain import Checkpoint, Event, instant
from atoll.protocol.audit.files import APPEND_MAX, AuditFiles
from atoll.server.audit.actions import Action
from atoll.server.audit.budget import Budget

logger = logging.getLogger(__name__)

SIGN_S = 5.0
"""Longest time that an event remains without a checkpoint that signs it [s]."""
WITHHELD_S = 60.0
"""Interval at which the numbers of withheld lines are logged [s]."""
RETRY_S = 1.0
WAITING_MAX = 100_000
"""Number of events that may wait for a full disk; further ones are lost, and counted."""
CLOSE_S = 5.0
"""Time that the process's exit waits for the last line [s]."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Actor of an event, as the log names it."""

    name: str
    role: str
    on_behalf_of: str = ""
    """User for whom the caller says that it acts; empty: for itself. It proves nothing."""


COORDINATOR = Caller("coordinator", "coordinator")

_caller: ContextVar[Caller] = ContextVar("atoll_audit_caller", default=COORDINATOR)


@contextmanager
def acting(caller: Caller) -> Iterator[None]:
    """Attribute all events recorded within the block, also by tasks started there, to this caller."""
    token = _caller.set(caller)
    try:
        yield
    finally:
        _caller.reset(token)


class AuditLog:
    """Audit log that is being written. Any thread may call its methods; `record` never waits and never fails.

    Args:
        folder: see `protocol.audit.files.AuditFiles`.
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
        """The newest checkpoint; a party that stores it can later detect a truncated or rewritten log."""
        return self._files.checkpoint

    @property
    def damage(self) -> str:
        """Description of a broken chain that this process has found; empty: none."""
        return self._files.damage

    def record(
        self,
        action: Action,
        object_: str = "",
        outcome: str = "ok",
        digests: Mapping[str, str] = MappingProxyType({}),
        *,
        caller: Caller | None = None,
    ) -> None:
        """Record an event in the audit log.

        Args:
            action: the action.
            object_: the object that it concerned: a run's id, a client's name, a method.
            outcome: its result, without payloads and secrets.
            digests: the digests of the data that it concerned, by name.
            caller: the actor; None: the caller that `acting` names, or else the coordinator.
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
            on_behalf_of=by.on_behalf_of,
        )
        self._queue.put(event)

    def record_bounded(
        self,
        action: Action,
        object_: str = "",
        outcome: str = "ok",
        *,
        caller: Caller | None = None,
        counted_as: str = "",
    ) -> None:
        """Record an event that a caller can repeat at will; beyond the caller's budget it is only counted.

        Args:
            action: see `record`.
            object_: see `record`.
            outcome: see `record`.
            caller: see `record`.
            counted_as: the key of the shared budget, when callers choose the object; empty: the object.
        """
        who = f"{action} {counted_as or object_} by {(caller or _caller.get()).name}"
        with self._mutex:
            is_allowed = self._budget.allows(who, time.monotonic())
        if is_allowed:
            self.record(action, object_, outcome, caller=caller)

    def flush(self) -> None:
        """Wait until all recorded events are written and signed."""
        done = threading.Event()
        self._queue.put(done)
        while not done.wait(1.0):
            assert self._thread.is_alive(), "the audit log's thread has ended"

    def close(self) -> None:
        """Write and sign the rest; later events are lost. A full disk delays this by at most CLOSE_S."""
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
            events += self._missing(is_last=is_last)
            is_due = self._sign_by is not None and time.monotonic() >= self._sign_by
            if events or waiting or is_due:
                self._append(events, sign=bool(waiting) or is_due or is_last)
            for done in waiting:
                done.set()

    def _take(self) -> tuple[list[Event], list[threading.Event]]:
        """Remove and return the waiting events, at most those of one write; none if a checkpoint or a count is due."""
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

    def _missing(self, *, is_last: bool) -> list[Event]:
        """Return the log's events about withheld and lost lines, if they are due."""
        if not (is_last or self._num_lost or time.monotonic() >= self._withheld_by):
            return []
        self._withheld_by = time.monotonic() + WITHHELD_S
        with self._mutex:
            withheld, lost, self._num_lost = self._budget.withheld(), self._num_lost, 0
        now, by = instant(self._clock()), ("coordinator", "coordinator")
        events: list[Event] = []
        if withheld:
            whose = ", ".join(f"{count} {who}" for who, count in sorted(withheld.items(), key=lambda item: -item[1]))
            events.append(Event(now, *by, Action.AUDIT_WITHHELD, count_of(sum(withheld.values()), "line"), whose))
        if lost:
            events.append(
                Event(now, *by, Action.AUDIT_LOST, count_of(lost, "line"), "the disk has been full for too long")
            )
        return events

    def _append(self, events: list[Event], *, sign: bool) -> None:
        """Write events and, while the disk is full, retry; later events wait in the queue."""
        is_logged = False
        while True:
            try:
                self._files.append(events, sign=sign)
                break
            except OSError as error:
                if not is_logged:
                    logger.error("the audit log cannot be written, its lines wait: %s", error)
                is_logged = True
                if self._is_closing:
                    return
                time.sleep(RETRY_S)
        if not self._files.unsigned:
            self._sign_by = None
        elif self._sign_by is None:
            self._sign_by = time.monotonic() + SIGN_S
