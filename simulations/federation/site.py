"""A simulated site: the session of a real agent, and the execution of its effects in virtual time.

Each effect takes the time that the client's device needs: a download and an upload by their bytes, a training by its
examples, a message the latency. When a device falls asleep, its agent stops as in a crash: updates in the spool
survive, work in progress is lost.
"""

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

from atoll.client.secure.member import Stream
from atoll.client.session.events import (
    Answered,
    Asked,
    Connect,
    Connected,
    Discard,
    Download,
    Effect,
    Encoded,
    Evaluated,
    EvaluationRequest,
    Event,
    Extend,
    Forbidden,
    Forget,
    Invitation,
    JobFailed,
    Join,
    Key,
    KillWorker,
    Masked,
    ModelReady,
    ModelRequest,
    ReportEvaluation,
    ReportFailure,
    Request,
    StopWork,
    TimePassed,
    Trained,
    Upload,
)
from atoll.client.session.events import Work as WorkOrder
from atoll.client.session.session import Session, SessionRules, mean_upload_seconds
from atoll.protocol.secure.messages import Question
from atoll.protocol.secure.wire import SessionName
from atoll.protocol.vocabulary import ClientId, Digest, FailureReason
from atoll.protocol.wire.channel import INLINE_BYTES_MAX
from atoll.server.config.run import RunConfig
from atoll.server.rounds.events import Update
from atoll.server.rounds.session_events import TellMember
from atoll.simulations.devices.fleet import Device, Fleet
from atoll.simulations.federation.coordinator import Coordinator
from atoll.simulations.federation.host import Work
from atoll.simulations.federation.timeline import Timeline
from atoll.simulations.federation.trainings import Training
from atoll.simulations.secure.site_sums import Said, SiteSums
from atoll.simulations.secure.sums import SimulatedSums
from atoll.task.task import task_name

EARLY_S = 1e-3
"""Least time before its deadline at which an evaluation beside the session ends [virtual s]."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """Parts of a federation that all its sites share."""

    timeline: Timeline
    service: Coordinator[Any]
    """Coordinator that the sites connect to."""
    work: Work
    session_rules: SessionRules
    num_examples: Mapping[ClientId, int]
    """The number of each client's training examples."""
    may_sleep: bool
    """Whether some devices of the fleet sleep at times."""
    sums: SimulatedSums | None = None
    """Secure sums of the run; None: updates are plain."""


class Site:
    """Simulated site with its agent's session; `life` counts the sleeps, which cancel planned actions."""

    __slots__ = (
        "_accepted_at",
        "_download_s",
        "_fetching",
        "_may_sleep",
        "_sums",
        "_timer",
        "_training",
        "_uploading",
        "client_id",
        "device",
        "encoded",
        "env",
        "is_awake",
        "life",
        "model_digest",
        "num_sessions",
        "session",
        "spool",
        "upload_seconds",
    )

    def __init__(self, env: Environment, client_id: ClientId, device: Device) -> None:
        self.env, self.client_id, self.device = env, client_id, device
        self._may_sleep = env.may_sleep
        self.life = self.num_sessions = 0
        self.is_awake = False
        self.session: Session | None = None
        self.model_digest: Digest | None = None
        """The last downloaded version; None: none."""
        self.spool: dict[Key, Update] = {}
        """Finished updates until the coordinator's answer."""
        self.encoded: dict[Key, Update] = {}
        """Encoded updates for secure sums that are not over."""
        self._sums: SiteSums | None = None
        self.upload_seconds: float | None = None
        """Mean duration of an upload before a resumed run was interrupted, until there is a session to ask; None: not
        measured."""
        self._download_s = 0.0
        self._forget()

    def _forget(self) -> None:
        self._fetching: Key | None = None
        self._training: Training | None = None
        self._uploading: set[Key] = set()
        self._accepted_at: dict[Key, float] = {}
        """The time at which the answer to each accepted update arrives."""
        self._timer: float | None = None

    # ------------------------------------------------------------ awake and asleep

    def wake(self) -> None:
        """Start the agent and connect it."""
        if self.is_awake:
            return
        self.is_awake = True
        self.num_sessions += 1
        if self.session is not None or self.spool or self.encoded:
            self.session = self._new_session()
        rounds = tuple(round_id for _, round_id in self.session.working_on) if self.session is not None else ()
        self.env.service.joined(self, rounds)
        if self.session is not None:
            self._receive(Connected())

    def sleep(self) -> None:
        """Stop the agent, and lose its work in progress."""
        if not self.is_awake:
            return
        self.is_awake = False
        self.life += 1
        if self._training is not None:
            self.env.work.forget(self._training)
        if self._sums is not None:
            self._sums.crash()
        self._forget()
        self.env.service.left(self)

    def follow(self, fleet: Fleet) -> None:
        """Wake up and fall asleep with the availability of the client, from now on."""
        change = fleet.next_change(self.client_id, self.env.timeline.now)
        if change is not None:
            self.env.timeline.at(change, self._changed, fleet)

    def _changed(self, fleet: Fleet) -> None:
        if fleet.is_awake(self.client_id, self.env.timeline.now):
            self.wake()
        else:
            self.sleep()
        self.follow(fleet)

    @property
    def seconds_of_uploads(self) -> float | None:
        """The expected duration of the next upload, once the session has heard of all accepted updates.

        None: not measured yet.
        """
        if self.session is None:
            return self.upload_seconds
        seconds = self.session.upload_seconds
        for key, at in self._accepted_at.items():
            if key in self.session.outgoing:
                seconds = mean_upload_seconds(seconds, at - self.session.outgoing[key].begun_at)
        return seconds

    @property
    def num_examples(self) -> int:
        """The number of the site's training examples."""
        return self.env.num_examples[self.client_id]

    @property
    def name_of_session(self) -> str:
        """The name of the open control stream."""
        return f"{self.client_id}/{self.num_sessions}"

    def _new_session(self) -> Session:
        """Return a session that knows the spool and the duration of uploads."""
        outgoing = {key: update.digest for key, update in self.spool.items()}
        session = Session(self.env.session_rules, random.Random(self.client_id), outgoing, self.encoded)
        session.upload_seconds = self.seconds_of_uploads
        return session

    # ------------------------------------------------------------ the session

    def hear(self, event: Event) -> None:
        """Receive a message of the coordinator after the latency."""
        is_alone = type(event) is Asked and type(event.request) is EvaluationRequest and event.request.secure is None
        self._after(self.device.latency_s, self._evaluate_alone if is_alone else self._receive, event)

    def _receive(self, event: Event) -> None:
        if type(event) is Asked and (objection := self._objection(event.request)) is not None:
            event = objection
        if self.session is None:
            self.session = self._new_session()
            self.session.receive(Connected(), self.env.timeline.now)
        for effect in self.session.receive(event, self.env.timeline.now):
            self._act(effect)
        self._arm_timer()

    def _after(self, seconds: float, action: Callable[..., None], *arguments: Any) -> None:
        """Plan an action that is cancelled if the device falls asleep."""
        if self._may_sleep:
            self.env.timeline.after(seconds, self._if_still_awake, self.life, action, arguments)
        else:
            self.env.timeline.after(seconds, action, *arguments)

    def _if_still_awake(self, life: int, action: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        if life == self.life and self.is_awake:
            action(*arguments)

    def _arm_timer(self) -> None:
        """Arm the timer lazily: it stays when the deadline moves later, and is armed again when it fires."""
        assert self.session is not None
        deadline = self.session.deadline
        if deadline is not None and (self._timer is None or deadline < self._timer):
            self._timer = deadline
            self.env.timeline.at(deadline, self._if_still_awake, self.life, self._timer_fired, (deadline,))

    def _timer_fired(self, timer: float) -> None:
        if timer != self._timer or self.session is None:
            return
        self._timer = None
        if self.session.deadline is not None and self.session.deadline <= self.env.timeline.now:
            self._receive(TimePassed())
        else:
            self._arm_timer()

    def _act(self, effect: Effect) -> None:
        match effect:
            case Download():
                self._fetch(effect.request)
            case Upload():
                self._upload(effect.key)
            case Discard():
                self._settle(effect.key, accepted=effect.accepted)
            case WorkOrder(Invitation() as request, budget):
                self._train(request, budget)
            case WorkOrder(EvaluationRequest() as request, budget):
                self._evaluate(request, budget)
            case Extend(budget):
                self._extend(budget)
            case StopWork(key) | KillWorker(key):
                self._stop(key, at_once=isinstance(effect, KillWorker))
            case ReportFailure() | ReportEvaluation():
                self._after(self.device.latency_s, self.env.service.heard, self, effect)
            case Connect():
                pass  # a device that is awake has its stream
            case _:
                self._act_in_sum(effect)

    def _act_in_sum(self, effect: Effect) -> None:
        match effect:
            case Join(Invitation() | EvaluationRequest() as request, None | Mapping() as sums):
                self._members.join(request, sums)
            case Forget(key):
                self.encoded.pop(key, None)
                self._members.forget(key)

    # ------------------------------------------------------------ secure sums

    @property
    def _members(self) -> SiteSums:
        """This site's members of sessions."""
        if self._sums is None:
            assert self.env.sums is not None
            self._sums = SiteSums(self.client_id, self.env.sums.cryptography, self._say_in_sum, self._mask)
        return self._sums

    def _objection(self, request: Request) -> Forbidden | None:
        """Return this site's objection to an invitation for a sum that its promises forbid, or None."""
        if not isinstance(request, Invitation | EvaluationRequest) or request.secure is None:
            return None
        if request.key in self.spool or request.key in self.encoded:
            return None
        fault = self._members.fault(request, request.secure)
        return Forbidden(request, FailureReason.SESSION_REFUSED, fault) if fault else None

    def asked_in_sum(self, effect: TellMember) -> None:
        """Receive a question to this site's member of a session after the latency."""
        of = SessionName(self.env.service.run_id, effect.round_id, effect.attempt, effect.session, effect.purpose)
        self._after(self.device.latency_s, self._asked_in_sum, of, effect.question)

    def _asked_in_sum(self, of: SessionName, question: Question) -> None:
        self._members.asked(of, question)

    def _say_in_sum(self, of: SessionName, message: Said) -> None:
        self._after(self.device.latency_s, self.env.service.heard_in_sum, self, of, message)

    def _mask(self, key: Key, attempt: int, streams: tuple[Stream, ...]) -> None:
        """Mask the encoded update into the spool; one that is there already waits for its answer."""
        if key in self.spool:
            return
        assert self.env.sums is not None
        encoded, terms = self.encoded[key], self._members.terms_of(key)
        pairs, share = [(each.key, each.sign) for each in streams], self.env.sums.share_of(self.client_id, terms)
        digest = self.env.sums.updates.mask(encoded.digest, attempt, pairs, share)
        self.spool[key] = replace(encoded, digest=digest, attempt=attempt)
        self._receive(Masked(key, digest))

    # ------------------------------------------------------------ the model

    def _fetch(self, request: ModelRequest) -> None:
        is_cached = self.model_digest == request.model_digest
        num_bytes = 0 if is_cached else self.env.service.bytes_of(request.model_digest)
        self.env.service.bytes_down += num_bytes
        self._fetching = request.key
        self._download_s = self.device.download_seconds(num_bytes) if num_bytes else 0.0
        self._after(self._download_s, self._fetched, request)

    def _fetched(self, request: ModelRequest) -> None:
        if self._fetching == request.key:
            self._fetching, self.model_digest = None, request.model_digest
            self._receive(ModelReady(request.key))

    # ------------------------------------------------------------ the worker

    def _evaluate(self, request: EvaluationRequest, budget: float) -> None:
        seconds = self.env.work.num_evaluated(self.client_id) / self.device.examples_per_s  # one pass
        if seconds > budget:
            self._after(budget, self._evaluated, request, "out_of_time: not finished by the deadline")
        else:
            self._after(seconds, self._evaluated, request, "")

    def _evaluated(self, request: EvaluationRequest, fault: str) -> None:
        found = fault or self.env.work.evaluate(self.client_id, request)
        sums, detail = (None, found) if isinstance(found, str) else (found, "")
        self._receive(Evaluated(request.key, sums, detail))

    def _evaluate_alone(self, event: Asked) -> None:
        """Evaluate a version beside the session, if it is idle and the evaluation ends in time.

        The next round opens after the evaluation, so no other event arrives meanwhile, and the session's state does not
        change. This saves time, because thousands of clients may evaluate each version while few train.
        """
        request, session, now = event.request, self.session, self.env.timeline.now
        assert isinstance(request, EvaluationRequest)
        is_cached = self.model_digest == request.model_digest
        num_bytes = 0 if is_cached else self.env.service.bytes_of(request.model_digest)
        download_s = self.device.download_seconds(num_bytes) if num_bytes else 0.0
        ends = now + download_s + self.env.work.num_evaluated(self.client_id) / self.device.examples_per_s
        is_busy = session is not None and (session.job is not None or session.waiting or session.outgoing)
        if self._may_sleep or is_busy or ends > now + request.time_left - EARLY_S:
            self._receive(event)
            return
        self.env.service.bytes_down += num_bytes
        self._download_s = download_s
        self.env.timeline.at(ends, self._evaluated_alone, request)

    def _evaluated_alone(self, request: EvaluationRequest) -> None:
        self.model_digest = request.model_digest
        found = self.env.work.evaluate(self.client_id, request)
        sums, detail = (None, found) if isinstance(found, str) else (found, "")
        report = ReportEvaluation(request.run_id, request.version, sums, detail)
        self.env.timeline.after(self.device.latency_s, self.env.service.heard, self, report)

    def _train(self, invitation: Invitation, budget: float) -> None:
        now = self.env.timeline.now
        self._training = self.env.work.begin(self.client_id, self.device, invitation, now, budget)
        self._plan_end()

    def _plan_end(self) -> None:
        training = self._training
        assert training is not None
        self.env.timeline.at(training.ends, self._if_still_awake, self.life, self._ended, (training, training.ends))

    def _extend(self, budget: float) -> None:
        if self._training is not None:
            self._training.plan(self.env.timeline.now + budget)
            self._plan_end()

    def _stop(self, key: Key, *, at_once: bool) -> None:
        if self._fetching == key:
            self._fetching = None
        training = self._training
        if training is None or training.invitation.key != key:
            return
        if at_once:
            self.env.work.forget(training)
            self._training = None
            return
        training.stop(self.env.timeline.now)
        self._plan_end()

    def _ended(self, training: Training, ends: float) -> None:
        """End a training, unless it was planned again meanwhile."""
        if training is not self._training or ends != training.ends:
            return
        self._training, invitation = None, training.invitation
        if training.steps == 0:
            self.env.work.forget(training)
            self._receive(JobFailed(invitation.key, FailureReason.OUT_OF_TIME, training.fault))
            return
        if not self._is_wanted(training):
            self.env.work.forget(training)  # its update would be discarded, so it is not computed
            self._receive(Trained(invitation.key, Digest("")))
            return
        made = self.env.work.update_of(training, self._download_s)
        if made is None:
            self._training = training
            self._plan_end()
            return
        if isinstance(made, JobFailed):
            self._receive(made)
            return
        if invitation.secure is not None:
            self.encoded[invitation.key] = made
            self._receive(Encoded(invitation.key))
            return
        self.spool[invitation.key] = made
        self._receive(Trained(invitation.key, made.digest))

    def _is_wanted(self, training: Training) -> bool:
        assert self.session is not None
        job = self.session.job
        return job is not None and job.request.key == training.invitation.key and job.submit

    # ------------------------------------------------------------ the upload

    def _upload(self, key: Key) -> None:
        self._uploading.add(key)
        update, device = self.spool[key], self.device
        seconds = device.upload_seconds(update.num_bytes) if _is_inline(update) else device.latency_s
        self._after(seconds, self._begin_upload, key)

    def _begin_upload(self, key: Key) -> None:
        if key not in self._uploading:
            return
        update = self.spool[key]
        if (verdict := self.env.service.upload_begun(update)) is not None:
            self._answer(key, verdict)
        elif _is_inline(update):
            self._arrive(key)
        else:
            self._after(self.device.upload_seconds(update.num_bytes) - self.device.latency_s, self._arrive, key)

    def _arrive(self, key: Key) -> None:
        if key in self._uploading:
            self._answer(key, self.env.service.update_arrived(self.spool[key]))

    def _answer(self, key: Key, verdict: Answered) -> None:
        if verdict.accepted:
            self.env.work.settle(self.spool[key], accepted=True)  # now, because an interruption may lose the answer
            self._accepted_at[key] = self.env.timeline.now + self.device.latency_s
        self._after(self.device.latency_s, self._answered, key, verdict)

    def _answered(self, key: Key, verdict: Answered) -> None:
        self._accepted_at.pop(key, None)
        if key in self._uploading:
            self._uploading.discard(key)
            self._receive(verdict)

    def _settle(self, key: Key, *, accepted: bool) -> None:
        self._uploading.discard(key)
        update = self.spool.pop(key, None)
        if update is not None and not accepted:
            self.env.work.settle(update, accepted=False)


def _is_inline(update: Update) -> bool:
    """Return whether an update is sent inline, together with its manifest, as an agent sends a small one."""
    return update.num_bytes <= INLINE_BYTES_MAX


class Population(Protocol):
    """Part of a setting that describes the sites."""

    @property
    def config(self) -> RunConfig:
        """The settings of the run."""

    @property
    def num_examples(self) -> Mapping[ClientId, int]:
        """The number of each client's training examples."""

    @property
    def fleet(self) -> Fleet:
        """The device of each client."""

    @property
    def lease(self) -> float:
        """The time after which a disconnected client is lost [virtual s]."""


def sites_of(
    setting: Population, timeline: Timeline, service: Coordinator[Any], work: Work, sums: SimulatedSums | None = None
) -> dict[ClientId, Site]:
    """Return the sites of a federation, in the order of the clients."""
    env = Environment(
        timeline=timeline,
        service=service,
        work=work,
        session_rules=SessionRules(tasks=frozenset({task_name(setting.config.task)}), lease=setting.lease),
        num_examples=setting.num_examples,
        may_sleep=not setting.fleet.is_always_awake,
        sums=sums,
    )
    return {name: Site(env, name, setting.fleet[name]) for name in setting.num_examples}
