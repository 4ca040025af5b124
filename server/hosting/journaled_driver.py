"""The asyncio shell around a run's machine, of rounds or of messages: timer, write-ahead journal, effects.

Every event enters through `post`. The machine decides at once, in memory; the next group commit writes the event and
all rows that follow from it; only then are its effects carried out and its future is done. So no effect leaves the
process before its cause is on disk, and replay recovers from a crash at any instant.
"""

import asyncio
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar, cast

from atoll.ground.durable import DiskFull
from atoll.ground.process import crash_points
from atoll.protocol.log_fields import context_about
from atoll.protocol.threads import begin_on_thread
from atoll.protocol.vocabulary import RunId
from atoll.server.clock import MonotoneClock
from atoll.server.files.run_store import KeptUpdate
from atoll.server.hosting.run_parts import SharedParts
from atoll.server.journal.rows import Batch
from atoll.server.rounds.events import TimePassed, UploadBegun
from atoll.server.views.narration import LogLine

logger = logging.getLogger(__name__)

DISK_RETRY_S = 1.0
UNHURRIED_S = 0.05
"""Time that an event without a waiting caller may wait for others in the same group commit [s]."""

E = TypeVar("E")
F = TypeVar("F")
In = TypeVar("In", contravariant=True)
Out = TypeVar("Out", covariant=True)


class Machine(Protocol[In, Out]):
    """A pure state machine: events in, effects out."""

    @property
    def deadline(self) -> float | None:
        """The time at which the machine must receive TimePassed [s since the epoch]; None: no timer runs."""

    def receive(self, event: In, now: float) -> tuple[Out, ...]:
        """Advance by one event and return its effects."""


@dataclass(frozen=True, slots=True)
class Decision:
    """Driver's additions to a decision of its machine, beside the rows of the group commit."""

    lines: tuple[str, ...]
    """The lines of the log, about the state after the event; they are printed once it is on disk."""
    then: Callable[[], None] | None = None
    """Called after the effects were carried out; None: nothing."""


@dataclass(slots=True)
class _Posted(Generic[F]):
    """Event that the machine has decided and that is not yet on disk."""

    effects: tuple[F, ...]
    decision: Decision
    done: "asyncio.Future[tuple[F, ...]]"


class MachineTimer:
    """Timer that follows the deadline of a machine.

    Args:
        loop: the loop that it runs on.
        clock: the clock of the deadlines.
        deadline: returns the current deadline [s since the epoch], or None.
        passed: called at the deadline; arms the timer again, through the event that it posts.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        clock: MonotoneClock,
        deadline: Callable[[], float | None],
        passed: Callable[[], object],
    ) -> None:
        self._loop, self._clock, self._deadline, self._passed = loop, clock, deadline, passed
        self._handle: asyncio.TimerHandle | None = None

    def arm(self) -> None:
        """Wait for the current deadline instead of an earlier one."""
        self.cancel()
        if (deadline := self._deadline()) is not None:
            self._handle = self._loop.call_later(max(0.0, deadline - self._clock.now()), self._fire)

    def cancel(self) -> None:
        """Stop the timer."""
        if self._handle is not None:
            self._handle.cancel()

    def _fire(self) -> None:
        deadline = self._deadline()
        if deadline is None or self._clock.now() < deadline:
            self.arm()  # the deadline moved, or the loop's timer fired a little early
        else:
            self._passed()


class JournaledDriver(ABC, Generic[E, F]):
    """Driver of one run, as far as it is the same for every kind of machine.

    A kind adds the rows of an event (`_decided`) and carries out effects (`_act`).

    Args:
        run_id: the run.
        machine: its machine, new or replayed.
        seq: the number of the last event that the machine has received.
        shared: the parts that all runs of the coordinator share.
    """

    def __init__(self, run_id: RunId, machine: Machine[E, F], seq: int, shared: SharedParts) -> None:
        self.run_id = run_id
        self.ended = asyncio.Event()
        self.listeners: list[Callable[[tuple[F, ...]], None]] = []  # called after effects were carried out
        self._seq, self._shared, self._clock = seq, shared, shared.clock
        self._receive = machine.receive
        self._posted: list[_Posted[F]] = []
        self._rows = Batch()  # rows of the events in `_posted`
        self._wake = asyncio.Event()
        self._is_broken = False
        self._last: asyncio.Future[tuple[F, ...]] | None = None  # number of the newest event
        self._tasks: set[asyncio.Task[None]] = set()
        self._loop = asyncio.get_running_loop()
        passed = cast(E, TimePassed())  # an event of any kind
        self._timer = MachineTimer(self._loop, shared.clock, lambda: machine.deadline, lambda: self.post(passed))

    @abstractmethod
    def _decided(self, event: E, effects: tuple[F, ...], now: float, kept: KeptUpdate | None) -> Decision:
        """Add the rows that follow from an event, whose number is `_seq`, to `_rows`."""

    @abstractmethod
    def _act(self, effect: F) -> None:
        """Carry out one effect without waiting."""

    def _written(self, rows: Batch) -> None:
        """Handle rows that are on disk, before the effects of their events are carried out."""

    def _acted(self) -> None:
        """Handle that all effects of a group commit were carried out."""

    # ------------------------------------------------------------ events in

    def post(self, event: E, kept: KeptUpdate | None = None) -> "asyncio.Future[tuple[F, ...]]":
        """Pass an event to the machine, and queue its rows and effects.

        Args:
            event: the event.
            kept: the durable update that the event received; its row is written with the event that accepts it.

        Returns:
            The event's effects, as soon as they are on disk and carried out.
        """
        try:
            return self._decide(event, kept)
        except BaseException as error:  # the machine may be ahead of the journal: nothing more is written
            self._is_broken = True
            self._shared.crash(error)
            raise

    def _decide(self, event: E, kept: KeptUpdate | None) -> "asyncio.Future[tuple[F, ...]]":
        if self._is_broken:
            raise RuntimeError(f"run {self.run_id} is broken until a restart replays its journal")
        now = self._clock.now()
        effects = self._receive(event, now)
        self._seq += 1
        done = self._last = self._loop.create_future()
        self._posted.append(_Posted(effects, self._decided(event, effects, now, kept), done))
        if isinstance(event, UploadBegun):  # no caller waits for it: it may be written with the next event
            self._loop.call_later(UNHURRIED_S, self._wake.set)
        else:
            self._wake.set()
        self._timer.arm()
        return asyncio.shield(done)  # the caller may be cancelled

    async def on_disk(self) -> None:
        """Wait until all past decisions are on disk; an answer based on them must not be sent before."""
        if self._last is not None and not self._last.done():
            self._wake.set()
            await asyncio.shield(self._last)

    def start(self) -> None:
        """Start the task that writes events to the journal and carries out their effects."""
        self._spawn(self._write_and_act())

    async def stop(self) -> None:
        """Cancel the tasks of the run.

        Posted events that are not yet written are lost, as in a crash: no effect of them has left.
        """
        self._timer.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # ------------------------------------------------------------ onto the disk

    async def _write_and_act(self) -> None:
        """Run group commits forever: each writes all events posted during the previous one, then executes effects."""
        while True:
            await self._wake.wait()
            self._wake.clear()
            posted, self._posted = self._posted, []
            rows, self._rows = self._rows, Batch()
            if not posted:
                continue
            crash_points.reached("journal.before_write")
            await self._commit(rows)
            crash_points.reached("journal.after_write")
            self._written(rows)
            for one in posted:
                self._carry_out(one)
            self._acted()

    def _carry_out(self, posted: _Posted[F]) -> None:
        for line in posted.decision.lines:
            fields = line.fields if isinstance(line, LogLine) else {}
            logger.info("%s: %s", self.run_id, line, extra={**fields, "run": self.run_id})
        for effect in posted.effects:
            self._act(effect)
        posted.done.set_result(posted.effects)
        if posted.decision.then is not None:
            posted.decision.then()
        for listener in self.listeners:
            listener(posted.effects)

    async def _commit(self, rows: Batch) -> None:
        """Write a batch. While the disk is full, retry: nothing is acknowledged, and nothing is lost."""
        if rows.snapshots:
            crash_points.reached("snapshot.before")
        while True:
            begun = self._loop.time()
            try:
                await begin_on_thread(self._shared.journal_thread, self._shared.journal.commit, rows)
                break
            except DiskFull as error:
                logger.error("the journal cannot be written, the run waits for space: %s", error)
                await asyncio.sleep(DISK_RETRY_S)
        for listener in self._shared.on_commit:
            listener(rows, self._loop.time() - begun)
        if rows.snapshots:
            crash_points.reached("snapshot.after")

    # ------------------------------------------------------------ long work

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> "asyncio.Task[None]":
        task = self._loop.create_task(work, context=context_about(run=self.run_id))
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[None]") -> None:
        """End the process after an internal error: the next process recovers by replay."""
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            text, about = "run %s ends this process after an internal error", {"run": self.run_id}
            logger.critical(text, self.run_id, exc_info=error, extra=about)
            self._shared.crash(error)
