"""The asyncio shell around one client's `Session`: it delivers events, carries out effects and keeps the one timer.

All of it runs on one event loop; blocking work runs on threads. The loss of the connection, a worker or a transfer is
an event like any other. A bug of Atoll ends the process: finished updates stay in the spool for the next one.
"""

import asyncio
import logging
import random
import secrets
import time
from collections.abc import Collection, Coroutine
from typing import Any

from atoll.client.config import AgentConfig
from atoll.client.disk.state_directory import StateDirectory
from atoll.client.disk.stores import Stores
from atoll.client.disk.verifier import Verifier
from atoll.client.notices import AgentWatch
from atoll.client.phases import Phases
from atoll.client.policy.decide import Decision, Outcome
from atoll.client.policy.disclosure import disclosed_answer, disclosed_failure
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
    Forget,
    Invitation,
    Join,
    Key,
    KillWorker,
    ModelRequest,
    Released,
    ReportEvaluation,
    ReportFailure,
    ReportStatistics,
    Request,
    RunEnded,
    StatisticsRequest,
    StopWork,
    TimePassed,
    Upload,
    Work,
)
from atoll.client.session.rollback_rules import Refused, run_of
from atoll.client.session.session import Session, SessionRules
from atoll.client.site.security import SiteSecurity
from atoll.client.wire import messages
from atoll.client.wire.coordinator_connection import ConnectionHandlers, CoordinatorConnection
from atoll.client.wire.messages import BadMessage
from atoll.client.wire.uploads import Uploads
from atoll.client.work.job_slot import JobSlot
from atoll.client.work.jobs import Jobs
from atoll.client.work.runner import Runner
from atoll.client.work.secure_sums import SecureSums
from atoll.client.work.version_fetcher import NotAdmitted, VersionFetcher
from atoll.ground.backoff import delay
from atoll.ground.printable import count_of, printable
from atoll.ground.process import crash_points
from atoll.protocol import atoll_pb2 as pb
from atoll.protocol.build import software
from atoll.protocol.identity.membership import Membership
from atoll.protocol.log_fields import note_run
from atoll.protocol.manifest import VersionManifest
from atoll.protocol.privacy.composition import epsilon_of
from atoll.protocol.threads import on_thread
from atoll.protocol.vocabulary import DECLINES, FailureReason, RunId, RunState
from atoll.tensors.codecs.names import supported

logger = logging.getLogger(__name__)

NOTICE_MAX = 1000
"""Characters of a coordinator's notice that are logged."""

POLICY_POLL_S = 0.5
"""Seconds between two checks of the policy file; a change, an approval or the end of the hours takes effect within this
time."""


class Agent:
    """One client of one coordinator; `run` it once.

    Its constructor is the composition root: it wires the session to the disk, the wire and the work.

    Args:
        config: the agent's settings.
        tasks: names of the tasks that it allows.
        runner: trains and evaluates.
        state: the agent's directory, locked.
        gate: the site's policy.
        membership: the coordinator's address, and how to dial it.
        verifier: checks the coordinator's messages; None: the connection is `--insecure`, and nothing is signed.
        security: the site's part in secure sums; None: it joins none.
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
        *,
        security: SiteSecurity | None = None,
    ) -> None:
        self.config, self._tasks, self._runner = config, frozenset(tasks), runner
        self.gate, self.membership, self._verifier, self._security = gate, membership, verifier, security
        self._loop, self._rng = asyncio.get_running_loop(), random.Random(config.site)
        self._ended: asyncio.Future[int] = self._loop.create_future()
        self._background: set[asyncio.Task[Any]] = set()
        self._timer: asyncio.TimerHandle | None = None
        self._num_examples = 0
        self._has_run_ended = False
        self._has_declined = False  # the policy may later allow what it declined
        self._process, self._folder_id = secrets.token_hex(8), state.folder_id
        self.stores = Stores.open(state, spool_max_bytes=config.spool_max_bytes)
        self._note_numbers()
        self.session = Session(
            self._session_rules(), self._rng, self.stores.spool.entries(), self.stores.encoded.entries()
        )
        self.phases = Phases()
        self._connection = self._make_connection()
        self._uploads = Uploads(
            self.stores.spool,
            self._connection,
            bytes_per_s=config.upload_limit,
            spawn=self._spawn,
            on_event=self._receive,
            ask=gate.ask_upload,
            report=self._report_failure,
            disclosure=gate.disclosure_of,
        )
        self._sums = SecureSums(
            config.site,
            self.stores,
            security,
            runner=runner,
            send=self._connection.send,
            spawn=self._spawn,
            on_event=self._receive,
        )
        self.slot = self._make_job_slot()
        keeper, address = membership.keeper, membership.address
        self._watch = AgentWatch(config, state, gate, self._connection, keeper, address)

    @property
    def recovered(self) -> str:
        """Number of finished updates in the spool, as text; empty if there are none."""
        number = len(self.stores.spool.entries())
        return count_of(number, "finished update") if number else ""

    def _note_numbers(self) -> None:
        """Remember the numbers of the runs of finished updates, for the ids of their traces."""
        for spool in (self.stores.spool, self.stores.encoded):
            for key in spool.entries():
                note_run(key[1], spool[key].run_number)

    def _session_rules(self) -> SessionRules:
        config = self.config
        return SessionRules(
            tasks=self._tasks,
            lease=config.lease,
            reconnect_min=config.reconnect_min,
            reconnect_max=config.reconnect_max,
        )

    def _make_connection(self) -> CoordinatorConnection:
        handlers = ConnectionHandlers(
            hello=self._hello,
            on_connected=self._on_connected,
            on_message=self._on_message,
            on_lost=lambda: self._receive(Disconnected()),
        )
        return CoordinatorConnection(
            self.membership.address,
            self.membership.dialer,
            handlers,
            displaced_wait=self.config.reconnect_max,
            spawn=self._spawn,
            verifier=self._verifier,
        )

    def _make_job_slot(self) -> JobSlot:
        save_seen = self._verifier.memory.save if self._verifier is not None else lambda: None
        versions = VersionFetcher(self.stores, self._connection, wait=self._wait, admit=self._admit)
        jobs = Jobs(self.config.site, self.stores, self._runner, versions, save_seen=save_seen)
        jobs.phases = self._uploads.phases = self.phases
        return JobSlot(jobs, self._runner, spawn=self._spawn, on_event=self._receive)

    # ------------------------------------------------------------ life

    async def run(self) -> int:
        """Work until `stop`, or with `exit_when_done` until no run is left; returns the exit code.

        Raises:
            ConfigError: a task does not load.
        """
        self._spawn(self._begin())
        try:
            return await self._ended
        finally:
            await self._shut_down()

    def stop(self) -> None:
        """Shut down: send Leave, stop the worker, keep the spool."""
        if not self._ended.done():
            self._ended.set_result(0)

    async def _begin(self) -> None:
        self._num_examples = await self._runner.describe()
        if waiting := len(self.session.outgoing):
            logger.info("%d finished updates of an earlier process wait to be sent", waiting)
        if self.membership.keeper is not None:
            self.membership.keeper.on_replaced(lambda _: self._connection.renew())
        self._spawn(self.membership.keep())
        self._spawn(self._watch.notices.run())
        self._accept_rollbacks()
        self._connection.dial(0.0)
        while True:
            await asyncio.sleep(POLICY_POLL_S)
            if self.gate.poll():
                self._accept_rollbacks()
                self._policy_changed()

    async def _shut_down(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.slot.drop()
        await self._watch.notices.close()
        await asyncio.gather(self._connection.hang_up(), self._runner.close())
        running = {task for task in self._background if task is not asyncio.current_task()}
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)

    def _spawn(self, work: Coroutine[Any, Any, Any]) -> "asyncio.Task[Any]":
        task = self._loop.create_task(work)
        self._background.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: "asyncio.Task[Any]") -> None:
        self._background.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not self._ended.done():
            self._ended.set_exception(error)

    # ------------------------------------------------------------ events in

    def _receive(self, event: Event) -> None:
        if self._ended.done():
            return
        for effect in self.session.receive(event, self._loop.time()):
            self._carry_out(effect)
        self._arm_timer()
        if self.config.exit_when_done and self._has_run_ended and not self.session.outgoing and self._is_idle:
            logger.info("no run is left and the spool is empty: done")
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
        hello = messages.hello(
            site=self.config.site,
            session=secrets.token_hex(8),
            tasks=self._tasks,
            num_examples=self._num_examples if self._security is None or self._security.tells_examples else 0,
            label=self.config.label,
            working_on=self.session.working_on,
            software=software(),
            codecs=supported(),
        )
        hello.process, hello.folder, hello.clock = self._process, self._folder_id, time.time()
        hello.takes_messages, hello.takes_notices = not self.config.crew.mesh, True
        hello.joins_sessions = self._sums.joins
        return hello

    def _on_connected(self, welcome: pb.Welcome) -> None:
        logger.info("connected to %s as %s", self.membership.address, self.config.site)
        if welcome.tasks and self._tasks.isdisjoint(welcome.tasks):
            hosted, allowed = ", ".join(welcome.tasks), ", ".join(sorted(self._tasks))
            logger.warning("the coordinator hosts %s; this agent allows %s", hosted, allowed)
        self._has_declined = False
        self.gate.note_checkpoint(welcome.audit_checkpoint)
        self._receive(Connected())

    def _on_message(self, message: pb.ServerMessage) -> None:
        try:
            event = messages.event_of(message)
        except BadMessage as error:
            logger.warning("a message of the coordinator is not valid and is ignored: %s", error)
            return
        _note_number(event)
        if self._verifier is not None:
            if (refused := self._verifier.check(message, event)) is not None:
                self._refuse(event, refused)
                return
            event = self._verifier.timed(message, event)
        self._note(message, event)
        match event:
            case None:
                self._sums.asked(message)
                return
            case Asked(request) if (forbidden := self._objection(request)) is not None:
                event = forbidden
            case Asked(Invitation() as invitation):
                self._log_invitation(invitation)
                crash_points.reached("agent.invited")
            case Released() if self.session.is_at_work_for(("round", event.run_id, event.round_id)):
                self._log_release(event)
            case RunEnded(run_id):
                self._has_run_ended = message.run_ended.num_open == 0
                ended = message.run_ended
                logger.info("run %s is %s: %s", run_id, ended.state, ended.cause, extra={"run": run_id})
        self._receive(event)
        if isinstance(event, RunEnded):
            self._run_ended(event.run_id, message.run_ended.state)

    def _note(self, message: pb.ServerMessage, event: Event | None) -> None:
        """Log a notice, or what a sum of statistics is of; record the audit checkpoint that an invitation carries."""
        if message.HasField("notice"):
            logger.warning("the coordinator says: %s", printable(message.notice.text[:NOTICE_MAX]))
        if message.HasField("invite"):
            self.gate.note_checkpoint(message.invite.audit_checkpoint)
        if isinstance(event, Asked) and isinstance(request := event.request, StatisticsRequest) and request.question:
            text, what = "request %d for statistics of %s asks for a secure sum of %s", request.question.in_words()
            logger.info(text, request.number, request.task, what, extra={"run": request.run_id})

    def _run_ended(self, run_id: RunId, state: str) -> None:
        self._runner.run_ended(run_id)
        self.stores.fresh.forget_run(run_id)
        self._watch.run_ended(run_id, state)
        if state == RunState.FINISHED:
            self.stores.residuals.forget(run_id)

    def _refuse(self, event: Event | None, refused: Refused) -> None:
        """Log a message that the verifier refuses, and report the job that it asked for to the coordinator as failed.

        A message whose time stamp is off is not reported: the agent reconnects, which compares the clocks. If they
        agree, the coordinator asks again; if not, the coordinator refuses this site until they do, and no round fails.
        """
        extra = {"run": run_of(event)}
        logger.warning("refused: %s: %s: %s", type(event).__name__, refused.reason, refused.detail, extra=extra)
        if refused.reason is FailureReason.CLOCK_SKEW:
            self._connection.leave()
            return
        match event:
            case Asked(Invitation() as invitation):
                run_id, round_id = invitation.run_id, invitation.round_id
                self._carry_out(ReportFailure(run_id, round_id, refused.reason, refused.detail))
            case Asked(EvaluationRequest() as request):
                detail = f"{refused.reason}: {refused.detail}"
                self._carry_out(ReportEvaluation(request.run_id, request.version, None, detail, refused.reason))

            case Asked(StatisticsRequest() as request):
                detail = f"{refused.reason}: {refused.detail}"
                self._carry_out(ReportStatistics(request.run_id, request.number, None, detail, refused.reason))

    def _log_invitation(self, invitation: Invitation) -> None:
        until = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(time.time() + invitation.time_left))
        if invitation.message:
            what = (invitation.round_id, invitation.message, invitation.run_id, until)
            logger.info("asked to answer message %d (%s) of %s, until %s", *what, extra={"run": invitation.run_id})
            return
        about = {"run": invitation.run_id, "round": invitation.round_id}
        logger.info("invited to round %d of %s, until %s", invitation.round_id, invitation.run_id, until, extra=about)

    def _log_release(self, event: Released) -> None:
        then = "the work done so far is sent, and may count in the next round" if event.submit else "its work ends"
        text = "round %d of %s no longer waits for this site (%s): %s"
        about = {"run": event.run_id, "round": event.round_id}
        logger.info(text, event.round_id, event.run_id, event.reason.replace("_", " "), then, extra=about)

    # ------------------------------------------------------------ the policy

    def _objection(self, request: Request) -> Forbidden | None:
        """Return the site's objection to a request, or None; a round whose update is spooled starts no job."""
        if request.key in self.session.outgoing or request.key in self.session.encoded:
            return None
        if not (decision := self.gate.ask(request)).is_allowed:
            return self._forbidden(request, decision)
        if fault := self._sums.objection(request):
            return Forbidden(request, FailureReason.SESSION_REFUSED, fault)
        return None

    def _forbidden(self, request: Request, decision: Decision) -> Forbidden:
        self._has_declined = True
        reason = failure_of(decision)
        waits = decision.outcome is Outcome.WAITING and reason in DECLINES
        return Forbidden(request, reason, f"{decision.rule}: {decision.detail}", waits)

    async def _admit(self, request: ModelRequest, model: VersionManifest) -> None:
        for kinds, delta in self.gate.accounts_ahead(request):
            await on_thread(None, epsilon_of, kinds, delta)  # a second and more: no heartbeat waits for it
        if not (decision := self.gate.admit(request, model)).is_allowed:
            forbidden = self._forbidden(request, decision)
            raise NotAdmitted(forbidden.reason, forbidden.detail)

    def _accept_rollbacks(self) -> None:
        """Forget the seen rounds of runs with an accepted rollback, so that the coordinator may ask again."""
        for run_id in self.gate.accepted_rollbacks():
            if self._verifier is not None:
                self._verifier.memory.forget(RunId(run_id))
            self.gate.rollback_taken(run_id)
            text = "the next round and version of run %s are accepted as its newest, as this site's operator decided"
            logger.warning(text, run_id, extra={"run": run_id})
            self._has_declined = True

    def _policy_changed(self) -> None:
        """Check all jobs and uploads against the changed policy, and ask for declined work again."""
        job = self.session.job
        requests = [waiting.request for waiting in self.session.waiting.values()]
        for request in requests if job is None or job.is_released else [*requests, job.request]:
            if not (decision := self.gate.ask(request)).is_allowed:
                self._receive(self._forbidden(request, decision))
        self._uploads.ask_again()
        self._sums.policy_changed()
        if self._has_declined:
            self._has_declined = False
            self._connection.send(messages.ready())

    # ------------------------------------------------------------ effects out

    def _carry_out(self, effect: Effect) -> None:
        match effect:
            case Connect(delay):
                self._connection.dial(delay)
            case ReportFailure(run_id, round_id, reason, detail):
                about = {"run": run_id, "round": round_id}
                logger.warning("giving up round %d of %s: %s: %s", round_id, run_id, reason, detail, extra=about)
                self._report_failure(effect)
            case ReportEvaluation():
                self._report_evaluation(effect)
            case ReportStatistics():
                self._report_statistics(effect)
            case Upload(key, digest):
                self._uploads.begin(key, digest)
            case Join(request, sums):
                self._sums.join(request, sums)
            case Forget(key):
                self._sums.forget(key)
            case Discard(key, digest, accepted, is_answered):
                if not is_answered:  # an answered update has been logged already
                    text, about = "the update of round %d of %s is no longer wanted: it is deleted", _about(key)
                    logger.info(text, key[2], key[1], extra=about)
                self.stores.residuals.settle(digest, accepted=accepted)
                crash_points.reached("agent.settled")
                self._uploads.discard(key, digest)
            case _:
                self._carry_out_job(effect)

    def _report_failure(self, report: ReportFailure) -> None:
        disclosed = disclosed_failure(report, error_details=self.gate.error_details)
        self._connection.send(messages.failure(disclosed))

    def _report_evaluation(self, report: ReportEvaluation) -> None:
        if report.reason is not None:
            text = "giving up the evaluation of version %d of %s: %s"
            logger.warning(text, report.version, report.run_id, report.detail, extra={"run": report.run_id})
        disclosed = disclosed_answer(report, error_details=self.gate.error_details)
        self._connection.send(messages.evaluation(disclosed, self.gate.disclosure))

    def _report_statistics(self, report: ReportStatistics) -> None:
        if report.reason is not None:
            text = "sending no statistics for request %d of %s: %s"
            logger.warning(text, report.number, report.run_id, report.detail, extra={"run": report.run_id})
        disclosed = disclosed_answer(report, error_details=self.gate.error_details)
        self._connection.send(messages.site_statistics(disclosed, self.gate.statistics_terms))

    def _carry_out_job(self, effect: Effect) -> None:
        match effect:
            case Download(request):
                self.slot.begin_download(request)
            case Work(request, budget):
                self.slot.begin_work(request, budget)
            case Extend(budget):
                self.slot.extend(budget)
            case StopWork(key):
                self.slot.stop(key)
            case KillWorker(key):
                self.slot.kill(key)

    def _wait(self, num_cuts: int) -> float:
        return delay(num_cuts, self.config.reconnect_min, self.config.reconnect_max, self._rng)


def _about(key: Key) -> dict[str, object]:
    """Return the log fields of a round."""
    return {"run": key[1], "round": key[2]}


def _note_number(event: Event | None) -> None:
    """Remember the number of an invitation's run, for the ids of its traces; a run of messages has none."""
    if isinstance(event, Asked) and isinstance(event.request, Invitation) and not event.request.message:
        note_run(event.request.run_id, event.request.run_number)
