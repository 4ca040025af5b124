"""The agent's session with its coordinator as a pure state machine: events in, effects out; the clock is an argument.

The agent does one job at a time (train for a round, evaluate a version, make statistics) and uploads any number of
finished updates. Requests of other runs wait meanwhile, one for each run, in order of arrival: every run gets its turn,
and no run takes the worker from another. Only the newest request of a run counts. The stages of a job:

    DOWNLOADING --ModelReady--> WORKING --Trained, Evaluated--> done (an update goes to the spool and is uploaded)
                                   WORKING --StatisticsMade--> done (nothing is downloaded before)
         any  --Released--> STOPPING --the worker answers, or is killed after its lease--> done

An update for a secure sum is `Encoded` instead, and joins its session. What is sent is its masked form, which comes as
`Masked`; another attempt at the sum masks it again, and needs no training. The metrics of an evaluation join their
session with `Evaluated`, and statistics with `StatisticsMade`; their masked form is a message of the session.

Loss of the connection alone never ends a job: the worker knows its deadline and stops in time by itself, and the update
stays in the spool until the coordinator has answered (architecture, invariants 2 and 8). Randomness (the jitter of the
back-off) comes from a generator that is an argument.
"""

import random
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum, auto

from atoll.client.session.events import (
    Answered,
    Asked,
    Connect,
    Connected,
    Discard,
    Disconnected,
    Download,
    Effect,
    Effects,
    Encoded,
    Evaluated,
    EvaluationRequest,
    Event,
    Extend,
    Forbidden,
    Forget,
    JobFailed,
    Join,
    Key,
    KillWorker,
    Masked,
    ModelReady,
    Released,
    ReportEvaluation,
    ReportFailure,
    ReportStatistics,
    Request,
    RunEnded,
    StatisticsMade,
    StatisticsRequest,
    StopWork,
    Sums,
    Trained,
    Upload,
    UploadCut,
    Work,
)
from atoll.ground.backoff import delay
from atoll.ground.printable import count_of
from atoll.protocol.value_type import value
from atoll.protocol.vocabulary import Digest, FailureReason, RejectReason, RoundId, RunId
from atoll.training.statistics.parts import SiteStatistics


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionRules:
    """The session's settings."""

    tasks: frozenset[str]
    """Names of the tasks that this agent allows."""
    lease: float = 30.0
    """Longest time that a worker may outlive its deadline or its release [s]."""
    reconnect_min: float = 0.2
    """First wait before reconnecting or uploading again [s]."""
    reconnect_max: float = 15.0
    """Longest wait before reconnecting or uploading again [s]."""
    resends_max: int = 3
    """Most repetitions of an upload whose bytes arrived damaged."""


class Stage(Enum):
    """The stage of a job."""

    DOWNLOADING = auto()
    WORKING = auto()
    STOPPING = auto()


@dataclass(slots=True)
class Job:
    """The job in progress. Instants are in seconds on the session's clock."""

    request: Request
    deadline: float
    stage: Stage = Stage.DOWNLOADING
    is_released: bool = False
    """Whether the coordinator no longer expects a failure report."""
    submit: bool = True
    """Whether the update is worth sending."""
    kill_by: float = 0.0
    """Instant at which a STOPPING worker is killed."""
    is_ready: bool = False
    """Whether the model is complete on disk."""
    news_by: float = 0.0
    """Instant until which a newer deadline may still arrive after a reconnect, while DOWNLOADING."""


@value
class Waiting:
    """Request that starts when the worker is free, if that is before its deadline."""

    request: Request
    deadline: float


@dataclass(slots=True)
class Outgoing:
    """Finished update that the coordinator has not answered yet."""

    digest: Digest
    is_active: bool = False
    """Whether the update is being uploaded."""
    begun_at: float = 0.0
    retry_at: float = 0.0
    num_cuts: int = 0
    num_resends: int = 0


class Session:
    """Session of one client with its coordinator, a state machine; the module docstring has its stages.

    Args:
        rules: the session's settings.
        rng: source of the jitter.
        spooled: finished updates of an earlier process of this agent.
        encoded: its encoded updates for secure sums.
    """

    def __init__(
        self,
        rules: SessionRules,
        rng: random.Random,
        spooled: Mapping[Key, Digest] | None = None,
        encoded: Iterable[Key] = (),
    ) -> None:
        self.rules = rules
        self.job: Job | None = None
        self.waiting: dict[RunId, Waiting] = {}  # requests that wait for the worker; the first one is next
        self.outgoing = {key: Outgoing(digest) for key, digest in (spooled or {}).items()}
        self.encoded = dict.fromkeys(encoded, 0)  # what is for secure sums that are not over, with the newest attempt
        self.is_connected = False
        self.upload_seconds: float | None = None  # moving average of an upload's duration; None: not measured yet
        self._rng = rng
        self._num_dials = 0

    @property
    def working_on(self) -> tuple[tuple[RunId, RoundId], ...]:
        """Rounds for which this client trains or has an unanswered update; Hello carries them."""
        keys = {*self.outgoing, *self.encoded}
        if self.job is not None:
            keys.add(self.job.request.key)
        return tuple(sorted((run, RoundId(n)) for kind, run, n in keys if kind == "round"))

    @property
    def deadline(self) -> float | None:
        """Instant at which the shell must deliver TimePassed; None: no timer runs."""
        due = self._job_due()
        if not (self.outgoing or self.waiting):
            return due
        instants = [o.retry_at for o in self.outgoing.values() if not o.is_active and self.is_connected]
        instants += [waiting.deadline for waiting in self.waiting.values()]
        if due is not None:
            instants.append(due)
        return min(instants, default=None)

    def _job_due(self) -> float | None:
        job = self.job
        if job is None:
            return None
        if job.stage is Stage.STOPPING:
            return job.kill_by
        if job.stage is Stage.WORKING:
            return job.deadline + self.rules.lease
        return max(job.deadline, job.news_by) if self.is_connected else None  # it may have moved without contact

    def receive(self, event: Event, now: float) -> Effects:
        """Handle one event; overdue deadlines take effect first, however late the shell wakes.

        Args:
            event: the event.
            now: instant on the session's clock [s].
        """
        effects: Effects = ()
        if (due := self._job_due()) is not None and now >= due:
            effects = self._job_overdue(now)
        if self.waiting:
            effects += self._give_up_waiting(now)
        effects += self._on(event, now)
        if self.job is None and self.waiting:
            effects += self._start_next(now)
        if self.is_connected and self.outgoing:
            effects += self._due_uploads(now)
        return effects

    def _on(self, event: Event, now: float) -> Effects:
        match event:
            case ModelReady() | Trained() | Encoded() | Evaluated() | StatisticsMade() | JobFailed():
                return self._job_advanced(event, now)
            case Answered() | UploadCut():
                return self._upload_ended(event, now)
            case Masked():
                return self._masked(event, now)
            case Connected():
                self._connected(now)
            case Disconnected():
                self.is_connected = False
                self.waiting.clear()  # the coordinator asks again for what it still wants
                return (Connect(self._back_off()),)
            case Asked() | Forbidden():
                return self._asked(event.request, now) if isinstance(event, Asked) else self._forbidden(event, now)
            case Released(run_id, round_id, _, submit):
                return self._released(("round", run_id, round_id), submit, now)
            case RunEnded(run_id):
                return self._run_ended(run_id, now)
        return ()

    def _connected(self, now: float) -> None:
        self.is_connected, self._num_dials = True, 0
        for outgoing in self.outgoing.values():
            outgoing.retry_at = now
        if self.job is not None:
            self.job.news_by = now + self.rules.lease

    def is_at_work_for(self, key: Key) -> bool:
        """Return whether a request is running or waiting here, so that its update is not finished."""
        is_wanted = self.job is not None and self.job.request.key == key and not self.job.is_released
        return is_wanted or any(waiting.request.key == key for waiting in self.waiting.values())

    def _back_off(self) -> float:
        """Return the delay before the next attempt to connect [s]."""
        self._num_dials += 1
        return delay(self._num_dials - 1, self.rules.reconnect_min, self.rules.reconnect_max, self._rng)

    # ------------------------------------------------------------ jobs

    def _asked(self, request: Request, now: float) -> Effects:
        deadline = now + request.time_left
        if request.task not in self.rules.tasks:
            allowed = ", ".join(sorted(self.rules.tasks))
            detail = f"task {request.task!r} is not allowed here (allowed: {allowed})"
            return self._report(request, FailureReason.TASK_NOT_ALLOWED, detail)
        if request.key in self.encoded:
            return self._join(request)
        if request.key in self.outgoing:
            return ()  # the work is done, and its upload has started or will
        if self.job is not None and self.job.request.key == request.key and not self.job.is_released:
            return self._deadline_moved(self.job, deadline, now)
        self.waiting[request.run_id] = Waiting(request, deadline)
        job = self.job
        if job is not None and job.request.run_id == request.run_id and job.stage is not Stage.STOPPING:
            return self._stop(job, submit=False, now=now)  # the coordinator has finished the round
        return ()

    def _forbidden(self, event: Forbidden, now: float) -> Effects:
        """End a request's job unfinished; a finished update is checked before its upload."""
        request = event.request
        if request.key in self.outgoing:
            return ()
        effects: list[Effect] = [*self._report(request, event.reason, event.detail, waits=event.waits)]
        effects += self._forget([request.key])
        self._withdraw(request.key)
        if self.job is not None and self.job.request.key == request.key:
            effects += self._stop(self.job, submit=False, now=now)
        return tuple(effects)

    def _give_up_waiting(self, now: float) -> Effects:
        """Report waiting requests whose deadline has passed while the worker was busy with another run."""
        late = [run_id for run_id, waiting in self.waiting.items() if now >= waiting.deadline]
        busy_with = "its model" if self.job is None else f"run {self.job.request.run_id}"
        detail = f"the client was busy with {busy_with} until the deadline"
        return tuple(
            effect
            for run_id in late
            for effect in self._report(self.waiting.pop(run_id).request, FailureReason.OUT_OF_TIME, detail)
        )

    def _start_next(self, now: float) -> Effects:
        while self.waiting:
            waiting = self.waiting.pop(next(iter(self.waiting)))
            if waiting.request.key in self.outgoing or waiting.request.key in self.encoded:
                continue  # it was requested again while it was stopping, and is complete
            self.job = Job(waiting.request, waiting.deadline)
            if isinstance(waiting.request, StatisticsRequest):  # there is no model to wait for
                self.job.is_ready = True
                return self._begin_work(self.job, now)
            return (Download(waiting.request),)
        return ()

    def _deadline_moved(self, job: Job, deadline: float, now: float) -> Effects:
        moved, job.deadline, job.news_by = abs(deadline - job.deadline) > 0.05, deadline, now
        if moved and job.stage is Stage.WORKING:
            return (Extend(self._budget(job, now)),)
        return self._begin_work(job, now)

    def _begin_work(self, job: Job, now: float) -> Effects:
        """Begin work if the model is present and the deadline lies ahead, which may still move without contact."""
        if job.stage is not Stage.DOWNLOADING or not job.is_ready or now >= job.deadline:
            return ()
        job.stage = Stage.WORKING
        return (Work(job.request, self._budget(job, now)),)

    def _budget(self, job: Job, now: float) -> float:
        """Return the seconds that the worker may take, with a reserve for the upload.

            budget = left - min(left / 2, reserve),    reserve = max(1.5 upload_seconds, left / 20)

        Until an upload has been measured, the reserve is left / 10; an evaluation and statistics have no reserve.
        """
        left = job.deadline - now
        if isinstance(job.request, EvaluationRequest | StatisticsRequest):
            return left
        reserve = 0.1 * left if self.upload_seconds is None else max(1.5 * self.upload_seconds, 0.05 * left)
        return max(left - reserve, 0.5 * left)

    def _job_advanced(
        self, event: ModelReady | Trained | Encoded | Evaluated | StatisticsMade | JobFailed, now: float
    ) -> Effects:
        job = self.job
        if job is None or job.request.key != event.key:
            return _discarded(event)
        match event:
            case ModelReady():
                job.is_ready = True
                return self._begin_work(job, now)
            case Trained(key, digest):
                self.job = None
                if not job.submit:
                    return (Discard(key, digest),)
                self.outgoing[key] = Outgoing(digest, retry_at=now)
                return ()
            case Encoded():
                self.job = None
                return self._begin_sum(job)
            case Evaluated():
                self.job = None
                return () if job.is_released else self._evaluated(job, event)
            case StatisticsMade(key, found):
                self.job = None
                if job.request.secure is not None:
                    return self._begin_sum(job, found)
                return () if job.is_released else (ReportStatistics(key[1], key[2], found),)
            case JobFailed(_, reason, detail):
                self.job = None
                return () if job.is_released else self._report(job.request, reason, detail)

    def _evaluated(self, job: Job, event: Evaluated) -> Effects:
        """Send the metrics of an evaluation, or add them to its secure sum."""
        assert isinstance(job.request, EvaluationRequest)
        if job.request.secure is not None and event.statistics is not None:
            return self._begin_sum(job, event.statistics)
        return (_evaluation_report(job.request, event.statistics, event.detail, event.reason),)

    def _job_overdue(self, now: float) -> Effects:
        job, self.job = self.job, None
        assert job is not None
        if job.stage is Stage.DOWNLOADING:
            report = self._report(job.request, FailureReason.OUT_OF_TIME, "the model did not arrive by the deadline")
            return (StopWork(job.request.key), *report)
        detail = f"the worker did not stop within its lease of {self.rules.lease:g} s"
        report = () if job.is_released else self._report(job.request, FailureReason.WORKER_HUNG, detail)
        return (KillWorker(job.request.key), *report)

    def _stop(self, job: Job, *, submit: bool, now: float) -> Effects:
        """Stop the job: a download ends at once, a worker may return its partial result."""
        job.is_released, job.submit = True, submit
        if job.stage is Stage.DOWNLOADING:
            self.job = None
            return (StopWork(job.request.key),)
        if job.stage is Stage.STOPPING:
            return ()
        job.stage, job.kill_by = Stage.STOPPING, min(now, job.deadline) + self.rules.lease
        return (StopWork(job.request.key),)

    def _released(self, key: Key, submit: bool, now: float) -> Effects:
        effects: list[Effect] = []
        self._withdraw(key)
        if self.job is not None and self.job.request.key == key:
            effects += self._stop(self.job, submit=submit, now=now)
        if key in self.outgoing and (not submit or key in self.encoded):
            effects.append(Discard(key, self.outgoing.pop(key).digest))
        return (*effects, *self._forget([key]))

    def _begin_sum(self, job: Job, sums: Sums | SiteStatistics | None = None) -> Effects:
        """Join the session of finished work; the sums of earlier work of its kind and run are over."""
        request, key = job.request, job.request.key
        older = [other for other in self.encoded if other[:2] == key[:2] and other[2] < key[2]]
        if job.is_released:
            return (*self._forget(older), Forget(key))
        self.encoded[key] = 1
        return (*self._forget(older), Join(request, sums))

    def _masked(self, event: Masked, now: float) -> Effects:
        if event.key not in self.encoded:
            return (Discard(event.key, event.digest),)
        self.outgoing[event.key] = Outgoing(event.digest, retry_at=now)
        return ()

    def _join(self, request: Request) -> Effects:
        """Join a session again, or another attempt: what was masked for an earlier one is worthless in it."""
        key, terms = request.key, request.secure
        if terms is None:
            return self._report(request, FailureReason.SESSION_REFUSED, f"{_DONE[key[0]]} for a secure sum")
        before, self.encoded[key] = self.encoded[key], max(self.encoded[key], terms.attempt)
        if terms.attempt > before and key in self.outgoing:
            return (Discard(key, self.outgoing.pop(key).digest), Join(request))
        return (Join(request),)

    def _forget(self, keys: Iterable[Key]) -> Effects:
        """Delete what is encoded, and leave its sessions."""
        known = [key for key in keys if key in self.encoded]
        for key in known:
            del self.encoded[key]
        return tuple(Forget(key) for key in known)

    def _withdraw(self, key: Key) -> None:
        """Drop a waiting request."""
        if (waiting := self.waiting.get(RunId(key[1]))) is not None and waiting.request.key == key:
            del self.waiting[RunId(key[1])]

    def _run_ended(self, run_id: RunId, now: float) -> Effects:
        keys = {*self.outgoing, *self.encoded}
        keys |= {waiting.request.key for waiting in self.waiting.values()}
        keys |= {self.job.request.key} if self.job is not None else set()
        return tuple(e for key in sorted(keys) if key[1] == run_id for e in self._released(key, False, now))

    def _report(self, request: Request, reason: FailureReason, detail: str, *, waits: bool = False) -> Effects:
        if isinstance(request, EvaluationRequest):
            return (_evaluation_report(request, None, f"{reason}: {detail}", reason),)
        if isinstance(request, StatisticsRequest):
            return (ReportStatistics(request.run_id, request.number, None, f"{reason}: {detail}", reason),)
        return (ReportFailure(request.run_id, request.round_id, reason, detail, waits),)

    # ------------------------------------------------------------ uploads

    def _due_uploads(self, now: float) -> Effects:
        effects = []
        for key, outgoing in self.outgoing.items():
            if not outgoing.is_active and now >= outgoing.retry_at:
                outgoing.is_active, outgoing.begun_at = True, now
                effects.append(Upload(key, outgoing.digest))
        return tuple(effects)

    def _upload_ended(self, event: Answered | UploadCut, now: float) -> Effects:
        outgoing = self.outgoing.get(event.key)
        if outgoing is None:
            return ()
        if isinstance(event, UploadCut):
            wait = delay(outgoing.num_cuts, self.rules.reconnect_min, self.rules.reconnect_max, self._rng)
            outgoing.is_active, outgoing.retry_at = False, now + wait
            outgoing.num_cuts += 1
            return ()
        if event.resend and outgoing.num_resends < self.rules.resends_max:
            outgoing.is_active, outgoing.retry_at = False, now
            outgoing.num_resends += 1
            return ()
        del self.outgoing[event.key]
        effects: list[Effect] = [Discard(event.key, outgoing.digest, event.accepted, is_answered=True)]
        if event.accepted:
            self.upload_seconds = mean_upload_seconds(self.upload_seconds, now - outgoing.begun_at)
        elif event.resend:
            detail = f"damaged on the way {count_of(outgoing.num_resends + 1, 'time')}: {RejectReason.DIGEST_MISMATCH}"
            _, run_id, round_id = event.key
            effects.append(ReportFailure(run_id, RoundId(round_id), FailureReason.UPLOAD_FAILED, detail))
        return tuple(effects)


_DONE = {
    "round": "the update was trained",
    "version": "the version was evaluated",
    "statistics": "the statistics were made",
}
"""What was done for a secure sum, by the kind of the request."""


def mean_upload_seconds(before: float | None, seconds: float) -> float:
    """Return the moving average of upload durations after one more: the first, then half old and half new."""
    return seconds if before is None else 0.5 * before + 0.5 * seconds


def _discarded(event: Event) -> Effects:
    """Return what deletes the result of a job that the session has given up."""
    match event:
        case Encoded(key):
            return (Forget(key),)
        case Trained(key, digest):
            return (Discard(key, digest),)
    return ()


def _evaluation_report(
    request: Request, statistics: Sums | None, detail: str, reason: FailureReason | None
) -> ReportEvaluation:
    assert isinstance(request, EvaluationRequest)
    return ReportEvaluation(request.run_id, request.version, statistics, detail, reason)
