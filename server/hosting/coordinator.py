"""The coordinator: it hosts runs, `max_runs` at a time and the rest in a queue, and recovers them after a crash.

It owns the shared parts (state directory, journal, threads) and passes each event to its run. A run's machine decides,
its driver executes; connections and leases are in `attendance`.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import MappingProxyType
from typing import Any, TypeVar

from atoll.ground.durable import DiskFull
from atoll.ground.printable import count_of
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.audit.files import audit_folder
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.identity.names import Identity
from atoll.protocol.manifest import UpdateManifest, digest_of
from atoll.protocol.notices.teller import Notices
from atoll.protocol.part_manifest import PartManifest
from atoll.protocol.run_names import RunNotNamed, newest_named
from atoll.protocol.threads import begin_on_thread, on_thread
from atoll.protocol.vocabulary import TERMINAL, ClientId, Digest, RejectReason, RoundId, RunId, RunState
from atoll.server.audit.actions import Action
from atoll.server.audit.log import COORDINATOR, AuditLog
from atoll.server.audit.rounds import entries_of, spent_of
from atoll.server.clock import MonotoneClock
from atoll.server.config.process import CoordinatorConfig
from atoll.server.config.run import RunConfig
from atoll.server.config.run_changes import are_equal, moved_ends, with_noise, with_number_of_versions
from atoll.server.errors import OperatorError, UnknownRun
from atoll.server.exchanges.machine import ExchangeMachine
from atoll.server.folding.evaluator import Evaluator
from atoll.server.folding.reducer import Reducer
from atoll.server.hosting.attendance import Attendance
from atoll.server.hosting.clock_watch import ClockWatch
from atoll.server.hosting.control_streams import Connection
from atoll.server.hosting.fair_executor import FairExecutor
from atoll.server.hosting.hosted_run import HostedRun
from atoll.server.hosting.message_driver import MessageDriver
from atoll.server.hosting.message_judge import MessageJudge
from atoll.server.hosting.recovering import Replayed, check_has_model, check_losses, files_lost, losses_at_start
from atoll.server.hosting.restoration import Restoration, published_of
from atoll.server.hosting.resuming import check_repeatable, check_resumable, resumed_config, way_on
from atoll.server.hosting.run_driver import RunDriver
from atoll.server.hosting.run_factory import RunFactory, remove_files
from atoll.server.hosting.run_parts import SharedParts
from atoll.server.hosting.start_version import start_of
from atoll.server.hosting.statistics_requests import StatisticsRequests
from atoll.server.hosting.update_judge import UpdateJudge
from atoll.server.identity.admission import Admission, joined
from atoll.server.identity.signing import Signer
from atoll.server.journal.journal import Journal
from atoll.server.journal.rows import Batch, RunRow
from atoll.server.journal.state_directory import StateDirectory
from atoll.server.names import presence
from atoll.server.names.places import Places
from atoll.server.names.presence import Arriving, Presence
from atoll.server.names.shown_file import ShownFile
from atoll.server.ranks.registry import Ranks
from atoll.server.required.keep import Keep
from atoll.server.required.losses import Loss
from atoll.server.rounds.events import (
    CoordinatorStarted,
    EndRun,
    FilesLost,
    PauseRequested,
    PauseRun,
    PublishedNamed,
    ResumeRequested,
    ResumeRun,
    RunStarted,
    StopRequested,
)
from atoll.server.rounds.open_round import Effects
from atoll.server.rounds.run_machine import RunMachine
from atoll.server.rounds.waiting import what_a_pause_waits_for
from atoll.server.transfers.arrivals import Arrivals
from atoll.server.transfers.uploads import Uploads
from atoll.server.transfers.verdicts import refused
from atoll.task.task import task_name

logger = logging.getLogger(__name__)

T = TypeVar("T")
SHOWN_S, SHOWN_SHARE = 0.5, 20
"""Shortest interval between two reports for commands of who is connected [s], and as a multiple of the report's
duration: with 100,000 clients it must not occupy the event loop."""

ALIVE_S = 0.5
"""Interval at which the process records that it is alive [s]."""


class Coordinator:
    """Host of all runs, and the composition root of their shared parts.

    All of it runs on one event loop, except for disk, arithmetic and user code.

    Args:
        config: the settings of the process.
        state: the state directory, locked.
        dialer: opens the channels to aggregation ranks.
        is_revoked: returns True for a revoked certificate, by identity and serial number.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        state: StateDirectory,
        dialer: Dialer,
        is_revoked: Callable[[Identity, int], bool],
    ) -> None:
        self.config, self.state, self.dialer = config, state, dialer
        self.journal = Journal(state)
        self.runs: dict[RunId, HostedRun] = {}
        self.queue: list[RunId] = []
        self.clock = MonotoneClock(self.journal.last_instant())
        self.audit = AuditLog(audit_folder(state.path), time.time)
        self.clocks = ClockWatch(state, self.clock, self.audit, lambda: self.signer.last if self.signer else 0.0)
        self.compute = FairExecutor(2, "compute")
        self._folding = FairExecutor(1, "fold")  # apart from inspections of late updates; one at a time saves memory
        self._journal_thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._tasks: set[asyncio.Task[Any]] = set()
        places, spawn = Places(state.path, self.clock.now), self.spawn
        self.arrivals = Arrivals(lambda client_id: self.attendance.bytes_came(client_id))
        ranks = Ranks(
            config.aggregators,
            lambda: self.attendance.send_ranks(),
            places,
            self.arrivals,
            on_full=lambda run_id, detail: self._no_room(run_id, 0, DiskFull(detail)),
        )
        self.ranks = ranks if config.aggregators else None
        self.attendance: Attendance = Attendance(config, self.runs, self.clock, self.ranks, spawn, self.audit, places)
        self.clocks.on_jump.append(self._clock_jumped)
        self.statistics = StatisticsRequests(
            config, state.path, self.attendance, self.audit, spawn, self._private_runs, lambda: self.authorities()
        )
        self.uploads = Uploads(
            self.judge,
            lambda run_id: self.runs[run_id].versions.store,
            self.compute.of,
            floor=config.upload_floor,
            arrivals=self.arrivals,
            on_full=self._no_room,
        )
        self.admission = Admission(is_revoked, joined(self.runs))
        self.signer: Signer | None = None
        """The signer of messages to clients; None: the coordinator is `--insecure`, and nothing is signed."""
        self.authorities: Callable[[], bytes] = bytes
        """Returns the certificates of the trusted authorities, PEM; empty: the coordinator is `--insecure`."""
        self.notices: Notices | None = None
        """Notices to the operator, from the end of `start` on."""
        self.restoration: Restoration | None = None
        """The restoration of the state directory; None: it is not a restored one."""
        self.on_commit: list[Callable[[Batch, float], None]] = []
        """Called with the rows and the duration [s] of each group commit that is on disk."""
        self.sent_bytes = 0
        """Bytes of versions that this process has sent."""
        self._has_recovered, self.recovered = False, ""
        """Open runs of an earlier process with their progress; empty: there is none."""
        self._adding = asyncio.Lock()
        self.crashed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()
        shared = self._shared_parts()
        self._factory = RunFactory(config, state, shared, self._folding, self.ranks, dialer)

    def _private_runs(self) -> dict[str, RunId]:
        """Return the names of the private runs' tasks, open or ended, each with a run of it."""
        private = ((run_id, run.config) for run_id, run in self.runs.items() if run.config.privacy is not None)
        return {task_name(config.task): run_id for run_id, config in private}

    def _shared_parts(self) -> SharedParts:
        return SharedParts(
            journal=self.journal,
            journal_thread=self._journal_thread,
            hub=self.attendance.hub,
            clock=self.clock,
            keep_rounds=self.config.keep_rounds,
            crash=self._crash,
            is_in_flight=self.uploads.is_in_flight if self.ranks is None else self.ranks.parts.holds,
            assign_rank=self.ranks.assign if self.ranks is not None else lambda: 0,
            codecs_of_rank=None if self.ranks is None else self.ranks.codecs_of,
            authorities=lambda: self.authorities(),
            num_ranks=self.config.aggregators,
            announce_end=self.attendance.announce_end,
            on_commit=self.on_commit,
        )

    # ------------------------------------------------------------ life

    async def start(self, *, accept_losses: bool = False, published: Mapping[str, int] = MappingProxyType({})) -> None:
        """Recover every run from the journal and continue where the last process stopped.

        Args:
            accept_losses: continue without missing or damaged files that the journal relies on.
            published: the newest published rounds of private runs, as for `restoration.published_of`.

        Raises:
            OperatorError: files that the journal relies on are missing or damaged, and `accept_losses` is not set; or
                the directory was restored, and the newest published round of an open private run is lacking.
        """
        alive = max(self.state.last_alive() or 0.0, self.journal.last_instant())
        runs = [Replayed.of(self.journal, row) for row in self.journal.runs()]
        losses = await on_thread(None, losses_at_start, self.state.path, self.journal, runs)
        check_losses(losses, accept=accept_losses)
        self.restoration = Restoration.of(self.state.path)
        newest = published_of(self.restoration, runs, published)
        self.audit.record(Action.COORDINATOR_START, str(self.state.path))
        for run_id in self.journal.deleted_runs():  # the last process may have ended before it removed their files
            await on_thread(None, remove_files, self.state, run_id)
        for loss in losses:
            self._tell_of_loss(loss, is_accepted=accept_losses)
        for run in runs:
            lost = files_lost(losses, run.row.run_id) if accept_losses else None
            await self._recover(run, min(run.down_since(alive), self.clock.now()), lost, newest.get(run.row.run_id))
        open_runs = (run for run in self.runs.values() if run.machine.ledger.state not in TERMINAL)
        self.recovered = ", ".join(f"{run.run_id} at {run.where}" for run in open_runs)
        self._start_next()
        self._rely_on(self.attendance.watch_leases())
        self._rely_on(self._show_presence())
        self._rely_on(self._stay_alive())
        self._has_recovered = True
        if self.notices is not None:
            self._rely_on(self.notices.run())

    async def stop(self) -> None:
        """End everything. Decisions that are not on disk are lost; no client or caller has heard of them."""
        if self.notices is not None and self._has_recovered:  # first, or else ended runs would seem to be deleted
            await self.notices.close()
        for connection in self.attendance.hub:
            connection.close("the coordinator stops")
        if self.ranks is not None:
            self.ranks.close()
        for run in self.runs.values():
            await run.stop()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await on_thread(None, partial(self._journal_thread.shutdown, cancel_futures=True))
        for threads in (self.compute, self._folding):  # no thread may write once the directory is unlocked
            await on_thread(None, threads.shutdown)
        self.state.mark_alive(self.clock.now())
        self.clocks.look()
        self.journal.close()
        self.audit.record(Action.COORDINATOR_STOP, str(self.state.path), "crashed" if self.crashed.done() else "ok")
        await on_thread(None, self.audit.close)

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Start a background task; `stop` cancels it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _rely_on(self, work: Coroutine[Any, Any, None]) -> None:
        """Start a background task that everything depends on: its failure is a bug and ends the process."""

        def ended(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.critical("the coordinator ends after an internal error", exc_info=error)
                self._crash(error)

        self.spawn(work).add_done_callback(ended)

    def _crash(self, error: BaseException) -> None:
        """End the process after an internal error; the next process replays the journal."""
        if not self.crashed.done():
            self.crashed.set_result(error)

    async def _show_presence(self) -> None:
        """Show commands who is connected and what arrives, whenever it changes."""
        shown, clock = ShownFile(self.state.path / presence.FILE, "who is connected"), asyncio.get_running_loop().time
        while True:
            begun = clock()
            arriving = [Arriving(*key, *found) for key, found in self.arrivals.all().items() if self._awaits(key)]
            now = Presence(tuple(self.attendance.present()), tuple(arriving))
            await on_thread(None, shown.show, now)
            await asyncio.sleep(max(SHOWN_S, SHOWN_SHARE * (clock() - begun)))

    def _awaits(self, key: tuple[RunId, RoundId, ClientId]) -> bool:
        """Return whether an incoming update can still change its run."""
        run_id, round_id, client_id = key
        return (run := self.runs.get(run_id)) is not None and run.is_news(client_id, round_id)

    async def _stay_alive(self) -> None:
        """Record every `ALIVE_S` that the process is alive: the downtime after a crash counts from the last record."""
        while True:
            try:
                self.state.mark_alive(self.clock.now())
                self.clocks.look()
            except OSError as error:
                logger.warning("cannot note that this process is alive: %s", error)
            await asyncio.sleep(ALIVE_S)

    def clock_refusal(self, connection: Connection) -> str:
        """Return the reason to refuse a site because of its clock: it would reject everything signed here."""
        return "" if self.signer is None else self.clocks.refusal(connection.client_id, connection.clock_offset)

    def _clock_jumped(self, by: float) -> None:
        """Disconnect the sites whose clocks reject signed messages after a jump, so that they learn of it."""
        for connection in self.attendance.hub:
            if connection.clock_offset is not None:
                connection.clock_offset -= by
            if why := self.clock_refusal(connection):
                self.attendance.hub.dismiss(connection.client_id, why)

    # ------------------------------------------------------------ runs

    @property
    def running(self) -> list[HostedRun]:
        """The runs whose rounds are under way; all others are queued or paused, or have ended."""
        return [run for run in self.runs.values() if run.machine.ledger.state is RunState.RUNNING]

    @property
    def has_room(self) -> bool:
        """Whether one more run can start or resume."""
        return len(self.running) < self.config.max_runs

    def named(self, run: str) -> RunId:
        """Return the run with this id, or else the newest one with this name.

        Raises:
            UnknownRun: there is no such run.
        """
        try:
            return RunId(newest_named(run, ((run_id, it.config.name) for run_id, it in self.runs.items())))
        except RunNotNamed as error:
            raise UnknownRun(str(error)) from None

    def state_of(self, run_id: RunId) -> RunState:
        """Return the state of a run: queued, running, paused or ended."""
        return self.runs[run_id].machine.ledger.state

    async def add_run(self, config: RunConfig) -> RunId:
        """Host one more run: load its task, write version 0, and start it when there is room.

        Raises:
            OperatorError: the task or the sampler does not load; the message has the reason.
            OSError: the files of the run cannot be written.
        """
        return await asyncio.shield(self.spawn(self._add_run(config)))  # the caller may be cancelled

    @property
    def is_adding(self) -> bool:
        """Whether a run is being created that is not yet in `runs`."""
        return self._adding.locked()

    async def added(self) -> None:
        """Wait until no run is being created."""
        async with self._adding:
            pass

    async def _add_run(self, config: RunConfig) -> RunId:
        async with self._adding:
            run_id = await self._make_run(config)
        self.queue.append(run_id)
        self._start_next()
        return run_id

    async def _make_run(self, config: RunConfig) -> RunId:
        config = with_number_of_versions(config, self.config.keep_versions)
        run_id = RunId(f"{config.name}-{await on_thread(self._journal_thread, self.journal.next_number, config.name)}")
        if config.is_of_messages:
            await self._add_messages(config, run_id)
        else:
            config = await self._add_rounds(config, run_id)
        self.audit.record(Action.RUN_ADD, run_id, digests={"config": digest_of(config.model_dump_json().encode())})
        return run_id

    async def _add_messages(self, config: RunConfig, run_id: RunId) -> None:
        self._factory.check_answers_messages()
        row = RunRow.new(run_id, config, config.rules, self.clock.now())
        run = self._factory.message_driver(row, ExchangeMachine(config.exchange_rules), 0)
        await on_thread(self._journal_thread, self.journal.add_run, row)
        self._listen(run)

    async def _add_rounds(self, config: RunConfig, run_id: RunId) -> RunConfig:
        """Add a run of rounds; return its settings with the digest of the tensors that are never sent."""
        await on_thread(None, with_noise, config)  # the noise for a budget of examples takes seconds, once
        evaluator = self._factory.evaluator(config, run_id)
        try:
            of_rounds = {other: run for other, run in self.runs.items() if isinstance(run, RunDriver)}
            start = await start_of(config.model, of_rounds)
            reducer, config = await self._factory.first_version(config, run_id, evaluator, start)
            row = RunRow.new(run_id, config, config.rules, self.clock.now())
            await begin_on_thread(self._journal_thread, self.journal.add_run, row)
        except BaseException:
            evaluator.close()
            raise
        self._host(row, RunMachine(config.rules), 0, evaluator, reducer)
        for notice in config.notices:
            logger.warning("run %s: %s", run_id, notice, extra={"run": run_id})
        return config

    async def has_settings(self, run_id: RunId, config: RunConfig) -> bool:
        """Return whether a run has these settings, or began with them before a resume changed them."""
        if are_equal(self._run(run_id).config, config):
            return True
        return are_equal(await on_thread(self._journal_thread, self.journal.first_settings, run_id), config)

    def namesake_of(self, run_id: RunId) -> str:
        """Return how the last run of the same name could continue with the settings of a new one, or ""."""
        return way_on(self.runs.values(), self._run(run_id))

    async def stop_run(self, run_id: RunId, reason: str) -> str:
        """End a run for the operator's reason; return what must happen first, or ""."""
        run = self._run(run_id)
        if run_id in self.queue:
            self.queue.remove(run_id)
            if not run.machine.ledger.is_open:
                self._begin(run)  # a run whose start is not in the journal would be queued again after a restart
        if run.machine.ledger.state in TERMINAL:
            raise OperatorError(f"run {run_id} is {run.machine.ledger.state}: {run.machine.ledger.cause}")
        self.audit.record(Action.RUN_STOP, run_id, reason)
        await run.post(StopRequested(reason))
        return "" if run.machine.ledger.state in TERMINAL else "its round is being aggregated, and is committed first"

    async def pause_run(self, run_id: RunId, reason: str) -> str:
        """Pause a run, so that no new round starts; return what must happen first, or ""."""
        run = self._run(run_id)
        ledger = run.machine.ledger
        if ledger.state is not RunState.RUNNING:
            raise OperatorError(f"run {run_id} is {ledger.state}; only a running one can be paused")
        self.audit.record(Action.RUN_PAUSE, run_id, reason)
        await run.post(PauseRequested(reason))
        if ledger.state is RunState.RUNNING and ledger.pause_reason is None:
            raise OperatorError(f"run {run_id} is about to end; there is nothing to pause")
        return run.machine.ledger.pausing if isinstance(run, MessageDriver) else what_a_pause_waits_for(run.machine)

    async def resume_run(self, run_id: RunId, overrides: Sequence[str] = ()) -> str:
        """Resume a paused run, or reopen an ended one: a finished one with more rounds, any with changed settings.

        If `max_runs` is reached it is queued; the answer states this, and the schedules whose end moves.

        Raises:
            UnknownRun: there is no such run.
            OperatorError: the run cannot be resumed now, or not with these settings.
        """
        run, config, lines = self._run(run_id), None, list[str]()
        was_open = run.machine.ledger.is_open
        if isinstance(run, MessageDriver):
            check_repeatable(run, overrides)
        else:
            before, version = run.config, run.machine.ledger.version
            config = await self._reconfigured(run, overrides)
            lines += moved_ends(before, config or before, version=version)
        for line in lines:
            logger.info("run %s: %s", run_id, line, extra={"run": run_id})
        is_pausing = run.machine.ledger.pause_reason is not None
        digests = {} if config is None else {"config": digest_of(config.model_dump_json().encode())}
        self.audit.record(Action.RUN_RESUME, run_id, digests=digests)
        self._audit_budget(run, config)
        run.ended.clear()
        wait = not (is_pausing or self.has_room)
        resumed = run.post(ResumeRequested(wait, None if config is None else config.rules))
        if not was_open:
            self.attendance.introduce_everyone(run)
        if wait:
            self.queue.append(run_id)
        await resumed
        if wait:
            lines.append(f"max_runs allows {len(self.running)} at once: it is queued until one ends or is paused")
        return "; ".join(lines)

    def _audit_budget(self, run: HostedRun, config: RunConfig | None) -> None:
        """Record a change of a private run's budget, before the resume that applies it."""
        before = run.machine.rules.privacy if isinstance(run, RunDriver) else None
        after = None if config is None else config.rules.privacy
        if before is None or after is None:
            return
        budgets = (f"epsilon {of.epsilon:g}, {count_of(of.participations_max, 'use')}" for of in (before, after))
        old, new = budgets
        if old != new:
            self.audit.record(Action.PRIVACY_RAISE, run.run_id, f"from {old} to {new}")

    async def _reconfigured(self, run: RunDriver, overrides: Sequence[str]) -> RunConfig | None:
        """Return the changed settings that a run has after its resume; None: no change."""
        is_private = run.machine.rules.privacy is not None
        if is_private and self.restoration and (fault := self.restoration.fault_of(run.run_id, run.machine)):
            raise OperatorError(fault)
        config = resumed_config(run, overrides)
        self._factory.check_can_go_on(run.run_id, config or run.config)
        check_has_model(self.state.path, run)
        if config is not None:
            await on_thread(None, with_noise, config)
            parts = await self._factory.parts_of_changed(run.config, config, run.run_id)
            check_resumable(run, has_changes=True)  # it may have advanced while the task was loaded
            run.reconfigure(config, *parts)
        return config

    async def delete_run(self, run_id: RunId) -> str:
        """Delete an ended run: its journal, records and versions. The clients' files are not touched."""
        run = self._run(run_id)
        if run.machine.ledger.state not in TERMINAL:
            raise OperatorError(f"run {run_id} is {run.machine.ledger.state}; only one that has ended can be deleted")
        self.audit.record(Action.RUN_DELETE, run_id)
        del self.runs[run_id]
        await asyncio.shield(self.spawn(self._delete(run)))  # the caller may be cancelled
        return ""

    async def _delete(self, run: HostedRun) -> None:
        await run.stop()
        await on_thread(self._journal_thread, self.journal.delete_run, run.run_id)
        await on_thread(None, remove_files, self.state, run.run_id)

    def _run(self, run_id: RunId) -> HostedRun:
        if run_id not in self.runs:
            raise UnknownRun.among(run_id, self.runs)
        return self.runs[run_id]

    def _tell_of_loss(self, loss: Loss, *, is_accepted: bool) -> None:
        """Log a missing file that does not stop the start: the operator accepts its loss, or its run has ended."""
        logger.warning("%s%s", "accepted by --accept-losses: " if is_accepted else "", loss)
        if is_accepted:
            self.audit.record(Action.LOSS_ACCEPT, f"{loss.run_id} {loss.path.name}", f"{loss.fault}: {loss.cost}")

    async def _recover(
        self, replayed: Replayed, down_since: float, lost: FilesLost | None, published: RoundId | None
    ) -> None:
        """Host a run of an earlier process again, and continue where that process stopped."""
        row, machine = replayed.row, replayed.machine
        for fault in replayed.faults:
            logger.warning(
                "%s: an older snapshot is used instead, and nothing is lost", fault, extra={"run": row.run_id}
            )
        if isinstance(machine, RunMachine):
            run: HostedRun = await self._recovered_rounds(row, machine, replayed.seq)
        else:
            run = self._listen(self._factory.message_driver(row, machine, replayed.seq))
        ledger = run.machine.ledger
        if (
            published is not None and self.restoration is not None and isinstance(run, RunDriver)
        ):  # first: no round may close before its charges
            self.audit.record(Action.PRIVACY_PUBLISHED, row.run_id, f"to round {published}, by --published")
            run.post(PublishedNamed(published, self.restoration.id))
        if ledger.is_open:
            run.post(CoordinatorStarted(down_since, self.config.start_allowance))
        if lost is not None:
            run.post(lost)
        if ledger.state is RunState.QUEUED:
            self.queue.append(row.run_id)
        if ledger.is_open:
            for client_id in ledger.membership.members:
                self.attendance.expect(client_id)
            logger.info("run %s is %s: %s", row.run_id, ledger.state, run.where, extra={"run": row.run_id})
            where = run.where + (spent_of(machine) if isinstance(machine, RunMachine) else "")
            self.audit.record(Action.RUN_RECOVER, row.run_id, where, digests={"model": ledger.model_digest})

    async def _recovered_rounds(self, row: RunRow, machine: RunMachine, seq: int) -> RunDriver:
        """Rebuild a run of rounds around its machine, which has received every event."""
        if not (is_over := machine.ledger.state in TERMINAL):
            self._factory.check_can_go_on(row.run_id, row.config)
        reducer = self._factory.reducer(row.config, row.run_id, is_over=is_over)
        if not is_over:
            self._factory.check_has_codecs(row, machine)
        evaluator = self._factory.evaluator(row.config, row.run_id)
        run = self._host(row, machine, seq, evaluator, reducer)
        if is_over:  # the last process may have ended before it collected the garbage
            run.retention.begin(Keep.after(seq, machine, row.config.round))
            await run.conclude()
        return run

    def _host(self, row: RunRow, machine: RunMachine, seq: int, evaluator: Evaluator, reducer: Reducer) -> RunDriver:
        run = self._factory.driver(row, machine, seq, evaluator, reducer)
        run.listeners.append(partial(self._audit_effects, row.run_id))
        run.listeners.append(partial(self._resume_by_itself, run))
        self._listen(run)
        return run

    def _listen(self, run: HostedRun) -> HostedRun:
        self.clock.advance_to(run.machine.ledger.now)
        self.runs[run.run_id] = run
        run.listeners.append(self._fill_free_places)
        run.start()
        return run

    def _fill_free_places(self, effects: Sequence[object]) -> None:
        """Start queued runs when a run has ended or is paused."""
        if any(isinstance(effect, PauseRun | EndRun) for effect in effects):
            self._start_next()

    def _no_room(self, run_id: RunId, num_bytes: int, error: DiskFull) -> None:
        """Make a run wait for disk space; a run of messages retries until its deadline."""
        if isinstance(run := self.runs.get(run_id), RunDriver):
            run.no_room(num_bytes, error)

    def _resume_by_itself(self, run: RunDriver, effects: Effects) -> None:
        """Resume a run that was paused while waiting for clients, once they are back."""
        ledger = run.machine.ledger
        if not any(isinstance(effect, ResumeRun) for effect in effects) or not ledger.resumes_itself:
            return
        self.audit.record(Action.RUN_RESUME, run.run_id, caller=COORDINATOR)
        wait = not self.has_room
        run.post(ResumeRequested(wait))
        if wait:
            self.queue.append(run.run_id)

    def _audit_effects(self, run_id: RunId, effects: Effects) -> None:
        for entry in entries_of(run_id, effects):
            self.audit.record(*entry, caller=COORDINATOR)

    def judge(
        self, manifest: UpdateManifest, opened: pb.UploadOpen, part: PartManifest | None = None
    ) -> UpdateJudge | MessageJudge | pb.Verdict:
        """Return the judge of an announced update, or the verdict if its run is not hosted here."""
        if (run := self.runs.get(manifest.run_id)) is None:
            return refused(RejectReason.RUN_ENDED, f"there is no run {manifest.run_id!r} here")
        if isinstance(run, MessageDriver):
            return MessageJudge.of(run, manifest, opened)
        return UpdateJudge.of(run, manifest, opened, part)

    def _start_next(self) -> None:
        """Start or resume runs from the head of the queue while there is room."""
        waiting = [one for one in dict.fromkeys(self.queue) if self.state_of(one) is RunState.QUEUED]
        self.queue[:] = waiting  # a program may end while its run waits to resume
        while self.queue and self.has_room:
            run = self.runs[self.queue.pop(0)]
            if run.machine.ledger.is_open:  # it was queued by `resume_run`
                run.post(ResumeRequested())
            else:
                self._begin(run)
                self.attendance.introduce_everyone(run)

    def _begin(self, run: HostedRun) -> None:
        model = run.reducer.version(run.machine.ledger.version).digest if isinstance(run, RunDriver) else Digest("")
        self.audit.record(Action.RUN_START, run.run_id, digests={"model": model}, caller=COORDINATOR)
        run.post(RunStarted(model))
