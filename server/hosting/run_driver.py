"""The driver of a run of rounds: rows that its machine's events add to a group commit, and the execution of effects."""

import asyncio
import logging
import time
from dataclasses import replace

from atoll.aggregation.masked.no_sum import NoSum
from atoll.ground.durable import DiskFull
from atoll.ground.process import crash_points
from atoll.protocol.atoll_pb2 import ServerMessage
from atoll.protocol.log_fields import about, note_run
from atoll.protocol.threads import on_daemon_thread, on_thread
from atoll.protocol.vocabulary import TERMINAL, ClientId, RoundId, RunState, Version
from atoll.protocol.wire.allocator import MUCH_BYTES, give_back
from atoll.server.config.run import RunConfig
from atoll.server.errors import UpdateDamaged
from atoll.server.files.run_store import KeptUpdate
from atoll.server.folding.evaluator import EvaluationFailed, Evaluator, detail_of
from atoll.server.hosting import messages
from atoll.server.hosting.app_conclusion import conclude
from atoll.server.hosting.event_rows import Decided, add_rows
from atoll.server.hosting.journaled_driver import DISK_RETRY_S, Decision, JournaledDriver
from atoll.server.hosting.offered_codec import OfferedCodec
from atoll.server.hosting.retention import UpdateRetention
from atoll.server.hosting.run_parts import RunParts, SharedParts
from atoll.server.hosting.secure_sums import SecureSums
from atoll.server.journal.rows import Batch, EvaluationRow, SettingsChange
from atoll.server.required.keep import Keep
from atoll.server.rounds.events import (
    Abandon,
    Aggregate,
    Aggregated,
    AggregationFailed,
    AskEvaluation,
    CohortDrawn,
    Commit,
    ComputeMetrics,
    DiskFree,
    DiskShort,
    DrawCohort,
    Effect,
    EndRun,
    EvaluateModel,
    Event,
    FilesLost,
    Invite,
    MetricsComputed,
    ModelEvaluated,
    OpenNextRound,
    Release,
    ResumeRequested,
    RoundDue,
    SamplerFailed,
    Update,
    UpdateReceived,
)
from atoll.server.rounds.open_round import Effects
from atoll.server.rounds.relevance import is_failure_news, is_first_upload
from atoll.server.rounds.session_events import OpenSum, TellMember
from atoll.server.selection.oort import Oort
from atoll.server.selection.sampling import Sampler, draw
from atoll.server.views.narration import Narrator
from atoll.task.metrics import finite, why_refused
from atoll.task.randomness import training_seed

logger = logging.getLogger(__name__)

SAMPLER_TIMEOUT_S = 60.0
DISK_LOOK_S = 2.0
"""Interval between two checks of a full disk [s]."""
EVALUATIONS_WAITING_MAX = 16
"""Number of versions that may wait for the evaluation on the server's data; each is kept on disk until then."""


class RunDriver(JournaledDriver[Event, Effect]):
    """Driver of one run: it feeds the machine with events, journals them and executes the effects.

    Args:
        parts: the run's parts.
        shared: the parts that all runs of the coordinator share.
    """

    def __init__(self, parts: RunParts, shared: SharedParts) -> None:
        super().__init__(parts.run_id, parts.machine, parts.seq, shared)
        self.config, self.task, self.machine = parts.config, parts.task, parts.machine
        self.reducer = self.versions = parts.reducer
        self.retention = UpdateRetention(parts.run_id, parts.reducer, shared, self._spawn)
        self._evaluator, self._sampler = parts.evaluator, parts.sampler
        self._offered = OfferedCodec(parts.run_id, shared.hub.codecs_of, shared.codecs_of_rank)
        self._terms = messages.RunTerms.of(parts.run_id, parts.task, parts.config, parts.number)
        self.sums = SecureSums(
            parts.run_id,
            parts.task,
            lambda: self.config,
            parts.reducer,
            parts.machine,
            shared.authorities,
            shared.num_ranks,
        )
        note_run(parts.run_id, parts.number)
        self._narrator = Narrator()
        self._is_watching_disk, self._bytes_wanted = False, 0
        self._folding: Aggregate | None = None  # the fold that the open round awaits
        self._next_round: asyncio.TimerHandle | None = None
        self._measuring: set[asyncio.Task[None]] = set()  # tasks that compute metrics from their sums
        self._evaluations: asyncio.Queue[Version] = asyncio.Queue()

    # ------------------------------------------------------------ events in

    def _decided(self, event: Event, effects: Effects, now: float, kept: KeptUpdate | None) -> Decision:
        lines = self._narrator.lines(self.machine, event, effects)
        if isinstance(event, UpdateReceived):
            self.retention.received(event.update.digest, self._seq)
        decided = Decided(self.run_id, self._seq, now, event, effects)
        add_rows(self._rows, decided, self.machine, kept, num_bytes=self.reducer.num_bytes)
        if isinstance(event, ResumeRequested) and event.rules is not None:
            following = self.machine.ledger.next_round
            self._rows.settings.append(SettingsChange(self.run_id, self.config, self._seq, now, following))
        if not any(isinstance(effect, Commit | Abandon | EndRun) for effect in effects):
            return Decision(lines)
        keep = Keep.after(self._seq, self.machine, self.config.round)
        return Decision(lines, lambda: self.retention.begin(keep))

    @property
    def where(self) -> str:
        """The stage of the run, for the log."""
        if self.machine.round is None:
            return f"version {self.machine.ledger.version}"
        record = self.machine.round.record
        return f"round {record.round_id} ({record.phase}, updates kept: {record.num_in})"

    def is_news(self, client_id: ClientId, round_id: RoundId) -> bool:
        """Return whether a client's failure in a round changes the state."""
        return is_failure_news(self.machine, client_id, round_id)

    def is_first_upload(self, update: Update) -> bool:
        """Return whether the beginning of an update's upload changes the state."""
        return is_first_upload(self.machine, update)

    def reconfigure(self, config: RunConfig, sampler: Sampler | Oort, evaluator: Evaluator | None) -> None:
        """Apply other settings from the resume on that the caller posts next.

        Args:
            config: the settings, with unchanged aggregation and optimizer.
            sampler: the sampler of cohorts.
            evaluator: the evaluator with the settings of the local training; None: unchanged.
        """
        self.config, self._sampler = config, sampler
        self.reducer.follow(config)
        self._terms = messages.RunTerms.of(self.run_id, self.task, config, self._terms.run_number)
        if evaluator is not None:
            self._evaluator.close()
            self._evaluator = evaluator

    def no_room(self, num_bytes: int, error: DiskFull) -> None:
        """Make the run wait until the disk has room for `num_bytes` bytes: until then no deadline passes."""
        self._bytes_wanted = max(self._bytes_wanted, num_bytes)
        if self._is_watching_disk or not self.machine.ledger.is_open:
            return
        self._is_watching_disk = True
        self.post(DiskShort(str(error)))
        self._spawn(self._watch_disk())

    async def _watch_disk(self) -> None:
        """Wait until the disk has room, and tell the machine; stop if the run ends."""
        while self.machine.ledger.is_open:
            await asyncio.sleep(DISK_LOOK_S)
            if await self.reducer.has_room(self._bytes_wanted):
                self.post(DiskFree())
                break
        self._is_watching_disk, self._bytes_wanted = False, 0

    def start(self) -> None:
        """Start the tasks that write, execute effects and evaluate."""
        super().start()
        self._spawn(self._evaluate())
        self._measure(self._complete_values())

    async def stop(self) -> None:
        """Cancel all tasks, like the base class, and end the worker."""
        self.reducer.stop()
        await super().stop()
        self._evaluator.close()

    def _written(self, rows: Batch) -> None:
        for entry in rows.entries:
            crash_points.reached("round.entry", entry.kind)
        if rows.evaluations:
            self._measure(self._add_values(rows.evaluations))

    # ------------------------------------------------------------ effects out

    def _act(self, effect: Effect) -> None:
        """Execute one effect without waiting. Accept and Reject answer the poster; records are already on disk."""
        crash_points.reached("round.effect", type(effect).__name__)
        match effect:
            case Invite(client_id):
                self._shared.hub.send(client_id, self._invitation(effect))
            case TellMember(client_id):
                self._shared.hub.send(client_id, self.sums.question(effect))
            case Release(client_id):
                self._shared.hub.send(client_id, messages.release(effect, run_id=self.run_id))
            case AskEvaluation(client_id):
                self._shared.hub.send(client_id, self._evaluation_request(effect))
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
            case OpenSum():
                self._spawn(self._open(effect))
            case Aggregate():
                self._folding = effect
                self._spawn(self._aggregate(effect))
            case Abandon():
                self._folding = None
            case EvaluateModel(version):
                self._evaluations.put_nowait(version)
            case ComputeMetrics():
                self._measure(self._compute(effect))

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
        seed = training_seed(self.config.seed, self.config.name, effect.round_id, effect.client_id)
        rank = self._shared.assign_rank()
        codec = self._offered.of(self.config.aggregation.codec_name, effect.client_id, rank)
        spreads = self._offered.may_spread(codec) and self._shared.hub.spreads_parts(effect.client_id)
        client = messages.ClientTerms(seed, codec, rank, spreads)
        secure = None if effect.sum is None else self.sums.invited(effect)
        return messages.invitation(effect, self._terms, model, client, now=self._clock.now(), secure=secure)

    def _evaluation_request(self, effect: AskEvaluation) -> ServerMessage:
        version = self.reducer.version(effect.version)
        model = messages.OfferedModel(version.digest, version.manifest_bytes)
        secure = None if effect.sum is None else self.sums.asked(effect)
        return messages.evaluation_request(effect, self._terms, model, now=self._clock.now(), secure=secure)

    def _end(self, state: RunState, cause: str) -> None:
        self._shared.announce_end(self.run_id, self.machine.ledger.membership.members, state, cause)
        self._spawn(self._finish())

    async def _finish(self) -> None:
        """Set `ended` once the last metrics are written and the last garbage is collected."""
        if self._measuring:
            await asyncio.wait(self._measuring)
        await self.retention.finish()
        if self.machine.ledger.state in TERMINAL:  # it may have been resumed meanwhile
            await self.conclude()
            self.ended.set()
            await self._evaluator.rest()

    async def conclude(self) -> None:
        """Run the rest of a Flower app's `main()` after the last round, unless that is already done."""
        if self.machine.ledger.state is RunState.FINISHED and self._evaluator.has_main:
            rows = await on_thread(self._shared.journal_thread, self._shared.journal.evaluations, self.run_id)
            version = self.machine.ledger.version
            await conclude(self.run_id, self._evaluator, version, await self.reducer.whole(version), rows)

    # ------------------------------------------------------------ long work

    def _measure(self, work: "asyncio._CoroutineLike[None]") -> None:
        task = self._spawn(work)
        self._measuring.add(task)
        task.add_done_callback(self._measuring.discard)

    async def _draw(self, effect: DrawCohort) -> None:
        """Draw a cohort. A custom sampler runs on a thread, and its exception costs the round."""

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
            with about(round=effect.round_id):
                logger.error("the sampler failed in round %d", effect.round_id, exc_info=error)
            self.post(SamplerFailed(effect.round_id, detail_of(error)))
            return
        self.post(CohortDrawn(effect.round_id, clients))

    async def _open(self, effect: OpenSum) -> None:
        self.post(await self.sums.open(effect))

    async def _aggregate(self, effect: Aggregate) -> None:
        """Fold a round on a thread. While the disk is full the round waits, and keeps every update."""
        if effect is not self._folding:
            return  # the round was closed again, without an update that is lost
        with about(round=effect.round_id):
            await self._fold(effect)

    async def _fold(self, effect: Aggregate) -> None:
        begun, open_round = time.perf_counter(), self.machine.round
        if open_round is not None and sum(update.num_bytes for update in open_round.held) >= MUCH_BYTES:
            await on_thread(None, give_back)
        while True:
            try:
                folded = await self._folded(effect)
                break
            except DiskFull as error:
                if effect is not self._folding:
                    return  # the run no longer waits
                self.no_room(self.reducer.num_bytes(effect.base_version), error)
                logger.error("round %d cannot be aggregated, it waits for space: %s", effect.round_id, error)
                await asyncio.sleep(DISK_RETRY_S)
            except (ValueError, OSError) as error:
                if effect is not self._folding:
                    return
                if isinstance(error, UpdateDamaged) and any(c.digest == error.digest for c in effect.contributions):
                    self.post(FilesLost((error.digest,), detail=str(error)))
                    return
                dropped = error.dropped if isinstance(error, NoSum) else {}
                if dropped:  # a member's mistake, not ours
                    logger.error("round %d cannot be aggregated: %s", effect.round_id, error)
                else:
                    logger.error("the aggregation of round %d failed", effect.round_id, exc_info=error)
                self.post(AggregationFailed(effect.round_id, detail_of(error), dropped))
                return
        logger.debug("round %d folded in %.3f s", effect.round_id, time.perf_counter() - begun)
        self.post(folded)

    async def _folded(self, effect: Aggregate) -> Aggregated:
        """Fold a round's updates, or its opened secure sums, and return the event of the result."""
        if not effect.sums:
            digest = await self.reducer.fold(effect)
            return Aggregated(effect.round_id, digest, clip_norm=await self.reducer.next_clip_norm(effect))
        sums = await self.reducer.fold_sums(effect)
        return Aggregated(effect.round_id, sums.digest, sums.dropped, sums.ranges, sums.statistics)

    async def _evaluate(self) -> None:
        """Evaluate versions on the server's data, one after the other; rounds do not wait for it."""
        while True:
            version = await self._evaluations.get()
            if self._evaluations.qsize() >= EVALUATIONS_WAITING_MAX:
                self.post(ModelEvaluated(version, None, "skipped: too many newer versions were waiting"))
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
        """Compute the metrics that choose the best version or end the run early; empty if the task's code fails."""
        try:
            values = await self._evaluator.values(effect.statistics)
        except EvaluationFailed as error:
            values = {}
            logger.error("the metrics of version %d have no values: %s", effect.version, detail_of(error))
        self.post(MetricsComputed(effect.version, effect.source, finite(values)))

    async def _complete_values(self) -> None:
        """Add the values of evaluations whose sums were written by an earlier process that then died."""
        rows = await on_thread(self._shared.journal_thread, self._shared.journal.evaluations, self.run_id)
        if lacking := [row for row in rows if row.statistics and not row.values]:
            await self._add_values(lacking)

    async def _add_values(self, rows: list[EvaluationRow]) -> None:
        """Add the metrics' values to evaluations. Only the task's code can compute them from their sums."""
        measured = [row for row in rows if row.statistics is not None]
        try:
            values = await self._evaluator.values_of([row.statistics or {} for row in measured])
        except EvaluationFailed as error:
            logger.error("the metrics of version %d have no values: %s", rows[-1].version, detail_of(error))
            return
        with_values = [replace(row, values=of_row) for row, of_row in zip(measured, values, strict=True)]
        await self._commit(Batch(evaluations=with_values))
