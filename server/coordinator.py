"""The coordinator: it hosts runs, one after the other, knows who is on the line, and comes back after a crash.

It owns what the runs share (the state directory, the threads; who is on the line is in `attendance`) and hands each
event to the run that it concerns. What a run decides is its machine's business; how it is carried out, its driver's.
"""

import asyncio
import logging
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NoReturn, TypeVar

from atoll.parallel.task import task_name
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.audit_files import audit_folder
from atoll.protocol.identity.dialer import Dialer
from atoll.protocol.identity.names import Identity
from atoll.protocol.manifest import UpdateManifest, digest_of
from atoll.protocol.settings import ConfigError
from atoll.protocol.vocabulary import TERMINAL, RejectReason, RunId, RunState
from atoll.server.attendance import Attendance
from atoll.server.audit.actions import Action
from atoll.server.audit.log import COORDINATOR, AuditLog
from atoll.server.audit.rounds import said_of
from atoll.server.clock import Clock
from atoll.server.config import CoordinatorConfig, RunConfig
from atoll.server.driver import RunDriver
from atoll.server.evaluator import EvaluationFailed, Evaluator, Reference
from atoll.server.events import (
    CoordinatorStarted,
    ResumeRequested,
    RunStarted,
    StopRequested,
)
from atoll.server.identity.admission import Admission, joined
from atoll.server.identity.signing import Signer
from atoll.server.journal import Journal, RunRow
from atoll.server.judge import Judge, refused
from atoll.server.limits import DiskLimits
from atoll.server.oort import Oort
from atoll.server.open_round import Effects
from atoll.server.placement import num_ranks_of, write_num_ranks
from atoll.server.ranks import Ranks
from atoll.server.reduce import Reducer
from atoll.server.retention import Keep
from atoll.server.run import RunMachine
from atoll.server.sampling import Sampler
from atoll.server.sharded_reduce import ShardedReducer
from atoll.server.statedir import StateDirectory
from atoll.server.threads import on_thread
from atoll.server.uploads import Uploads

logger = logging.getLogger(__name__)

T = TypeVar("T")
ALIVE_S = 0.5
TASK_TIMEOUT_S = 600.0


class OperatorError(RuntimeError):
    """The operator asked for something that cannot be; the message says what can."""


class UnknownRun(OperatorError):
    """There is no such run here."""


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
        self.compute = ThreadPoolExecutor(2, thread_name_prefix="compute")
        self._folding = ThreadPoolExecutor(1, thread_name_prefix="fold")  # no inspection of a late update delays it
        self._journal_thread = ThreadPoolExecutor(1, thread_name_prefix="journal")
        self._tasks: set[asyncio.Task[Any]] = set()
        self.ranks = Ranks(config.aggregators, self._tell_ranks) if config.aggregators else None
        self.attendance = Attendance(config, self.runs, self.clock, self.ranks, self.spawn, self.audit)
        self.uploads = Uploads(
            self.judge, lambda run_id: self.runs[run_id].reducer.store, self.compute, floor=config.upload_floor
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
        for executor in (self._journal_thread, self.compute, self._folding):  # the next process must find nobody here
            await on_thread(None, partial(executor.shutdown, cancel_futures=True))
        self.state.mark_alive(self.clock.now())
        self.journal.close()
        has_crashed = self.crashed.done() and not self.crashed.cancelled()
        self.audit.say(Action.COORDINATOR_STOP, str(self.state.path), "crashed" if has_crashed else "ok")
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

    async def on_thread(self, function: Callable[..., T], *args: Any) -> T:
        """Do what takes the disk or the processor on one of the compute threads; see `threads.on_thread`."""
        return await on_thread(self.compute, function, *args)

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
    def active(self) -> RunDriver | None:
        """The run whose rounds are under way; the others are queued, or have ended."""
        return next((run for run in self.runs.values() if run.machine.ledger.state is RunState.RUNNING), None)

    def state_of(self, run_id: RunId) -> RunState:
        """Where a run stands."""
        if run_id in self.queue:
            return RunState.QUEUED
        return self.runs[run_id].machine.ledger.state

    async def add_run(self, config: RunConfig) -> RunId:
        """Host one more run: its task is loaded, version 0 is made, and it begins when those before it have ended.

        Raises:
            OperatorError: the task or the sampler does not load; the message says why.
            OSError: the disk does not allow it.
        """
        return await asyncio.shield(self.spawn(self._add_run(config)))  # whoever asks may go away

    async def _add_run(self, config: RunConfig) -> RunId:
        async with self._adding:
            run_id = await self._make_run(config)
        self.queue.append(run_id)
        self._start_next()
        return run_id

    async def _make_run(self, config: RunConfig) -> RunId:
        rules = config.rules
        rows = await on_thread(self._journal_thread, self.journal.runs)
        run_id = RunId(f"{config.name}-{1 + sum(row.config.name == config.name for row in rows)}")
        evaluator = self._evaluator(config, run_id)
        try:
            write_num_ranks(self.state.run(run_id), self.config.aggregators)
            reducer = self._reducer(config, run_id)
            await evaluator.check()
            config.cohort.build()
            await reducer.write_initial(evaluator, config.seed)
            row = RunRow.new(run_id, config, rules, self.clock.now())
            await asyncio.get_running_loop().run_in_executor(self._journal_thread, self.journal.add_run, row)
        except BaseException as error:
            evaluator.close()
            if isinstance(error, EvaluationFailed | ValueError):
                raise OperatorError(str(error)) from error
            raise
        self._host(row, RunMachine(rules), 0, evaluator, reducer)
        self.audit.say(Action.RUN_ADD, run_id, digests={"config": digest_of(config.model_dump_json().encode())})
        return run_id

    async def stop_run(self, run_id: RunId, reason: str) -> None:
        """End a run for the operator's reason."""
        run = self._run(run_id)
        if run_id in self.queue:
            self.queue.remove(run_id)
            self._begin(run)  # and at once ended: what is not in the journal would come back
        if run.machine.ledger.state is not RunState.RUNNING:
            raise OperatorError(f"run {run_id} is {run.machine.ledger.state}: {run.machine.ledger.cause}")
        self.audit.say(Action.RUN_STOP, run_id, reason)
        await run.post(StopRequested(reason))

    async def resume_run(self, run_id: RunId) -> None:
        """Reopen a stopped or failed run; it goes on from its last committed version."""
        run = self._run(run_id)
        if run.machine.ledger.state not in (RunState.STOPPED, RunState.FAILED):
            raise OperatorError(f"run {run_id} is {self.state_of(run_id)}; only a stopped or failed one can be resumed")
        if (active := self.active) is not None:
            raise OperatorError(f"run {active.run_id} is running; stop it first, or wait for its end")
        self._check_ranks(run_id)
        self.audit.say(Action.RUN_RESUME, run_id)
        run.ended.clear()
        resumed = run.post(ResumeRequested())
        self.attendance.introduce_everyone(run)
        self._rely_on(self._after(run))
        await resumed

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
            await self.on_thread(reducer.recover, machine.ledger.version)
        evaluator = self._evaluator(row.config, row.run_id)
        run = self._host(row, machine, recovered.seq, evaluator, reducer)
        if machine.ledger.state in TERMINAL:  # the last process may not have come to it
            run.retention.round_ended(Keep.after(recovered.seq, machine, row.config.round))
        elif machine.ledger.state is RunState.QUEUED:
            self.queue.append(row.run_id)
        elif machine.ledger.state is RunState.RUNNING:
            run.post(CoordinatorStarted(down_since))
            self._rely_on(self._after(run))
            for client_id in machine.ledger.membership.members:
                self.attendance.heard(client_id)  # it has a fresh lease to come back
            logger.info("run %s goes on in %s", row.run_id, _where(machine))
            self.audit.say(
                Action.RUN_RECOVER, row.run_id, _where(machine), digests={"model": machine.ledger.model_digest}
            )

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
        )
        run.listeners.append(partial(self._say_effects, row.run_id))
        run.start()
        return run

    def _say_effects(self, run_id: RunId, effects: Effects) -> None:
        for said in said_of(run_id, effects):
            self.audit.say(*said, caller=COORDINATOR)

    def _reducer(self, config: RunConfig, run_id: RunId, *, is_over: bool = False) -> Reducer:
        make: Callable[..., Reducer] = Reducer
        if self.ranks is not None and num_ranks_of(self.state.run(run_id)) == self.ranks.num_ranks:
            make = partial(ShardedReducer, self.ranks, run_id, self.config.aggregator_patience, self.dialer)
        return make(
            self.state.run(run_id),
            self._folding,
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
        log = self.state.run(run_id) / "worker.log"
        reference = Reference(config.task, dict(config.local), config.aggregation.algorithm)
        return Evaluator(reference, log, timeout_s=TASK_TIMEOUT_S)

    def _start_next(self) -> None:
        """Begin the first of the queue when no run is under way."""
        if self.active is not None or not self.queue:
            return
        run = self.runs[self.queue.pop(0)]
        self._begin(run)
        self.attendance.introduce_everyone(run)
        self._rely_on(self._after(run))

    def _begin(self, run: RunDriver) -> None:
        model = run.reducer.version(run.machine.ledger.version).digest
        self.audit.say(Action.RUN_START, run.run_id, digests={"model": model}, caller=COORDINATOR)
        run.post(RunStarted(model))

    async def _after(self, run: RunDriver) -> None:
        await run.ended.wait()
        self._start_next()


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
