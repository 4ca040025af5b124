"""The clients' trainings: in virtual time each has its own length, in real time many are computed at once.

How long a training takes follows from its device and its data alone, not from what comes out of it. So nothing is
computed when it begins; when the first one is over and its outcome is asked for, the engine trains it together with
those that end next, in the order in which they will be asked for: what has come of the first is used while others are
still being computed. One that is told to stop before nobody has asked is never computed at all.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from atoll.client.session.events import Invitation
from atoll.parallel.task.arrays import Arrays
from atoll.protocol.vocabulary import ClientId, Digest
from atoll.simulations.engines.engine import Engine, Failed, Job, Trained

AT_ONCE_MAX = 256
"""Trainings that are computed at once: their updates are in memory together."""

ROUNDING = 1e-9
"""A budget that is a whole number of steps must not lose one of them to a rounding."""


@dataclass(frozen=True, slots=True)
class Effort:
    """What a round asks of one client."""

    num_examples: int
    steps: int | None
    """Of the local optimizer; None: the task trains by itself, and only the whole of it is known."""
    seconds: float
    """That its device needs for all of it."""


@dataclass(slots=True, eq=False)
class Training:
    """One training that is under way, or over."""

    client_id: ClientId
    invitation: Invitation
    effort: Effort
    began: float
    steps: int | None = None
    """That there is time for."""
    ends: float = 0.0
    outcome: Trained | Failed | None = field(default=None)

    def plan(self, budget_ends: float) -> None:
        """So many steps fit before the worker has to stop."""
        effort, before = self.effort, self.steps
        if effort.steps is None:
            self.ends = min(self.began + effort.seconds, budget_ends)
            return
        per_step = effort.seconds / effort.steps
        fit = math.floor((budget_ends - self.began) / per_step + ROUNDING) if per_step else effort.steps
        self.steps = max(0, min(effort.steps, fit))
        self.ends = self.began + self.steps * per_step
        if self.steps != before:
            self.outcome = None

    def stop(self, now: float) -> None:
        """Stop after the step that is being done."""
        if self.effort.steps is None or not self.effort.seconds:
            self.ends = min(self.ends, now)
            return
        per_step = self.effort.seconds / self.effort.steps
        done = max(1, math.ceil((now - self.began) / per_step - ROUNDING))
        self.plan(min(self.ends, self.began + done * per_step))


class Trainings:
    """Those of all clients.

    Args:
        engine: computes them.
        version_of: the tensors of a version of the model.
        own_of: what a client has kept, as its invitation says.
        num_wanted: how many updates are still wanted: more are not computed at once, for some may be told to stop.
    """

    def __init__(
        self,
        engine: Engine,
        version_of: Callable[[Digest], Arrays],
        own_of: Callable[[ClientId, Invitation], Arrays | None],
        num_wanted: Callable[[], int],
    ) -> None:
        self._engine, self._version_of, self._own_of, self._num_wanted = engine, version_of, own_of, num_wanted
        self._open: dict[Training, None] = {}  # in the order in which they began
        self._coming: Iterator[Training] = iter(())
        self.num_computed = 0

    def begin(self, client_id: ClientId, invitation: Invitation, effort: Effort, now: float, budget: float) -> Training:
        """A client has begun to train, and must be done within its budget [s]."""
        training = Training(client_id, invitation, effort, now)
        training.plan(now + budget)
        self._open[training] = None
        return training

    def outcome(self, training: Training) -> Trained | Failed:
        """What has come of it; it is over."""
        self._take_until(training)
        if training.outcome is None:  # the engine is done with those before it: it trains one cohort at a time
            self._coming = self._computed(self._next_beside(training))
            self._take_until(training)
        assert training.outcome is not None
        self._open.pop(training, None)
        return training.outcome

    def forget(self, training: Training) -> None:
        """Nobody wants to know any more."""
        self._open.pop(training, None)

    def _take_until(self, training: Training) -> None:
        """Take what is being computed, until it has come; all of it when it is not among that."""
        while training.outcome is None and next(self._coming, None) is not None:
            pass

    def _next_beside(self, training: Training) -> list[Training]:
        """It and those from the same version that end next; of one instant, in the order in which they began."""
        base = training.invitation.model_digest
        others = [
            t
            for t in self._open
            if t is not training and t.outcome is None and t.steps != 0 and t.invitation.model_digest == base
        ]
        others.sort(key=lambda t: t.ends)
        return [training, *others[: max(0, min(AT_ONCE_MAX, self._num_wanted()) - 1)]]

    def _computed(self, trainings: Sequence[Training]) -> Iterator[Training]:
        """Each with its outcome, as the engine brings it, unless it was planned anew meanwhile."""
        version = self._version_of(trainings[0].invitation.model_digest)
        asked = [t.steps for t in trainings]
        jobs = [
            Job(
                t.client_id,
                t.invitation.seed,
                t.steps,
                self._own_of(t.client_id, t.invitation),
                t.invitation.round_id,
            )
            for t in trainings
        ]
        outcomes = self._engine.train(version, jobs)
        for training, steps, outcome in zip(trainings, asked, outcomes, strict=True):
            self.num_computed += 1
            if training.steps == steps:
                training.outcome = outcome
            yield training
