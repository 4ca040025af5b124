"""The asyncio shell around one run's machine: it waits, it writes down, it acts.

Every event goes through `post`: the machine decides at once, in memory; the event and all rows that follow from it are
written by the next group commit; only then are its effects carried out and its poster told. So nothing leaves the
building before it is on disk, and a crash at any instant is recovered from by replay.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from concurrent.futures import Executor
from dataclasses import dataclass, replace

from atoll.aggregation.codecs.names import family_of
from atoll.protocol import crash_points
from atoll.protocol.atoll_pb2 import ServerMessage
from atoll.protocol.vocabulary import TERMINAL, ClientId, Digest, RunId, RunState, Version
from atoll.protocol.wire.allocator import MUCH_BYTES, give_back
from atoll.server.clock import Clock
from atoll.server.config.run import RunConfig
from atoll.server.files.run_store import KeptUpdate
from atoll.server.folding.evaluator import EvaluationFailed, Evaluator
from atoll.server.folding.reducer import Reducer
from atoll.server.hosting import messages
from atoll.server.hosting.control_streams import Hub
from atoll.server.hosting.event_rows import Decided, add_rows
from atoll.server.hosting.retention import Keep, Retention
from atoll.server.journal.journal import Batch, DiskFull, EvaluationRow, Journal
from atoll.server.rounds.events import (
    Abandon,
    Aggregate,
    Aggregated,
    AggregationFailed,
    AskEvaluation,
    CohortDrawn,
    Commit,
    DrawCohort,
    Effect,
    EndRun,
    EvaluateModel,
    Event,
    Invite,
    ModelEvaluated,
    OpenNextRound,
    Release,
    RoundDue,
    SamplerFailed,
    TimePassed,
    UpdateReceived,
    UploadBegun,
)
from atoll.server.rounds.open_round import Effects
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.selection.oort import Oort
from atoll.server.selection.sampling import Sampler, draw
from atoll.server.threads import on_thread, on_thread_of_its_own
from atoll.server.views.narration import narrate

logger = logging.getLogger(__name__)

DISK_RETRY_S = 1.0
UNHURRIED_S = 0.05
"""So long an event that nobody waits for may wait for others that are written with it."""

SAMPLER_TIMEOUT_S = 60.0
EVALUATIONS_WAITING_MAX = 16
"""Versions that may wait for the server's own data; each stays on disk meanwhile."""


@dataclass(slots=True)
class _Posted:
    """An event that was decided and is not yet on disk."""

    effects: Effects
    lines: tuple[str, ...]
    keep: Keep | None  # the event ended a round, or the run
    done: "asyncio.Future[Effects]"


class RunDriver:
    """One run: its machine, and the hands that carry out what it decides."""

    def __init__(
        self,
        run_id: RunId,
        config: RunConfig,
        task: str,
        machine: RunMachine,
        seq: int,
        *,
        journal: Journal,
        journal_thread: Executor,
        reducer: Reducer,
        evaluator: Evaluator,
        sampler: Sampler | Oort,
        hub: Hub,
        clock: Clock,
        crash: Callable[[BaseException], None],
        keep_rounds: int,
        is_in_flight: Callable[[Digest], bool],
        assign: Callable[[], int],
        tell_end: "Callable[[RunDriver, RunState, str], None]",
    ) -> None:
        self.run_id, self.config, self.task, self.machine = run_id, config, task, machine
        self.reducer = reducer
        self.ended = asyncio.Event()
        self.retention = Retention(
            run_id,
            reducer,
            journal,
            journal_thread,
            keep_rounds=keep_rounds,
            is_in_flight=is_in_flight,
            spawn=self._spawn,
        )
        self.listeners: list[Callable[[Effects], None]] = []  # called after effects were carried out
        self._seq = seq
        self._journal, self._journal_thread = journal, journal_thread
        self._evaluator, self._sampler, self._hub, self._clock = evaluator, sampler, hub, clock
        self._crash, self._assign, self._tell_end = crash, assign, tell_end
        self._posted: list[_Posted] = []
        self._rows = Batch()  # of all that was posted
        self._wake = asyncio.Event()
        self._is_broken = False
        self._last: asyncio.Future[Effects] | None = None  # of the newest event
        self._timer: asyncio.TimerHandle | None = None
        self._next_round: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._valuing: set[asyncio.Task[None]] = set()  # metrics that are being computed from their sums
        self._evaluations: asyncio.Queue[Version] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    # ------------------------------------------------------------ events in

    def post(self, event: Event, kept: KeptUpdate | None = None) -> "asyncio.Future[Effects]":
        """Let the machine decide about an event; the future is done when the decision is on disk and carried out.

        Args:
            event: what happened.
            kept: the update that was received; what is known of it is written with the event that accepts it.
        """
        try:
            return self._post(event, kept)
        except BaseException as error:  # memory may have moved on without the journal: nothing more is written
            self._is_broken = True
            self._crash(error)
            raise

    def _post(self, event: Event, kept: KeptUpdate | None) -> "asyncio.Future[Effects]":
        if self._is_broken:
            raise RuntimeError(f"run {self.run_id} cannot go on; the journal brings it back")
        now = self._clock.now()
        effects = self.machine.receive(event, now)
        self._seq += 1
        done = self._last = self._loop.create_future()
        lines = tuple(narrate(self.machine, event, effects))  # read now, told when it is on disk
        if isinstance(event, UpdateReceived):
            self.retention.received(event.update.digest, self._seq)
        decided = Decided(self.run_id, self._seq, now, event, effects)
        add_rows(self._rows, decided, self.machine, kept, num_bytes=self.reducer.num_bytes)
        has_end = any(isinstance(effect, Commit | Abandon | EndRun) for effect in effects)
        keep = Keep.after(self._seq, self.machine, self.config.round) if has_end else None
        self._posted.append(_Posted(effects, lines, keep, done))
        if isinstance(event, UploadBegun):  # nobody waits for it: it may go onto the disk with the next one
            self._loop.call_later(UNHURRIED_S, self._wake.set)
        else:
            self._wake.set()
        self._arm_timer()
        return asyncio.shield(done)  # whoever waits may go away

    async def on_disk(self) -> None:
        """Wait until all that was decided so far is on disk: an answer that rests on it may leave only then."""
        if self._last is not None and not self._last.done():
            self._wake.set()
            await asyncio.shield(self._last)

    def start(self) -> None:
        """Begin to write, act and wait."""
        self._spawn(self._write_and_act())
        self._spawn(self._evaluate())

    async def stop(self) -> None:
        """End the hands; what was posted and not yet written is lost, as in a crash, and nobody was told."""
        if self._timer is not None:
            self._timer.cancel()
        self.reducer.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._evaluator.close()

    def _arm_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if (deadline := self.machine.deadline) is not None:
            self._timer = self._loop.call_later(max(0.0, deadline - self._clock.now()), self._time_passed)

    def _time_passed(self) -> None:
        deadline = self.machine.deadline
        if deadline is None or self._clock.now() < deadline:
            self._arm_timer()  # it moved, or the loop's clock woke us a hair early
            return
        self.post(TimePassed())

    # ------------------------------------------------------------ onto the disk

    async def _write_and_act(self) -> None:
        """One group commit after the other: whatever was posted while the last one was being written."""
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
            for row in rows.evaluations:
                self._valuing.add(self._spawn(self._add_values(row)))
            for p in posted:
                for line in p.lines:
                    logger.info("%s: %s", self.run_id, line)
                for effect in p.effects:
                    self._act(effect)
                p.done.set_result(p.effects)
                if p.keep is not None:
                    self.retention.round_ended(p.keep)
                for listener in self.listeners:
                    listener(p.effects)

    async def _commit(self, rows: Batch) -> None:
        """Write, and while the disk is full keep everybody waiting: nothing is acknowledged, nothing is lost."""
        if rows.snapshots:
            crash_points.reached("snapshot.before")
        while True:
            try:
                await self._loop.run_in_executor(self._journal_thread, self._journal.commit, rows)
                break
            except DiskFull as error:
                logger.error("the journal cannot be written, the run waits for space: %s", error)
                await asyncio.sleep(DISK_RETRY_S)
        if rows.snapshots:
            crash_points.reached("snapshot.after")

    # ------------------------------------------------------------ effects out

    def _act(self, effect: Effect) -> None:
        """Carry out one effect; never waits. Accept and Reject go to whoever posted; the records are on disk."""
        match effect:
            case Invite(client_id):
                self._hub.send(client_id, self._invitation(effect))
            case Release(client_id):
                self._hub.send(client_id, messages.release(effect, run_id=self.run_id))
            case AskEvaluation(client_id):
                self._hub.send(client_id, self._evaluation_request(effect))
            case DrawCohort():
                self._spawn(self._draw(effect))
            case Aggregate():
                self._spawn(self._aggregate(effect))
            case EvaluateModel(version):
                self._evaluations.put_nowait(version)
            case OpenNextRound():
                self._wait_for_the_next_round()
            case Commit(version=version):
                crash_points.reached("publish.before")
                self.reducer.publish(version)
                crash_points.reached("publish.after")
            case EndRun(state, cause):
                self._end(state, cause)

    def _wait_for_the_next_round(self) -> None:
        """Open the next round in a while; a pause of before a stop and a resume no longer counts."""
        if self._next_round is not None:
            self._next_round.cancel()
        seconds = self.config.pause if self.machine.ledger.next_round > 1 else 0.0  # before the first there is none
        self._next_round = self._loop.call_later(seconds, self._open_next_round)

    def _open_next_round(self) -> None:
        if self.machine.ledger.state is RunState.RUNNING:
            self.post(RoundDue())

    def _invitation(self, effect: Invite) -> ServerMessage:
        version = self.reducer.version(effect.base_version)
        return messages.invitation(
            effect,
            run_id=self.run_id,
            task=self.task,
            digest=version.digest,
            manifest=version.manifest_bytes,
            data=version.small_data,
            seed=messages.training_seed(self.config.seed, self.config.name, effect.round_id, effect.client_id),
            local=self.config.local,
            algorithm=self.config.aggregation.algorithm,
            codec=self._codec_for(effect.client_id),
            rank=self._assign(),
            model_seed=self.config.seed,
            grace=self.config.round.grace,
            now=self._clock.now(),
        )

    def _codec_for(self, client_id: ClientId) -> str:
        """The run's codec, when the client speaks it; otherwise its update comes plain."""
        name = self.config.aggregation.codec_name
        return name if family_of(name) in self._hub.codecs_of(client_id) else ""

    def _evaluation_request(self, effect: AskEvaluation) -> ServerMessage:
        version = self.reducer.version(effect.version)
        return messages.evaluation_request(
            effect,
            run_id=self.run_id,
            task=self.task,
            digest=version.digest,
            manifest=version.manifest_bytes,
            local=self.config.local,
            model_seed=self.config.seed,
            now=self._clock.now(),
        )

    def _end(self, state: RunState, cause: str) -> None:
        self._tell_end(self, state, cause)
        self._spawn(self._say_ended())

    async def _say_ended(self) -> None:
        """When the last measures are written down, and what nobody needs is gone."""
        if self._valuing:
            await asyncio.wait(self._valuing)
        await self.retention.finish()
        if self.machine.ledger.state in TERMINAL:  # it may have been resumed meanwhile
            self.ended.set()
            await self._evaluator.rest()

    # ------------------------------------------------------------ what takes time

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> "asyncio.Task[None]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[None]") -> None:
        """Our own mistake ends the process: the journal brings it back (DESIGN: ours -> crash, recover by replay)."""
        self._tasks.discard(task)
        self._valuing.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("run %s cannot go on", self.run_id, exc_info=error)
            self._crash(error)

    async def _draw(self, effect: DrawCohort) -> None:
        """The sampler may be the user's own code: it runs on a thread, and what it raises costs the round."""

        def drawn() -> tuple[ClientId, ...]:
            return draw(
                self._sampler,
                seed=self.config.seed,
                round_id=effect.round_id,
                count=effect.count,
                candidates=effect.candidates,
                number=effect.number,
                relaxed=effect.relaxed,
            )

        try:
            if self.config.cohort.is_ours:
                clients = drawn()
            else:
                clients = await asyncio.wait_for(on_thread_of_its_own(drawn), SAMPLER_TIMEOUT_S)
        except Exception as error:
            logger.error("the sampler failed in round %d", effect.round_id, exc_info=error)
            self.post(SamplerFailed(effect.round_id, _detail(error)))
            return
        self.post(CohortDrawn(effect.round_id, clients))

    async def _aggregate(self, effect: Aggregate) -> None:
        """Fold on a thread; while the disk is full the round waits, and keeps every update."""
        begun, open_round = time.perf_counter(), self.machine.round
        if open_round is not None and sum(update.num_bytes for update in open_round.held) >= MUCH_BYTES:
            await on_thread(None, give_back)
        while True:
            try:
                digest = await self.reducer.fold(effect)
                break
            except DiskFull as error:
                logger.error("round %d cannot be aggregated, it waits for space: %s", effect.round_id, error)
                await asyncio.sleep(DISK_RETRY_S)
            except (ValueError, OSError) as error:
                logger.error("the aggregation of round %d failed", effect.round_id, exc_info=error)
                self.post(AggregationFailed(effect.round_id, _detail(error)))
                return
        logger.debug("round %d folded in %.3f s", effect.round_id, time.perf_counter() - begun)
        self.post(Aggregated(effect.round_id, Digest(digest)))

    async def _evaluate(self) -> None:
        """Run versions on the server's own data, one after the other; rounds do not wait for it."""
        while True:
            version = await self._evaluations.get()
            if self._evaluations.qsize() >= EVALUATIONS_WAITING_MAX:
                self.post(ModelEvaluated(version, None, "passed over: too many newer versions were waiting"))
                continue
            statistics, detail = None, ""
            try:
                found = self._evaluator.cannot or await self._evaluator.evaluate(await self.reducer.whole(version))
                statistics, detail = (None, found) if isinstance(found, str) else (found, "")
            except (EvaluationFailed, OSError) as error:
                detail = _detail(error)
                logger.error("version %d could not be evaluated: %s", version, detail)
            self.post(ModelEvaluated(version, statistics, detail))

    async def _add_values(self, row: EvaluationRow) -> None:
        """Only the task's own code knows what its metrics make of their sums."""
        if row.statistics is None:
            return
        try:
            values = await self._evaluator.values(row.statistics)
        except EvaluationFailed as error:
            logger.error("the metrics of version %d have no values: %s", row.version, _detail(error))
            return
        await self._commit(Batch(evaluations=[replace(row, values=values)]))


def _detail(error: Exception) -> str:
    """What went wrong, as text that can be written down: a file's name may hold what is no text."""
    kind = "" if isinstance(error, EvaluationFailed) else f"{type(error).__name__}: "
    return f"{kind}{error}"[:2000].encode(errors="replace").decode()
