"""A simulated worker process: it trains or evaluates, stops by its deadline, and sometimes hangs or crashes."""

import math
import random
from dataclasses import replace
from typing import Protocol
from zlib import crc32

from atoll.client.session.events import (
    Encoded,
    Evaluated,
    EvaluationRequest,
    Event,
    Invitation,
    JobFailed,
    Key,
    Request,
    Trained,
)
from atoll.protocol.vocabulary import ClientId, Digest, FailureReason, RejectReason, Version
from atoll.server.members.member import Profile
from atoll.server.rounds.events import Sums, Update
from tests.histories.network import BAD_BYTES
from tests.histories.scheduling import Endpoint, World
from tests.histories.sums import AgentSums

STEPS = 8
"""Number of steps of local training; a partial update has 1 to 7 of them."""


class Trainer(Endpoint, Protocol):
    """The agent that has started a worker and takes its result."""

    client_id: ClientId
    rng: random.Random
    pace: float
    """The mean duration of a training on this client [s]."""
    profile: Profile
    sums: AgentSums
    """The members of secure sums, with its encoded updates."""
    num_parts: int
    """The number of parts of its updates; 0: it sends them as a whole."""
    spool: dict[Key, Update]
    """The agent's finished updates, to which the worker adds its own."""
    faults: dict[Digest, RejectReason | None]
    """The fault in the bytes of each update; None: it has none."""

    @property
    def now(self) -> float:
        """The instant on the agent's clock."""

    def worker_ended(self, event: Event) -> None:
        """Take the result, or the crash."""


class Worker:
    """A worker, which ends with its agent, when it is done or when it is killed; it stops within `budget` seconds.

    Its `deadline` is the last one that its agent has received; it moves until the worker is stopped.
    """

    def __init__(self, world: World, agent: Trainer, request: Request, budget: float, deadline: float) -> None:
        self._world, self._agent, self.request = world, agent, request
        rng = agent.rng
        is_training = isinstance(request, Invitation)
        self._needs = agent.pace * rng.uniform(0.8, 1.2) if is_training else rng.uniform(0.5, 6)
        self._began_at, self._stop_by = agent.now, agent.now + budget
        self._hangs = world.happens("worker_hangs")
        self._plan = 0  # the number of the valid plan; older planned ends are ignored
        self.deadline = deadline
        self.stopped_at: float | None = None
        self.is_gone = False
        if world.happens("worker_crashes"):
            self._plan_end(rng.uniform(0, self._needs), crashes=True)
        else:
            self._plan_end(self._seconds_left())

    def extend(self, budget: float) -> None:
        """Extend the budget, because the deadline has moved."""
        self._stop_by = self._agent.now + budget
        self._plan_end(self._seconds_left())

    def stop(self) -> None:
        """Stop at the next step."""
        if self.stopped_at is None:
            self.stopped_at = self._agent.now
        if not self._hangs:
            self._plan_end(self._agent.rng.uniform(0.01, 1.0))

    def _seconds_left(self) -> float:
        if self._hangs:  # for ever, or for some time beyond its budget
            return max(0.0, self._stop_by - self._agent.now) + self._agent.rng.choice([15.0, 45.0, 30_000.0])
        return max(0.0, min(self._began_at + self._needs, self._stop_by) - self._agent.now)

    def _plan_end(self, seconds: float, *, crashes: bool = False) -> None:
        self._plan += 1
        plan = self._plan
        self._world.after(seconds, lambda: self._finish(plan, crashes=crashes), self._agent)

    def _finish(self, plan: int, *, crashes: bool) -> None:
        if not self.is_gone and plan == self._plan:
            self._agent.worker_ended(self._result(crashes=crashes))

    def _result(self, *, crashes: bool) -> Event:
        request, seconds = self.request, self._agent.now - self._began_at
        work = min(STEPS, math.floor(STEPS * seconds / self._needs + 1e-9)) / STEPS
        if crashes:
            return JobFailed(request.key, FailureReason.WORKER_CRASHED, "exit code 1")
        if isinstance(request, EvaluationRequest):
            sums = {"loss": (float(self._agent.profile.num_examples), 1.0)}
            return Evaluated(request.key, sums) if work == 1 else Evaluated(request.key, None, "out of time")
        if work == 0:
            return JobFailed(request.key, FailureReason.OUT_OF_TIME, "no step was done")
        assert isinstance(request, Invitation), "no history asks for statistics"
        if request.secure is not None:
            if self._world.happens("spool_full"):
                return JobFailed(request.key, FailureReason.DISK_FULL, "no room in the spool")
            self._agent.sums.encode(request.key)
            return Encoded(request.key)
        update = self._update(request, work, seconds)
        if self._world.happens("spool_full"):
            return JobFailed(request.key, FailureReason.DISK_FULL, "no room in the spool")
        self._agent.spool[request.key] = update
        return Trained(request.key, update.digest)

    def _update(self, request: Invitation, work: float, seconds: float) -> Update:
        """Make an update, whose digest depends on client, round, work and parts alone, as the bits of a real one do."""
        agent = self._agent
        parts = f":p{agent.num_parts}" if agent.num_parts else ""
        digest = Digest(f"{agent.client_id}:r{request.round_id}" + (f":w{work:g}" if work < 1 else "") + parts)
        update = Update(
            agent.client_id,
            request.round_id,
            request.base_version,
            digest,
            agent.profile.num_examples,
            work,
            num_bytes=1000,
            statistics=_statistics(random.Random(crc32(digest.encode())), agent.profile.num_examples),
            download_seconds=1.0,
            train_seconds=seconds,
        )
        if digest not in agent.faults:
            is_clumsy = self._world.happens("clumsy")
            agent.faults[digest] = agent.rng.choice([None, *BAD_BYTES]) if is_clumsy else None
            if is_clumsy and agent.faults[digest] is None:
                return self._with_false_claim(update)
        return update

    def _with_false_claim(self, update: Update) -> Update:
        update = replace(update, digest=Digest(f"{update.digest}:nonsense"))
        match self._agent.rng.randrange(4):
            case 0:
                return replace(update, num_examples=0)
            case 1:
                return replace(update, num_examples=10**12)
            case 2:
                return replace(update, work=1.5)
            case _:
                return replace(update, base_version=Version(update.base_version + 1))


def _statistics(rng: random.Random, num_examples: int) -> Sums:
    """Draw the losses that an update reports: mostly correct, sometimes none, sometimes nonsense."""
    kind, loss = rng.randrange(8), rng.randint(1, 64) / 8
    if kind == 0:
        return {}
    if kind == 1:
        return {"loss": (rng.choice([-1.0, 0.0, 1e300]), 1.0)}
    sums = {"loss": (loss * num_examples, float(num_examples))}
    if kind < 5:
        sums["loss_squared"] = (rng.uniform(1, 3) * loss**2 * num_examples, float(num_examples))
    return sums
