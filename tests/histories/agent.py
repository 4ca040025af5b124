"""A simulated agent process around the real session, with its spool, its worker, its connections and its crashes."""

import random
from functools import partial
from typing import Protocol

from atoll.client.session.events import (
    Asked,
    Connect,
    Connected,
    Discard,
    Disconnected,
    Download,
    Effect,
    Encoded,
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
    ReportEvaluation,
    ReportFailure,
    Request,
    StopWork,
    TimePassed,
    Trained,
    Upload,
    Work,
)
from atoll.client.session.rollback_rules import Refused, Seen, age_of, judge, timed
from atoll.client.session.session import Session, SessionRules
from atoll.protocol.vocabulary import ClientId, Digest, FailureReason, RejectReason
from atoll.server.members.member import Profile
from atoll.server.rounds.events import ClientJoined, Update
from tests.histories import network
from tests.histories.history import AgentStep, WorkerEnd
from tests.histories.parts import PartedUpload, PartsServer, num_parts_of
from tests.histories.scenario import TASK
from tests.histories.scheduling import World
from tests.histories.sums import AgentSums, Said, Sums, Told
from tests.histories.wall_clocks import WallClock
from tests.histories.worker import Worker

CLOCK_ERROR_S = 60.0
"""Largest error of a site's clock with which it never takes a new message for an old one, also when the coordinator's
clock goes wrong and is set right [s]; one that does so twice may show an instant three times."""


class AgentWorld(World, Protocol):
    """The world around an agent."""

    sums: Sums
    """The sites, masks and openings of its secure sums."""


class SimulatedAgent:
    """The agent process; `life` counts its crashes, which `spool` and `faults` survive.

    Its time is that of its monotonic clock, which stands still while the machine sleeps, in all for `slept` seconds.
    """

    def __init__(self, world: AgentWorld, coordinator: PartsServer, client_id: ClientId, rng: random.Random) -> None:
        self.world, self.coordinator, self.client_id, self.rng = world, coordinator, client_id, rng
        self.life = 0
        self.slept = self.wakes_at = 0.0
        self.pace = world.scenario.train * rng.lognormvariate(0, world.scenario.spread)
        self.profile = Profile(rng.randint(1, 100), rng.choice(["a", "b"]))
        self.spool: dict[Key, Update] = {}
        self.faults: dict[Digest, RejectReason | None] = {}
        self.num_sessions = 0
        self.wall = WallClock(world, random.Random(f"wall clock {world.history.seed} {client_id}"))
        self.is_slow = (
            random.Random(f"line {world.history.seed} {client_id}").random() < world.scenario.faults.slow_line
        )
        self.seen = Seen()
        self._ahead = 0.0  # its wall clock less the coordinator's when they connected [s]
        self._parts_rng = random.Random(f"parts {world.history.seed} {client_id}")
        self.offline_until = self.approved_at = 0.0
        self.sums = AgentSums(world, self, world.sums)
        self.num_parts = 0  # of the updates that this process makes; 0: it sends them as a whole
        self._forget()

    def _forget(self) -> None:
        self.session: Session | None = None
        self.connection: network.Connection | None = None
        self.worker: Worker | None = None
        self.uploads: dict[Key, network.Upload] = {}
        self.deadlines: dict[Key, float] = {}  # the last deadlines that this agent has received
        self._timer: float | None = None
        self._download: Key | None = None

    # ------------------------------------------------------------ life and death

    @property
    def is_up(self) -> bool:
        """Return whether the process runs."""
        return self.session is not None

    @property
    def now(self) -> float:
        """The time on its own clock."""
        return self.world.now - self.slept

    @property
    def is_online(self) -> bool:
        """Return whether this client has a network."""
        return self.world.now >= self.offline_until

    @property
    def is_idle(self) -> bool:
        """Return whether the agent has no work and no update that waits for an answer."""
        return (
            not self.spool
            and not self.sums.encoded
            and self.worker is None
            and (self.session is None or self.session.job is None)
        )

    def start(self) -> None:
        """Start the process, for the first time or again."""
        if self.is_up:
            return
        rules = SessionRules(tasks=frozenset({TASK}), lease=self.world.scenario.client_lease)
        rng = random.Random(self.rng.random())
        self.num_parts = self._parts_rng.choice([0, *range(1, self.world.scenario.parts + 1)])
        self.session = Session(
            rules, rng, {key: update.digest for key, update in self.spool.items()}, sorted(self.sums.encoded)
        )
        self.world.history.agent_steps.append(AgentStep(self.now, self.client_id, Disconnected(), (), self.world.now))
        self._dial()

    def crash(self) -> bool:
        """Crash the process and its worker; the spool stays unless it is damaged. Return False if it is not up."""
        if not self.is_up:
            return False
        self.world.remark(self.client_id, "CRASHES")
        if self.spool and self.world.happens("spool_damaged"):
            self.world.remark(
                self.client_id, f"has only damaged updates in its spool: {', '.join(map(str, self.spool))}"
            )
            self.spool.clear()
        self._end_of_process()
        return True

    def _dies_here(self) -> bool:
        return self.world.happens("agent_crash_at_step") and self.crash()

    def suspend(self, seconds: float) -> None:
        """Suspend the machine, with its clock; afterwards all actions continue."""
        until = self.world.now + seconds
        self.slept += seconds
        self.wakes_at, self.offline_until = until, max(until, self.offline_until)
        if self.connection is not None:
            self.connection.block(until, to_agent=True, to_coordinator=True)

    def leave(self) -> bool:
        """Shut the agent down with a goodbye; return False if it is not up."""
        if not self.is_up:
            return False
        self.world.remark(self.client_id, "shuts down")
        if self.connection is not None and self.session is not None and self.session.is_connected:
            self.connection.to_coordinator(None)
            self.connection = None  # it closes once the goodbye has arrived
        self._end_of_process()
        return True

    def _end_of_process(self) -> None:
        if self.connection is not None:
            self.connection.cut(half_open=self.world.happens("half_open"))
        for upload in self.uploads.values():
            upload.cancel()
        self.sums.crashed()
        self.life += 1
        self._forget()
        self.world.after(self.rng.expovariate(1 / self.world.scenario.faults.agent_downtime), self.start, self)

    # ------------------------------------------------------------ the control stream

    def _dial(self) -> None:
        self.world.after(self.world.latency(), self._answered, self)

    def _answered(self) -> None:
        assert self.session is not None
        coordinator = self.coordinator
        if not coordinator.is_up or not self.is_online:
            self._receive(Disconnected())
            return
        self.num_sessions += 1
        name = f"{self.client_id}-{self.num_sessions}"
        self.connection = network.Connection(self.world, self, coordinator, name)
        rounds = tuple(round_id for _, round_id in self.session.working_on)
        coordinator.streams.hello(self.connection, ClientJoined(self.client_id, name, self.profile, rounds))

    def heard(self, connection: network.Connection, event: network.Incoming, issued_us: int = 0) -> None:
        """Receive a message on the control stream, signed at an instant [us]; 0: it arrives once more."""
        if self.connection is connection:
            if isinstance(event, network.OfSum):
                assert isinstance(event, Told)
                self.sums.asked(event)
                return
            if issued_us and (refused := self._judged(event, issued_us)) is not None:
                self._refuse(connection, event, refused)
                return
            if issued_us and (on_time := timed(event, issued_us, self.wall.now(), ahead=self._ahead)) is not None:
                event = on_time
            if isinstance(event, Asked) and self.world.now < self.approved_at:
                event = Forbidden(event.request, FailureReason.AWAITS_APPROVAL, "approval: the run waits for it here")
            if isinstance(event, Asked) and (objection := self._objection(event.request)):
                event = Forbidden(event.request, FailureReason.SESSION_REFUSED, objection)
            self._receive(event)
            if isinstance(event, Asked):  # afterwards, because an overdue job is judged by its older deadline
                self._note_deadline(event)

    def _objection(self, request: Request) -> str:
        is_of_sum = isinstance(request, Invitation) and request.secure is not None
        return self.sums.objection(request) if is_of_sum else ""  # type: ignore[arg-type]

    def say(self, message: Said) -> None:
        """Send a message of a member on the control stream, if there is one."""
        if self.connection is not None and self.session is not None and self.session.is_connected:
            self.connection.to_coordinator(message)

    def dies_here(self) -> bool:
        """Return whether the process crashes between two effects of a member."""
        return self._dies_here()

    def masked(self, key: Key, update: Update) -> None:
        """Take a masked update into the spool; one that is there already waits for its answer."""
        if key in self.spool:
            return
        self.spool[key], self.faults[update.digest] = update, None
        self._receive(Masked(key, update.digest))

    def _judged(self, event: Event, issued_us: int) -> Refused | None:
        """Judge a message by the deployed rules; the tolerance for those that overtake each other is another one."""
        now = self.wall.now()
        judged = judge(event, issued_us, self.seen, now, ahead=self._ahead)
        if isinstance(judged, Seen):
            self.seen = judged
            if isinstance(event, Connected):
                self._ahead = age_of(issued_us, now)
            return None
        if judged.reason in (FailureReason.REPLAYED, FailureReason.ROLLBACK) and self.world.scenario.faults.overtakes:
            return None
        wrong, jumps = self.coordinator.wall.times_wrong, self.coordinator.wall.jumps
        # a jump while it was down, and a clock set far back and right again: signatures are then older by that jump
        is_right = self.wall.worst < CLOCK_ERROR_S and wrong + bool(wrong and jumps) <= 1
        if judged.reason in (FailureReason.REPLAYED, FailureReason.ROLLBACK) and is_right:
            self.world.fail(f"{self.client_id} refuses a new message: {judged.reason}: {judged.detail}")
        return judged

    def _refuse(self, connection: network.Connection, event: Event, refused: Refused) -> None:
        """Report a request that is refused; after one of another time, compare the clocks anew instead."""
        self.world.remark(self.client_id, f"refuses {type(event).__name__}: {refused.reason}: {refused.detail}")
        if refused.reason is FailureReason.CLOCK_SKEW:
            connection.cut()
            return
        match event:
            case Asked(Invitation() as invitation):
                report: Effect = ReportFailure(invitation.run_id, invitation.round_id, refused.reason, refused.detail)
                connection.to_coordinator(report)
            case Asked(EvaluationRequest() as request):
                connection.to_coordinator(
                    ReportEvaluation(request.run_id, request.version, None, refused.detail, refused.reason)
                )

    def approved(self) -> None:
        """Report that the site's operator has approved the run; an agent that is not connected will say hello."""
        self.world.remark(self.client_id, "has the approval of its operator")
        self.world.history.faults["approvals"] += 1
        if self.connection is not None and self.session is not None and self.session.is_connected:
            self.connection.to_coordinator(network.Ready())

    def _note_deadline(self, event: Asked) -> None:
        key = event.request.key
        deadline = self.deadlines[key] = self.now + event.request.time_left
        if self.worker is not None and self.worker.request.key == key and self.worker.stopped_at is None:
            self.worker.deadline = deadline

    def disconnected(self, connection: network.Connection) -> None:
        """Take note of the end of the control stream."""
        if self.connection is connection:
            self.connection = None
            self._receive(Disconnected())

    def upload_ended(self, upload: network.Upload, event: Event) -> None:
        """Receive the answer to an upload, or its end without one."""
        if self.uploads.get(upload.key) is upload:
            upload.cancel()
            del self.uploads[upload.key]
            self._receive(event)

    # ------------------------------------------------------------ the session

    def _receive(self, event: Event) -> None:
        session, now = self.session, self.now
        assert session is not None
        effects = session.receive(event, now)
        self.world.history.agent_steps.append(AgentStep(now, self.client_id, event, effects, self.world.now))
        for effect in effects:
            if self._dies_here():
                return
            self._act(effect)
        self._arm_timer()

    def _arm_timer(self) -> None:
        if self.session is None:
            return
        deadline = self.session.deadline
        if deadline is not None and (self._timer is None or deadline < self._timer):
            self._timer = deadline
            self.world.after(self.world.wait(deadline - self.now), self._timer_fired, self)

    def _timer_fired(self) -> None:
        self._timer = None
        assert self.session is not None
        deadline = self.session.deadline
        if deadline is not None and self.now >= deadline:
            self._receive(TimePassed())
        else:
            self._arm_timer()

    def _act(self, effect: Effect) -> None:
        match effect:
            case Connect(delay):
                self.world.after(delay, self._dial, self)
            case Download(request):
                self._download = request.key
                self._fetch(request)
            case Work(request, budget):
                assert self.worker is None, f"{self.client_id} has two workers at once"
                self.worker = Worker(self.world, self, request, budget, self.deadlines[request.key])
            case Extend(budget):
                assert self.worker is not None, "extended a worker that does not exist"
                self.worker.extend(budget)
            case StopWork(key):
                self._download = None
                if self.worker is not None and self.worker.request.key == key:
                    self.worker.stop()
            case Join(Invitation() as invitation):
                self.sums.join(invitation)
            case Forget(key):
                self.sums.forget(key)
            case KillWorker():
                self._worker_gone(was_killed=True)
            case _:
                self._send(effect)

    def _send(self, effect: Effect) -> None:
        match effect:
            case Upload(key):
                assert key in self.spool, f"{self.client_id} uploads {key}, which is not in the spool"
                update = self.spool[key]
                fault = self.faults.get(update.digest)
                assert key not in self.uploads, "two uploads of one update at once"
                kind = PartedUpload if num_parts_of(update.digest) else network.Upload
                self.uploads[key] = kind(self.world, self, self.coordinator, key, update, fault)
            case Discard(key, digest):
                self._discard(key, digest)
            case ReportFailure() | ReportEvaluation():
                if self.connection is not None:
                    self.connection.to_coordinator(effect)

    def _discard(self, key: Key, digest: Digest) -> None:
        if (upload := self.uploads.pop(key, None)) is not None:
            upload.cancel()
        if key in self.spool and self.spool[key].digest == digest:
            del self.spool[key]

    # ------------------------------------------------------------ the model

    def _fetch(self, request: Request) -> None:
        seconds, again = self.world.rng.expovariate(1.0), partial(self._fetch_again, request)
        if self.is_slow:
            network.transfer(self.world, self, self.coordinator, seconds, partial(self._fetched, request), again)
        else:
            self.world.after(seconds, partial(self._fetched, request), self)

    def _fetch_again(self, request: Request) -> None:
        self.world.after(1.0, partial(self._refetch, request), self)

    def _refetch(self, request: Request) -> None:
        if self._download == request.key:
            self._fetch(request)

    def _fetched(self, request: Request) -> None:
        if self._download != request.key:
            return
        if not self.coordinator.is_up or not self.is_online or self.world.happens("download_damaged"):
            self._fetch(request)  # the model is not available, or does not have its digest
        elif self.world.happens("download_fails"):
            self._download = None
            self._receive(JobFailed(request.key, FailureReason.DOWNLOAD_FAILED, "no route"))
        else:
            self._download = None
            self._receive(ModelReady(request.key))

    # ------------------------------------------------------------ the worker

    def worker_ended(self, event: Event) -> None:
        """Take the result of the worker, or its crash."""
        if isinstance(event, Trained | Encoded) and self._dies_here():
            return  # the next process finds the update in the spool
        self._worker_gone(was_killed=False)
        self._receive(event)

    def _worker_gone(self, *, was_killed: bool) -> None:
        worker, self.worker = self.worker, None
        if worker is not None:
            worker.is_gone = True
            key = worker.request.key
            end = WorkerEnd(self.now, self.client_id, key, worker.deadline, was_killed, worker.stopped_at)
            self.world.history.worker_ends.append(end)
