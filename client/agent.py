"""The asyncio shell around one client: it carries the pure `Session` through the world.

Events in, effects out, one timer. Everything happens on one event loop; what blocks, blocks a thread. Losing the
connection, a worker or a transfer is an event like any other. A mistake of ours ends the process: the spool keeps what
is finished for the next one.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Collection, Coroutine
from dataclasses import dataclass
from typing import Any

from atoll import __version__
from atoll.client.config import AgentConfig
from atoll.client.disk.client_state import PersonalState
from atoll.client.disk.model_cache import ModelCache
from atoll.client.disk.residual_store import Kept
from atoll.client.disk.spool import Spool
from atoll.client.disk.state_directory import StateDirectory
from atoll.client.disk.verifier import Verifier
from atoll.client.policy.decide import Decision
from atoll.client.policy.disclosure import disclosed_evaluation, disclosed_failure
from atoll.client.policy.gate import Gate, failure_of
from atoll.client.session.events import (
    Asked,
    Connect,
    Connected,
    Discard,
    Disconnected,
    Download,
    Effect,
    EvaluationRequest,
    Event,
    Extend,
    Forbidden,
    Invitation,
    Key,
    KillWorker,
    ReportEvaluation,
    ReportFailure,
    Request,
    RunEnded,
    StopWork,
    TimePassed,
    Upload,
    Work,
)
from atoll.client.session.rollback_rules import Refused
from atoll.client.session.session import Session, SessionRules
from atoll.client.wire import messages
from atoll.client.wire.coordinator_connection import Line
from atoll.client.wire.messages import BadMessage
from atoll.client.wire.uploads import Uploads
from atoll.client.work.jobs import NotAdmitted, Workshop
from atoll.client.work.runner import Runner
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol import crash_points
from atoll.protocol.identity.membership import Membership
from atoll.protocol.manifest import VersionManifest
from atoll.protocol.vocabulary import RunState

logger = logging.getLogger(__name__)

POLICY_POLL_S = 0.5
"""How soon a change of the policy, an approval, or the end of the hours takes effect."""


@dataclass(slots=True, eq=False)
class _Job:
    """What the workshop is busy with."""

    key: Key
    is_fetching: bool
    task: "asyncio.Task[Event] | None" = None
    is_dropped: bool = False  # nobody waits for its event


class Agent:
    """One client of one coordinator. `run` it once.

    Args:
        config: of the agent.
        tasks: names of the tasks that it allows.
        runner: who trains.
        state: the agent's directory, locked.
        gate: the site's own policy.
        membership: where the coordinator is, and how it is dialled.
        verifier: of what the coordinator says; None: the connection is `--insecure`, and nothing is signed.
    """

    def __init__(
        self,
        config: AgentConfig,
        tasks: Collection[str],
        runner: Runner,
        state: StateDirectory,
        gate: Gate,
        membership: Membership,
        verifier: Verifier | None = None,
    ) -> None:
        self._config, self._tasks, self._runner, self._gate = config, frozenset(tasks), runner, gate
        self._membership, self._verifier = membership, verifier
        self._loop = asyncio.get_running_loop()
        self._rng = random.Random(config.site)
        self._spool = Spool(state.spool, config.spool_max_bytes)
        self._kept = Kept(state.kept, self._spool.entries().values())
        rules = SessionRules(
            tasks=self._tasks,
            lease=config.lease,
            reconnect_min=config.reconnect_min,
            reconnect_max=config.reconnect_max,
        )
        self.session = Session(rules, self._rng, self._spool.entries())
        self._line = Line(
            membership.address,
            membership.dialer,
            replaced_wait=config.reconnect_max,
            hello=self._hello,
            on_connected=self._on_connected,
            on_message=self._on_message,
            on_lost=lambda: self._receive(Disconnected()),
            spawn=self._spawn,
            verifier=verifier,
        )
        self._workshop = Workshop(
            config.site,
            work=state.work,
            cache=ModelCache(state.models),
            spool=self._spool,
            kept=self._kept,
            personal=PersonalState(state.personal),
            runner=runner,
            link=self._line.link,
            ranks=self._line.ranks,
            wait=self._wait,
            remember=verifier.memory.save if verifier is not None else lambda: None,
            admit=self._admit,
        )
        self._uploads = Uploads(
            self._spool,
            self._line,
            bytes_per_s=config.upload_limit,
            spawn=self._spawn,
            on_event=self._receive,
            ask=gate.ask_upload,
            tell=self._tell_failure,
        )
        self._num_examples = 0
        self._job: _Job | None = None
        self._last_job: asyncio.Task[Event] | None = None
        self._tasks_running: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._has_run_ended = False
        self._has_declined = False  # something that the policy may allow later
        self._ended: asyncio.Future[int] = self._loop.create_future()

    # ------------------------------------------------------------ life

    async def run(self) -> int:
        """Work until `stop`, or until the run has ended if the configuration says so; returns the exit code.

        Raises:
            ConfigError: a task does not load.
        """
        self._spawn(self._begin())
        try:
            return await self._ended
        finally:
            await self._shut_down()

    def stop(self) -> None:
        """End orderly: say goodbye, end the worker, keep the spool."""
        if not self._ended.done():
            self._ended.set_result(0)

    async def _begin(self) -> None:
        self._num_examples = await self._runner.describe()
        if waiting := len(self.session.outgoing):
            logger.info("%d finished updates of an earlier process wait to be sent", waiting)
        if self._membership.keeper is not None:
            self._membership.keeper.on_replaced(lambda _: self._line.renew())
        self._spawn(self._membership.keep())
        self._line.dial(0.0)
        while True:
            await asyncio.sleep(POLICY_POLL_S)
            if self._gate.poll():
                self._policy_changed()

    async def _shut_down(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._job is not None and self._job.task is not None:
            self._job.is_dropped = True
            self._job.task.cancel()
        await asyncio.gather(self._line.hang_up(), self._runner.close())
        running = {task for task in self._tasks_running if task is not asyncio.current_task()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = self._loop.create_task(work)
        self._tasks_running.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[Any]") -> None:
        self._tasks_running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._ended.done():
            self._ended.set_exception(error)

    # ------------------------------------------------------------ events in

    def _receive(self, event: Event) -> None:
        if self._ended.done():
            return
        for effect in self.session.receive(event, self._loop.time()):
            self._carry_out(effect)
        self._arm_timer()
        if self._config.exit_when_done and self._has_run_ended and not self.session.outgoing and self._is_idle:
            logger.info("no run is left and nothing waits to be sent: done")
            self.stop()

    @property
    def _is_idle(self) -> bool:
        return not self.session.waiting and (self.session.job is None or self.session.job.is_released)

    def _arm_timer(self) -> None:
        deadline = self.session.deadline
        if self._timer is not None:
            if self._timer.when() == deadline:
                return
            self._timer.cancel()
        self._timer = None if deadline is None else self._loop.call_at(deadline, self._time_passed)

    def _time_passed(self) -> None:
        self._timer = None
        self._receive(TimePassed())

    def _hello(self) -> pb.Hello:
        return messages.hello(
            site=self._config.site,
            session=secrets.token_hex(8),
            tasks=self._tasks,
            num_examples=self._num_examples,
            label=self._config.label,
            working_on=self.session.working_on,
            software=f"atoll {__version__}",
        )

    def _on_connected(self, welcome: pb.Welcome) -> None:
        logger.info("connected to %s as %s", self._membership.address, self._config.site)
        if welcome.tasks and self._tasks.isdisjoint(welcome.tasks):
            hosted, allowed = ", ".join(welcome.tasks), ", ".join(sorted(self._tasks))
            logger.warning("the coordinator hosts %s; this agent allows %s", hosted, allowed)
        self._has_declined = False
        self._gate.told(welcome.audit_checkpoint)
        self._receive(Connected())

    def _on_message(self, message: pb.ServerMessage) -> None:
        try:
            event = messages.event_of(message)
        except BadMessage as error:
            logger.warning("a message of the coordinator is ignored: %s", error)
            return
        if self._verifier is not None:
            if (refused := self._verifier.check(message, event)) is not None:
                self._refuse(event, refused)
                return
            event = self._verifier.timed(message, event)
        if message.HasField("invite"):
            self._gate.told(message.invite.audit_checkpoint)
        match event:
            case None:
                return
            case Asked(request) if (decision := self._objection(request)) is not None:
                event = self._forbidden(request, decision)
            case Asked(Invitation() as invitation):
                self._tell_of(invitation)
                crash_points.reached("agent.invited")
            case RunEnded(run_id):
                self._has_run_ended = message.run_ended.num_open == 0
                logger.info("run %s is %s: %s", run_id, message.run_ended.state, message.run_ended.cause)
        self._receive(event)
        if isinstance(event, RunEnded) and message.run_ended.state == RunState.FINISHED:
            self._kept.forget(event.run_id)

    def _refuse(self, event: Event | None, refused: Refused) -> None:
        """The coordinator hears of an invitation that comes to nothing; of other messages the log alone tells."""
        logger.warning("refused: %s: %s: %s", type(event).__name__, refused.reason, refused.detail)
        match event:
            case Asked(Invitation() as invitation):
                run_id, round_id = invitation.run_id, invitation.round_id
                self._carry_out(ReportFailure(run_id, round_id, refused.reason, refused.detail))
            case Asked(EvaluationRequest() as request):
                detail = f"{refused.reason}: {refused.detail}"
                self._carry_out(ReportEvaluation(request.run_id, request.version, None, detail, refused.reason))

    def _tell_of(self, invitation: Invitation) -> None:
        until = time.strftime("%H:%M:%S", time.localtime(time.time() + invitation.time_left))
        logger.info("invited to round %d of %s, until %s", invitation.round_id, invitation.run_id, until)

    # ------------------------------------------------------------ the policy

    def _objection(self, request: Request) -> Decision | None:
        """What the policy has against a request; nothing is begun for a round whose update waits to be answered."""
        if request.key in self.session.outgoing or (decision := self._gate.ask(request)).is_allowed:
            return None
        return decision

    def _forbidden(self, request: Request, decision: Decision) -> Forbidden:
        self._has_declined = True
        return Forbidden(request, failure_of(decision), f"{decision.rule}: {decision.detail}")

    def _admit(self, request: Request, model: VersionManifest) -> None:
        if not (decision := self._gate.admit(request, model)).is_allowed:
            forbidden = self._forbidden(request, decision)
            raise NotAdmitted(forbidden.reason, forbidden.detail)

    def _policy_changed(self) -> None:
        """What is under way is asked about again; what was declined may be offered again."""
        job = self.session.job
        requests = [waiting.request for waiting in self.session.waiting.values()]
        for request in requests if job is None or job.is_released else [*requests, job.request]:
            if not (decision := self._gate.ask(request)).is_allowed:
                self._receive(self._forbidden(request, decision))
        self._uploads.ask_again()
        if self._has_declined:
            self._has_declined = False
            self._line.send(messages.ready())

    # ------------------------------------------------------------ effects out

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Connect(delay):
                self._line.dial(delay)
            case ReportFailure(run_id, round_id, reason, detail):
                logger.warning("giving up round %d of %s: %s: %s", round_id, run_id, reason, detail)
                self._tell_failure(effect)
            case ReportEvaluation():
                self._tell_evaluation(effect)
            case Upload(key, digest):
                self._uploads.begin(key, digest)
            case Discard(key, digest, accepted, is_answered):
                if not is_answered:  # an answer has a line already
                    logger.info("the update of round %d of %s is not wanted any more: it is deleted", key[2], key[1])
                self._kept.settle(digest, accepted=accepted)
                crash_points.reached("agent.settled")
                self._uploads.discard(key, digest)
            case _:
                self._carry_out_job(effect)

    def _tell_failure(self, report: ReportFailure) -> None:
        disclosed = disclosed_failure(report, error_details=self._gate.error_details)
        self._line.send(messages.failure(disclosed))

    def _tell_evaluation(self, report: ReportEvaluation) -> None:
        if report.reason is not None:
            what = "giving up the evaluation of version %d of %s: %s"
            logger.warning(what, report.version, report.run_id, report.detail)
        disclosed = disclosed_evaluation(report, error_details=self._gate.error_details)
        self._line.send(messages.evaluation(disclosed))

    def _carry_out_job(self, effect: Effect) -> None:
        match effect:
            case Download(request):
                self._begin_job(request, None)
            case Work(request, budget):
                self._begin_job(request, budget)
            case Extend(budget):
                self._runner.extend(budget)
            case StopWork(key) | KillWorker(key):
                self._end_job(key, at_once=isinstance(effect, KillWorker))

    def _wait(self, num_cuts: int) -> float:
        step = min(self._config.reconnect_max, self._config.reconnect_min * 2.0 ** min(num_cuts, 30))
        return step * self._rng.uniform(0.5, 1.0)

    # ------------------------------------------------------------ the job

    def _begin_job(self, request: Request, budget: float | None) -> None:
        """Fetch the model (no budget), or work. What went before has been told to end, and is waited for."""
        job = _Job(request.key, is_fetching=budget is None)
        self._job, before = job, self._last_job

        async def work() -> Event:
            if before is not None and not before.done():
                await asyncio.wait({before})
            if budget is None:
                return await self._workshop.fetch(request)
            if isinstance(request, EvaluationRequest):
                return await self._workshop.evaluate(request, budget)
            return await self._workshop.train(request, budget)

        job.task = self._last_job = self._spawn(work())
        job.task.add_done_callback(lambda task: self._job_ended(job, task))

    def _job_ended(self, job: _Job, task: "asyncio.Task[Event]") -> None:
        if self._job is job:
            self._job = None
        if not (job.is_dropped or task.cancelled() or task.exception()):
            self._receive(task.result())

    def _end_job(self, key: Key, *, at_once: bool) -> None:
        job = self._job
        if job is None or job.key != key or job.task is None:
            return
        if not (at_once or job.is_fetching):
            self._runner.stop()
            return
        if at_once:
            self._runner.kill()
        job.is_dropped = True
        job.task.cancel()
