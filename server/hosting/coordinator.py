"""The coordinator: it hosts runs, `max_runs` at the same time and the others queued, and comes back after a crash.

It owns what the runs share (the state directory, the threads; who is on the line is in `attendance`) and hands each
event to the run that it concerns. What a run decides is its machine's business; how it is carried out, its driver's.
"""

import asyncio
import logging
import shutil
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn, TypeVar

from atoll.parallel.task.task import task_name
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.audit.files import audit_folder
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.identity.names import Identity
from atoll.protocol.manifest import UpdateManifest, digest_of
from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import TERMINAL, RejectReason, RunId, RunState, Version
from atoll.server.audit.actions import Action
from atoll.server.audit.log import COORDINATOR, AuditLog
from atoll.server.audit.rounds import said_of
from atoll.server.clock import Clock
from atoll.server.config.process import CoordinatorConfig
from atoll.server.config.run import RunConfig
from atoll.server.errors import OperatorError, StoreCorrupted, UnknownRun
from atoll.server.files.disk_limits import DiskLimits
from atoll.server.folding.evaluator import TASK_TIMEOUT_S, EvaluationFailed, Evaluator, Reference
from atoll.server.folding.reducer import Reducer
from atoll.server.hosting.attendance import Attendance
from atoll.server.hosting.fair_executor import Turns
from atoll.server.hosting.retention import Keep
from atoll.server.hosting.run_driver import RunDriver
from atoll.server.hosting.update_judge import Judge
from atoll.server.identity.admission import Admission, joined
from atoll.server.identity.signing import Signer
from atoll.server.journal.journal import Journal, RunRow
from atoll.server.journal.placement import num_ranks_of, state_of_rank, write_num_ranks
from atoll.server.journal.state_directory import StateDirectory, run_folder
from atoll.server.ranks.registry import Ranks
from atoll.server.ranks.sharded_reducer import ShardedReducer
from atoll.server.rounds.events import (
    CoordinatorStarted,
    EndRun,
    PauseRequested,
    PauseRun,
    ResumeRequested,
    RunStarted,
    StopRequested,
)
from atoll.server.rounds.open_round import Effects
from atoll.server.rounds.run_machine import RunMachine, what_a_pause_waits_for
from atoll.server.selection.oort import Oort
from atoll.server.selection.sampling import Sampler
from atoll.server.threads import on_thread
from atoll.server.transfers.uploads import Uploads
from atoll.server.transfers.verdicts import refused

logger = logging.getLogger(__name__)

T = TypeVar("T")
ALIVE_S = 0.5

_ANOTHER_MOMENT = (
    "run {} is at version {}, of which {} is missing: the files and the journal are not of the same moment; restore "
    "both from one backup"
)


class Coordinator:
    """See the module docstring. Everything happens on one event loop, but for disk, arithmetic and user code.

    Args:
        config: of the process.
        state: its directory, locked.
        dialer: opens the channels to aggregation ranks.
        is_revoked: whether a certificate of this serial number no longer counts for its identity.
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
        self.runs: dict[RunId, RunDriver] = {}
        self.queue: list[RunId] = []
        self.clock = Clock(self.journal.last_instant())
        self.audit = AuditLog(audit_folder(state.path), self.clock.now)
        self.compute = Turns(2, "compute")
        self._folding = Turns(1, "fold")  # no inspection of a late update delays it; one at a time needs least memory
        self._journal_thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._tasks: set[asyncio.Task[Any]] = set()
        self.ranks = Ranks(config.aggregators, self._tell_ranks) if config.aggregators else None
        self.attendance = Attendance(config, self.runs, self.clock, self.ranks, self.spawn, self.audit)
        self.uploads = Uploads(
            self.judge, lambda run_id: self.runs[run_id].reducer.store, self.compute.of, floor=config.upload_floor
        )
        self.admission = Admission(is_revoked, joined(self.runs))
        self.signer: Signer | None = None
        """Of what is pushed to clients; None: the coordinator is `--insecure`, and nothing is signed."""
        self._adding = asyncio.Lock()
        self.crashed: asyncio.Future[BaseException] = asyncio.get_running_loop().create_future()

    # ------------------------------------------------------------ life

    async def start(self) -> None:
        """Recover every run from the journal, then go on where the last process stopped."""
        down_since = self.state.last_alive() or self.clock.now()
        self.audit.say(Action.COORDINATOR_START, str(self.state.path))
        for run_id in self.journal.deleted_runs():  # the last process may not have come to it
            await on_thread(None, self._remove_files, run_id)
        for row in self.journal.runs():
            await self._recover(row, min(down_since, self.clock.now()))
        self._start_next()
        self._rely_on(self.attendance.watch_leases())
        self._rely_on(self._stay_alive())

    async def stop(self) -> None:
        """End everything; what is not on disk was told to nobody."""
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
        for turns in (self.compute, self._folding):  # the next process must find nobody here
            await on_thread(None, turns.shutdown)
        self.state.mark_alive(self.clock.now())
        self.journal.close()
        self.audit.say(Action.COORDINATOR_STOP, str(self.state.path), "crashed" if self.crashed.done() else "ok")
        await on_thread(None, self.audit.close)

    def spawn(self, work: Coroutine[Any, Any, T]) -> "asyncio.Task[T]":
        """Run something beside everything else; it is cancelled at the end."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _rely_on(self, work: Coroutine[Any, Any, None]) -> None:
        """Run something without which nothing goes on; if it fails, that is a mistake of ours."""

        def ended(task: "asyncio.Task[None]") -> None:
            if not task.cancelled() and (error := task.exception()) is not None:
                logger.critical("the coordinator cannot go on", exc_info=error)
                self._crash(error)

        self.spawn(work).add_done_callback(ended)

    def _crash(self, error: BaseException) -> None:
        """A mistake of ours: end the process; the next one replays the journal."""
        if not self.crashed.done():
            self.crashed.set_result(error)

    async def _stay_alive(self) -> None:
        """Say twice a second that this process lives: the downtime after a crash is measured from here."""
        while True:
            try:
                self.state.mark_alive(self.clock.now())
            except OSError as error:
                logger.warning("cannot say that this process lives: %s", error)
            await asyncio.sleep(ALIVE_S)

    def _tell_ranks(self) -> None:
        self.attendance.tell_ranks()

    # ------------------------------------------------------------ runs

    @property
    def running(self) -> list[RunDriver]:
        """The runs whose rounds are under way; the others are queued, are paused, or have ended."""
        return [run for run in self.runs.values() if run.machine.ledger.state is RunState.RUNNING]

    @property
    def has_room(self) -> bool:
        """Whether one more run may begin, or go on."""
        return len(self.running) < self.config.max_runs

    def state_of(self, run_id: RunId) -> RunState:
        """Where a run stands."""
        return self.runs[run_id].machine.ledger.state

    async def add_run(self, config: RunConfig) -> RunId:
        """Host one more run: its task is loaded, version 0 is made, and it begins when there is room.

        Raises:
            OperatorError: the task or the sampler does not load; the message says why.
            OSError: the disk does not allow it.
        """
        return await asyncio.shield(self.spawn(self._add_run(config)))  # whoever asks may go away

    @property
    def is_adding(self) -> bool:
        """Whether a run is being made that is not among `runs` yet."""
        return self._adding.locked()

    async def added(self) -> None:
        """Wait for the runs that are being made."""
        async with self._adding:
            pass

    async def _add_run(self, config: RunConfig) -> RunId:
        async with self._adding:
            run_id = await self._make_run(config)
        self.queue.append(run_id)
        self._start_next()
        return run_id

    async def _make_run(self, config: RunConfig) -> RunId:
        rules = config.rules
        number = await on_thread(self._journal_thread, self.journal.next_number, config.name)
        run_id = RunId(f"{config.name}-{number}")
        evaluator = self._evaluator(config, run_id)
        try:
            reducer = await self._make_files(config, run_id, evaluator)
            row = RunRow.new(run_id, config, rules, self.clock.now())
            await asyncio.get_running_loop().run_in_executor(self._journal_thread, self.journal.add_run, row)
        except BaseException:
            evaluator.close()
            raise
        self._host(row, RunMachine(rules), 0, evaluator, reducer)
        self.audit.say(Action.RUN_ADD, run_id, digests={"config": digest_of(config.model_dump_json().encode())})
        return run_id

    async def _make_files(self, config: RunConfig, run_id: RunId, evaluator: Evaluator) -> Reducer:
        """Load the task and write version 0; of a run that cannot be, no file stays."""
        try:
            write_num_ranks(self.state.run(run_id), self.config.aggregators)
            reducer = self._reducer(config, run_id)
            await evaluator.check()
            config.cohort.build()
            await reducer.write_initial(evaluator, config.seed)
            self._check_quota(config, reducer)
        except (EvaluationFailed, ValueError, OSError) as error:
            evaluator.close()  # it writes its log there
            await on_thread(None, self._remove_files, run_id)
            if isinstance(error, OSError):
                raise
            raise OperatorError(str(error)) from error
        return reducer

    def _check_quota(self, config: RunConfig, reducer: Reducer) -> None:
        """A plain update is as large as a version: beyond the quota it would be put off for ever. Raises ValueError."""
        most, num_bytes = self.config.incoming_max, reducer.num_bytes(Version(0))
        if most and config.aggregation.codec == "none" and self.ranks is None and num_bytes > most:
            what = f"coordinator.incoming_max is {most}: an update of this model has {num_bytes} bytes"
            raise ValueError(f"{what}; allowed: 0 (no limit), or at least that")

    async def stop_run(self, run_id: RunId, reason: str) -> str:
        """End a run for the operator's reason; returns what is still waited for, or nothing."""
        run = self._run(run_id)
        if run_id in self.queue:
            self.queue.remove(run_id)
            if not run.machine.ledger.is_open:
                self._begin(run)  # and at once ended: what is not in the journal would come back
        if run.machine.ledger.state in TERMINAL:
            raise OperatorError(f"run {run_id} is {run.machine.ledger.state}: {run.machine.ledger.cause}")
        self.audit.say(Action.RUN_STOP, run_id, reason)
        await run.post(StopRequested(reason))
        return "" if run.machine.ledger.state in TERMINAL else "its round aggregates already, and is committed first"

    async def pause_run(self, run_id: RunId, reason: str) -> str:
        """Let no new round of a run begin; returns what is still waited for, or nothing."""
        run = self._run(run_id)
        ledger = run.machine.ledger
        if ledger.state is not RunState.RUNNING:
            raise OperatorError(f"run {run_id} is {ledger.state}; only a running one can be paused")
        self.audit.say(Action.RUN_PAUSE, run_id, reason)
        await run.post(PauseRequested(reason))
        if ledger.state is RunState.RUNNING and ledger.pause_reason is None:
            raise OperatorError(f"run {run_id} is about to end; there is nothing to pause")
        return what_a_pause_waits_for(run.machine)

    async def resume_run(self, run_id: RunId) -> str:
        """Let a paused run go on, or reopen a stopped or failed one; when there is no room, it is queued, and the
        answer says so.
        """
        run = self._run(run_id)
        ledger = run.machine.ledger
        was_open, is_to_pause = ledger.is_open, ledger.pause_reason is not None
        if ledger.state not in (RunState.PAUSED, RunState.STOPPED, RunState.FAILED) and not is_to_pause:
            raise OperatorError(f"run {run_id} is {ledger.state}; only a paused, stopped or failed one can be resumed")
        self._check_ranks(run_id)
        self.audit.say(Action.RUN_RESUME, run_id)
        run.ended.clear()
        wait = not (is_to_pause or self.has_room)
        resumed = run.post(ResumeRequested(wait))
        if not was_open:
            self.attendance.introduce_everyone(run)
        if wait:
            self.queue.append(run_id)
        await resumed
        return f"{len(self.running)} runs are under way (max_runs): it goes on when there is room" if wait else ""

    async def delete_run(self, run_id: RunId) -> str:
        """Forget a run that has ended: its journal, records and versions. What the clients keep of it is theirs."""
        run = self._run(run_id)
        if run.machine.ledger.state not in TERMINAL:
            raise OperatorError(f"run {run_id} is {run.machine.ledger.state}; only one that has ended can be deleted")
        self.audit.say(Action.RUN_DELETE, run_id)
        del self.runs[run_id]
        await asyncio.shield(self.spawn(self._delete(run)))  # whoever asks may go away
        return ""

    async def _delete(self, run: RunDriver) -> None:
        await run.stop()
        await on_thread(self._journal_thread, self.journal.delete_run, run.run_id)
        await on_thread(None, self._remove_files, run.run_id)

    def _remove_files(self, run_id: RunId) -> None:
        folder = self.state.run(run_id)
        num_ranks = num_ranks_of(folder)
        of_ranks = (state_of_rank(self.state.path, k, num_ranks) for k in range(num_ranks))
        for path in (*(run_folder(state, run_id) for state in of_ranks), folder):  # last what tells of the others
            shutil.rmtree(path, ignore_errors=True)

    def _check_ranks(self, run_id: RunId) -> None:
        had, has = num_ranks_of(self.state.run(run_id)), self.config.aggregators
        if had != has:
            what = f"run {run_id} was begun with {had} aggregation ranks, where its versions lie"
            raise OperatorError(f"{what}; this coordinator has {has}: start it with --aggregators {had}")

    def _run(self, run_id: RunId) -> RunDriver:
        if run_id not in self.runs:
            raise UnknownRun(f"there is no run {run_id!r} (known: {', '.join(self.runs) or 'none'})")
        return self.runs[run_id]

    async def _recover(self, row: RunRow, down_since: float) -> None:
        """Rebuild a run's machine: its last snapshot, and every event since."""
        recovered = self.journal.load(row.run_id)
        for fault in recovered.faults:
            logger.warning("%s: an older snapshot is used, and nothing is lost", fault)
        machine = recovered.replay(row.rules)
        self.clock.advance_to(machine.ledger.now)
        reducer = self._reducer(row.config, row.run_id, is_over=machine.ledger.state in TERMINAL)
        if machine.ledger.state not in TERMINAL:
            self._check_ranks(row.run_id)
            await self._recover_version(row.run_id, reducer, machine.ledger.version)
        evaluator = self._evaluator(row.config, row.run_id)
        run = self._host(row, machine, recovered.seq, evaluator, reducer)
        if machine.ledger.state in TERMINAL:  # the last process may not have come to it
            run.retention.round_ended(Keep.after(recovered.seq, machine, row.config.round))
            return
        if machine.ledger.state is RunState.QUEUED:
            self.queue.append(row.run_id)
        if machine.ledger.is_open:
            run.post(CoordinatorStarted(down_since))
            for client_id in machine.ledger.membership.members:
                self.attendance.heard(client_id)  # it has a fresh lease to come back
            logger.info("run %s is %s: %s", row.run_id, machine.ledger.state, _where(machine))
            self.audit.say(
                Action.RUN_RECOVER, row.run_id, _where(machine), digests={"model": machine.ledger.model_digest}
            )

    async def _recover_version(self, run_id: RunId, reducer: Reducer, version: Version) -> None:
        try:
            await on_thread(self.compute.of(run_id), reducer.recover, version)
        except FileNotFoundError as error:
            raise StoreCorrupted(_ANOTHER_MOMENT.format(run_id, version, error.filename)) from error

    def _host(self, row: RunRow, machine: RunMachine, seq: int, evaluator: Evaluator, reducer: Reducer) -> RunDriver:
        run = self.runs[row.run_id] = RunDriver(
            row.run_id,
            row.config,
            task_name(row.config.task),
            machine,
            seq,
            journal=self.journal,
            journal_thread=self._journal_thread,
            reducer=reducer,
            evaluator=evaluator,
            sampler=_sampler(row.config, is_over=machine.ledger.state in TERMINAL),
            hub=self.attendance.hub,
            clock=self.clock,
            crash=self._crash,
            keep_rounds=self.config.keep_rounds,
            is_in_flight=partial(self.uploads.is_in_flight, row.run_id),
            assign=self.ranks.assign if self.ranks is not None else lambda: 0,
            tell_end=self.attendance.tell_everyone,
        )
        run.listeners += [partial(self._say_effects, row.run_id), self._see_who_rests]
        run.start()
        return run

    def _see_who_rests(self, effects: Effects) -> None:
        """A run that has ended, or is paused, makes room for another one."""
        if any(isinstance(effect, PauseRun | EndRun) for effect in effects):
            self._start_next()

    def _say_effects(self, run_id: RunId, effects: Effects) -> None:
        for said in said_of(run_id, effects):
            self.audit.say(*said, caller=COORDINATOR)

    def _reducer(self, config: RunConfig, run_id: RunId, *, is_over: bool = False) -> Reducer:
        make: Callable[..., Reducer] = Reducer
        if self.ranks is not None and num_ranks_of(self.state.run(run_id)) == self.ranks.num_ranks:
            make = partial(ShardedReducer, self.ranks, run_id, self.config.aggregator_patience, self.dialer)
        return make(
            self.state.run(run_id),
            self._folding.of(run_id),
            partial(self.journal.updates, run_id),
            settings=(config.aggregation, config.optimizer),
            is_over=is_over,
            keep_versions=self.config.keep_versions,
            disk=DiskLimits(self.config.disk_free_min, self.config.incoming_max),
            sums_here=self.ranks is None or self.config.start_aggregators,  # on this machine at least
        )

    def judge(self, manifest: UpdateManifest, opened: pb.UploadOpen) -> Judge | pb.Verdict:
        """Who decides about an update; or at once why nobody does."""
        run = self.runs.get(manifest.run_id)
        if run is None:
            return refused(RejectReason.RUN_ENDED, f"there is no run {manifest.run_id!r} here")
        return Judge.of(run, manifest, opened)

    def _evaluator(self, config: RunConfig, run_id: RunId) -> Evaluator:
        reference = Reference(config.task, dict(config.local), config.aggregation.algorithm)
        return Evaluator(reference, self.state.run(run_id) / "worker.log", timeout_s=TASK_TIMEOUT_S)

    def _start_next(self) -> None:
        """Begin the first ones of the queue as far as there is room."""
        while self.queue and self.has_room:
            run = self.runs[self.queue.pop(0)]
            if run.machine.ledger.is_open:  # it waited for its turn to go on
                run.post(ResumeRequested())
            else:
                self._begin(run)
                self.attendance.introduce_everyone(run)

    def _begin(self, run: RunDriver) -> None:
        model = run.reducer.version(run.machine.ledger.version).digest
        self.audit.say(Action.RUN_START, run.run_id, digests={"model": model}, caller=COORDINATOR)
        run.post(RunStarted(model))


def _sampler(config: RunConfig, *, is_over: bool) -> Sampler | Oort:
    """The run's sampler. A run that has ended needs none: that its code is gone concerns only who resumes it."""
    try:
        return config.cohort.build()
    except ConfigError as error:
        if not is_over:
            raise
        missing = error

    def no_sampler(*_: object) -> NoReturn:
        raise missing

    return no_sampler


def _where(machine: RunMachine) -> str:
    if machine.round is None:
        return f"version {machine.ledger.version}"
    record = machine.round.record
    return f"round {record.round_id} ({record.phase}, {record.num_in} updates kept)"
