"""The asyncio shell around one run's machine: timers, write-ahead journal, effects.

Every event enters through `post`. The machine decides at once, in memory; the next group commit writes the event and
all rows that follow from it; only then are its effects carried out and its future is done. So no effect leaves the
process before its cause is on disk, and replay recovers from a crash at any instant.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

from atoll.parallel.task.metrics import finite, why_refused
from atoll.protocol import crash_points
from atoll.protocol.atoll_pb2 import ServerMessage
from atoll.protocol.durable import DiskFull
from atoll.protocol.threads import on_daemon_thread, on_thread
from atoll.protocol.vocabulary import TERMINAL, ClientId, Digest, RoundId, RunState, Version
from atoll.protocol.wire.allocator import MUCH_BYTES, give_back
from atoll.server.config.run import RunConfig
from atoll.server.files.run_store import KeptUpdate
from atoll.server.folding.evaluator import EvaluationFailed, Evaluator, detail_of
from atoll.server.hosting import messages
from atoll.server.hosting.app_conclusion import conclude
from atoll.server.hosting.event_rows import Decided, add_rows
from atoll.server.hosting.keep import Keep
from atoll.server.hosting.offered_codec import OfferedCodec
from atoll.server.hosting.retention import Retention
from atoll.server.hosting.run_parts import RunParts, SharedParts
from atoll.server.journal.journal import Batch, EvaluationRow, SettingsChange
from atoll.server.rounds.events import (
    Abandon,
    Aggregate,
    Aggregated,
    AggregationFailed,
    AskEvaluation,
    CohortDrawn,
    Commit,
    ComputeMetrics,
    DrawCohort,
    Effect,
    EndRun,
    EvaluateModel,
    Event,
    Invite,
    MetricsComputed,
    ModelEvaluated,
    OpenNextRound,
    Release,
    ResumeRequested,
    RoundDue,
    SamplerFailed,
    TimePassed,
    UpdateReceived,
    UploadBegun,
)
from atoll.server.rounds.open_round import Effects
from atoll.server.rounds.relevance import is_failure_news
from atoll.server.selection.oort import Oort
from atoll.server.selection.sampling import Sampler, draw
from atoll.server.views.narration import Narrator

logger = logging.getLogger(__name__)

DISK_RETRY_S = 1.0
UNHURRIED_S = 0.05
"""The time that an event without a waiting caller may wait for others of the same group commit [s]."""

SAMPLER_TIMEOUT_S = 60.0
EVALUATIONS_WAITING_MAX = 16
"""The number of versions that may wait for the evaluation on the server's data; each stays on disk until then."""


@dataclass(slots=True)
class _Posted:
    """An event that the machine has decided and that is not yet on disk."""

    effects: Effects
    lines: tuple[str, ...]
    keep: Keep | None  # None unless the event ended a round or the run
    done: "asyncio.Future[Effects]"


class RunDriver:
    """The driver of one run: it feeds the machine with events, journals them and carries out the effects.

    Args:
        parts: those of the run alone.
        shared: those that all runs of the coordinator share.
    """

    def __init__(self, parts: RunParts, shared: SharedParts) -> None:
        self.run_id, self.config, self.task, self.machine = parts.run_id, parts.config, parts.task, parts.machine
        self.reducer = self.versions = parts.reducer
        self.ended = asyncio.Event()
        self.retention = Retention(
            parts.run_id,
            parts.reducer,
            shared.journal,
            shared.journal_thread,
            keep_rounds=shared.keep_rounds,
            is_in_flight=partial(shared.is_in_flight, parts.run_id),
            spawn=self._spawn,
        )
        self.listeners: list[Callable[[Effects], None]] = []  # called after effects were carried out
        self._seq, self._evaluator, self._sampler = parts.seq, parts.evaluator, parts.sampler
        self._journal, self._journal_thread = shared.journal, shared.journal_thread
        self._hub, self._clock, self._crash = shared.hub, shared.clock, shared.crash
        self._assign_rank, self._announce_end = shared.assign_rank, shared.announce_end
        self._offered = OfferedCodec(parts.run_id, shared.hub.codecs_of, shared.codecs_of_rank)
        self._terms = messages.RunTerms.of(parts.run_id, parts.task, parts.config)
        self._posted: list[_Posted] = []
        self._rows = Batch()  # those of the events in `_posted`
        self._wake = asyncio.Event()
        self._is_broken = False
        self._narrator = Narrator()
        self._last: asyncio.Future[Effects] | None = None  # that of the newest event
        self._timer: asyncio.TimerHandle | None = None
        self._next_round: asyncio.TimerHandle | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._measuring: set[asyncio.Task[None]] = set()  # tasks that compute metrics from their sums
        self._evaluations: asyncio.Queue[Version] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()

    # ------------------------------------------------------------ events in

    def post(self, event: Event, kept: KeptUpdate | None = None) -> "asyncio.Future[Effects]":
        """Let the machine decide about an event.

        Args:
            event: the event.
            kept: the durable update that the event received; its row is written with the event that accepts it.

        Returns:
            The event's effects, as soon as they are on disk and carried out.
        """
        try:
            return self._post(event, kept)
        except BaseException as error:  # the machine may be ahead of the journal: nothing more is written
            self._is_broken = True
            self._crash(error)
            raise

    def _post(self, event: Event, kept: KeptUpdate | None) -> "asyncio.Future[Effects]":
        if self._is_broken:
            raise RuntimeError(f"run {self.run_id} is broken until a restart replays its journal")
        now = self._clock.now()
        effects = self.machine.receive(event, now)
        self._seq += 1
        done = self._last = self._loop.create_future()
        lines = self._narrator.lines(self.machine, event, effects)  # of the state of now, logged once on disk
        if isinstance(event, UpdateReceived):
            self.retention.received(event.update.digest, self._seq)
        decided = Decided(self.run_id, self._seq, now, event, effects)
        add_rows(self._rows, decided, self.machine, kept, num_bytes=self.reducer.num_bytes)
        has_end = any(isinstance(effect, Commit | Abandon | EndRun) for effect in effects)
        keep = Keep.after(self._seq, self.machine, self.config.round) if has_end else None
        if isinstance(event, ResumeRequested) and event.rules is not None:
            following = self.machine.ledger.next_round
            self._rows.settings.append(SettingsChange(self.run_id, self.config, self._seq, now, following))
        self._posted.append(_Posted(effects, lines, keep, done))
        if isinstance(event, UploadBegun):  # no caller waits for it: it may be written with the next event
            self._loop.call_later(UNHURRIED_S, self._wake.set)
        else:
            self._wake.set()
        self._arm_timer()
        return asyncio.shield(done)  # the caller may be cancelled

    @property
    def where(self) -> str:
        """The place of the run in its course, for the log."""
        if self.machine.round is None:
            return f"version {self.machine.ledger.version}"
        record = self.machine.round.record
        return f"round {record.round_id} ({record.phase}, updates kept: {record.num_in})"

    def is_news(self, client_id: ClientId, round_id: RoundId) -> bool:
        """Return whether a client's failure in a round changes anything."""
        return is_failure_news(self.machine, client_id, round_id)

    async def on_disk(self) -> None:
        """Wait until all past decisions are on disk; an answer that rests on them may leave only then."""
        if self._last is not None and not self._last.done():
            self._wake.set()
            await asyncio.shield(self._last)

    def reconfigure(self, config: RunConfig, sampler: Sampler | Oort, evaluator: Evaluator | None) -> None:
        """Follow other settings from the resume on that the caller posts next.

        Args:
            config: the settings; those of the aggregation and the optimizer are as before.
            sampler: the sampler of cohorts.
            evaluator: the evaluator with the settings of the local training; None: these are as before.
        """
        self.config, self._sampler = config, sampler
        self.reducer.follow(config)
        self._terms = messages.RunTerms.of(self.run_id, self.task, config)
        if evaluator is not None:
            self._evaluator.close()
            self._evaluator = evaluator

    def start(self) -> None:
        """Start the tasks that write, act and evaluate."""
        self._spawn(self._write_and_act())
        self._spawn(self._evaluate())

    async def stop(self) -> None:
        """Cancel all tasks.

        Posted events that are not yet written are lost, as in a crash: no effect of them has left.
        """
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
        if (deadline := self.machine.deadline) is not None:
            self._timer = self._loop.call_later(max(0.0, deadline - self._clock.now()), self._time_passed)

    def _time_passed(self) -> None:
        deadline = self.machine.deadline
        if deadline is None or self._clock.now() < deadline:
            self._arm_timer()  # the deadline moved, or the loop's timer fired a little early
            return
        self.post(TimePassed())

    # ------------------------------------------------------------ onto the disk

    async def _write_and_act(self) -> None:
        """Run group commits without end: each writes all events that were posted during the one before, then acts."""
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
            if rows.evaluations:
                self._measuring.add(self._spawn(self._add_values(rows.evaluations)))
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
        """Write a batch. While the disk is full, retry: nothing is acknowledged, and nothing is lost."""
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
        """Carry out one effect without waiting. Accept and Reject answer the poster; records are on disk already."""
        match effect:
            case Invite(client_id):
                self._hub.send(client_id, self._invitation(effect))
            case Release(client_id):
                self._hub.send(client_id, messages.release(effect, run_id=self.run_id))
            case AskEvaluation(client_id):
                self._hub.send(client_id, self._evaluation_request(effect))
            case OpenNextRound(not_before):
                self._schedule_next_round(not_before)
            case Commit(version=version):
                crash_points.reached("publish.before")
                self.reducer.publish(version)
                crash_points.reached("publish.after")
            case EndRun(state, cause):
                self._end(state, cause)
            case _:
                self._begin_work(effect)

    def _begin_work(self, effect: Effect) -> None:
        match effect:
            case DrawCohort():
                self._spawn(self._draw(effect))
            case Aggregate():
                self._spawn(self._aggregate(effect))
            case EvaluateModel(version):
                self._evaluations.put_nowait(version)
            case ComputeMetrics():
                self._measuring.add(self._spawn(self._compute(effect)))

    def _schedule_next_round(self, not_before: float) -> None:
        """Schedule the next round after `pause` [s]; a schedule from before a stop and a resume is cancelled.

        `not_before`: the end of the wait after an abandoned round [s since the epoch].
        """
        if self._next_round is not None:
            self._next_round.cancel()
        seconds = self.config.pause if self.machine.ledger.next_round > 1 else 0.0  # no pause before the first round
        self._next_round = self._loop.call_later(max(seconds, not_before - self._clock.now()), self._open_next_round)

    def _open_next_round(self) -> None:
        if self.machine.ledger.state is RunState.RUNNING:
            self.post(RoundDue())

    def _invitation(self, effect: Invite) -> ServerMessage:
        version = self.reducer.version(effect.base_version)
        model = messages.OfferedModel(version.digest, version.manifest_bytes, version.small_data)
        seed = messages.training_seed(self.config.seed, self.config.name, effect.round_id, effect.client_id)
        rank = self._assign_rank()
        codec = self._offered.of(self.config.aggregation.codec_name, effect.client_id, rank)
        spreads = self._offered.may_spread(codec) and self._hub.spreads_parts(effect.client_id)
        client = messages.ClientTerms(seed, codec, rank, spreads)
        return messages.invitation(effect, self._terms, model, client, now=self._clock.now())

    def _evaluation_request(self, effect: AskEvaluation) -> ServerMessage:
        version = self.reducer.version(effect.version)
        model = messages.OfferedModel(version.digest, version.manifest_bytes)
        return messages.evaluation_request(effect, self._terms, model, now=self._clock.now())

    def _end(self, state: RunState, cause: str) -> None:
        self._announce_end(self.run_id, self.machine.ledger.membership.members, state, cause)
        self._spawn(self._finish())

    async def _finish(self) -> None:
        """Set `ended` once the last metrics are written and the last garbage is collected."""
        if self._measuring:
            await asyncio.wait(self._measuring)
        await self.retention.finish()
        if self.machine.ledger.state in TERMINAL:  # it may have been resumed in the meantime
            await self.conclude()
            self.ended.set()
            await self._evaluator.rest()

    async def conclude(self) -> None:
        """Let the `main()` of a Flower app go on after the last round, unless it has."""
        if self.machine.ledger.state is RunState.FINISHED and self._evaluator.has_main:
            rows = await on_thread(self._journal_thread, self._journal.evaluations, self.run_id)
            await conclude(self.run_id, self._evaluator, await self.reducer.whole(self.machine.ledger.version), rows)

    # ------------------------------------------------------------ long work

    def _spawn(self, work: "asyncio._CoroutineLike[None]") -> "asyncio.Task[None]":
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[None]") -> None:
        """End the process after a mistake of ours: the next process recovers by replay."""
        self._tasks.discard(task)
        self._measuring.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.critical("run %s ends this process after a mistake of ours", self.run_id, exc_info=error)
            self._crash(error)

    async def _draw(self, effect: DrawCohort) -> None:
        """Draw a cohort. A sampler of the user's own runs on a thread, and an exception of it costs the round."""

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
            is_ours = self.config.cohort.is_ours
            clients = drawn() if is_ours else await asyncio.wait_for(on_daemon_thread(drawn), SAMPLER_TIMEOUT_S)
        except Exception as error:
            logger.error("the sampler failed in round %d", effect.round_id, exc_info=error)
            self.post(SamplerFailed(effect.round_id, detail_of(error)))
            return
        self.post(CohortDrawn(effect.round_id, clients))

    async def _aggregate(self, effect: Aggregate) -> None:
        """Fold a round on a thread. While the disk is full the round waits, and keeps every update."""
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
                self.post(AggregationFailed(effect.round_id, detail_of(error)))
                return
        logger.debug("round %d folded in %.3f s", effect.round_id, time.perf_counter() - begun)
        self.post(Aggregated(effect.round_id, Digest(digest)))

    async def _evaluate(self) -> None:
        """Evaluate versions on the server's data, one after the other; rounds do not wait for it."""
        while True:
            version = await self._evaluations.get()
            if self._evaluations.qsize() >= EVALUATIONS_WAITING_MAX:
                self.post(ModelEvaluated(version, None, "passed over: too many newer versions were waiting"))
                continue
            try:
                path = await self.reducer.whole(version)
                found = self._evaluator.cannot or await self._evaluator.evaluate(path, version)
                statistics, detail = (None, found) if isinstance(found, str) else (found, why_refused(found))
            except (EvaluationFailed, OSError) as error:
                statistics, detail = None, detail_of(error)
                logger.error("version %d could not be evaluated: %s", version, detail)
            self.post(ModelEvaluated(version, statistics, detail))

    async def _compute(self, effect: ComputeMetrics) -> None:
        """Compute the values that decide about the run; where the task's code fails, there are none."""
        try:
            values = await self._evaluator.values(effect.statistics)
        except EvaluationFailed as error:
            values = {}
            logger.error("the metrics of version %d have no values: %s", effect.version, detail_of(error))
        self.post(MetricsComputed(effect.version, effect.source, finite(values)))

    async def _add_values(self, rows: list[EvaluationRow]) -> None:
        """Add the metrics' values to evaluations. Only the task's own code can compute them from their sums."""
        measured = [row for row in rows if row.statistics is not None]
        try:
            values = await self._evaluator.values_of([row.statistics or {} for row in measured])
        except EvaluationFailed as error:
            logger.error("the metrics of version %d have no values: %s", rows[-1].version, detail_of(error))
            return
        with_values = [replace(row, values=of_row) for row, of_row in zip(measured, values, strict=True)]
        await self._commit(Batch(evaluations=with_values))
