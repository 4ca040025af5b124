"""The clients' trainings: each has a separate duration in virtual time, and many are computed together in real time.

The duration of a training depends only on device and data, not on its outcome, so nothing is computed at its beginning.
When the outcome of the first finished training is requested, the engine computes it together with the trainings that
end next, in the order in which their outcomes will be requested; the first outcome is used while the others are still
being computed. A training that is stopped before its outcome is requested is never computed.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from atoll.client.session.events import Invitation
from atoll.protocol.vocabulary import ClientId, Digest
from atoll.simulations.engines.engine import Engine, Failed, Job, Trained
from atoll.task.arrays import Arrays

AT_ONCE_MAX = 256
"""Maximum number of trainings that are computed together, because their updates are in memory together."""

ROUNDING = 1e-9
"""Tolerance [steps], so that rounding does not take a step from a budget of a whole number of steps."""


@dataclass(frozen=True, slots=True)
class Effort:
    """Work of one client in a round."""

    num_examples: int
    steps: int | None
    """Steps of the local optimizer; None: the task trains by itself, in unknown steps."""
    seconds: float
    """Seconds that the client's device needs for all of it."""


@dataclass(slots=True, eq=False)
class Training:
    """Training, in progress or finished."""

    client_id: ClientId
    invitation: Invitation
    effort: Effort
    began: float
    steps: int | None = None
    """Steps that fit into the budget."""
    ends: float = 0.0
    outcome: Trained | Failed | None = field(default=None)

    def plan(self, budget_ends: float) -> None:
        """Plan the steps that fit before the worker has to stop."""
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

    @property
    def fault(self) -> str:
        """The reason why a training without a step has no update."""
        return f"no time for the first of the steps ({self.effort.steps})"

    def stop(self, now: float) -> None:
        """Stop after the current step."""
        if self.effort.steps is None or not self.effort.seconds:
            self.ends = min(self.ends, now)
            return
        per_step = self.effort.seconds / self.effort.steps
        done = max(1, math.ceil((now - self.began) / per_step - ROUNDING))
        self.plan(min(self.ends, self.began + done * per_step))


class Trainings:
    """Trainings of all clients.

    Args:
        engine: the engine that computes them.
        version_of: returns the tensors of a version of the model.
        state_of: returns the state of a client for an invitation.
        num_wanted: returns the number of updates that are still wanted; more are not computed together, because some
            trainings may be stopped.
    """

    def __init__(
        self,
        engine: Engine,
        version_of: Callable[[Digest], Arrays],
        state_of: Callable[[ClientId, Invitation], Arrays | None],
        num_wanted: Callable[[], int],
    ) -> None:
        self._engine, self._version_of, self._state_of, self._num_wanted = engine, version_of, state_of, num_wanted
        self._open: dict[Training, None] = {}  # in the order of their beginnings
        self._coming: Iterator[Training] = iter(())
        self.num_computed = 0

    def begin(self, client_id: ClientId, invitation: Invitation, effort: Effort, now: float, budget: float) -> Training:
        """Begin a client's training, which must end within its budget [s]."""
        training = Training(client_id, invitation, effort, now)
        training.plan(now + budget)
        self._open[training] = None
        return training

    def outcome(self, training: Training) -> Trained | Failed:
        """Return the outcome of a training that has ended, and compute it if necessary."""
        self._take_until(training)
        if training.outcome is None:  # the engine has finished the earlier trainings: it trains one cohort at a time
            self._coming = self._computed(self._next_with(training))
            self._take_until(training)
        assert training.outcome is not None
        self._open.pop(training, None)
        return training.outcome

    def forget(self, training: Training) -> None:
        """Drop a training whose outcome is no longer needed."""
        self._open.pop(training, None)

    def idle_engine(self) -> Engine:
        """Return the engine, once it has computed its pending outcomes."""
        for _ in self._coming:
            pass
        return self._engine

    def _take_until(self, training: Training) -> None:
        """Take outcomes from the engine up to a training's outcome; all of them if it is not being computed."""
        while training.outcome is None and next(self._coming, None) is not None:
            pass

    def _next_with(self, training: Training) -> list[Training]:
        """Return a training and those from the same version that end next, in the order of end and beginning."""
        base = training.invitation.model_digest
        others = [
            t
            for t in self._open
            if t is not training and t.outcome is None and t.steps != 0 and t.invitation.model_digest == base
        ]
        others.sort(key=lambda t: t.ends)
        return [training, *others[: max(0, min(AT_ONCE_MAX, self._num_wanted()) - 1)]]

    def _computed(self, trainings: Sequence[Training]) -> Iterator[Training]:
        """Yield each training with its outcome as the engine returns it, unless it was planned again meanwhile."""
        version = self._version_of(trainings[0].invitation.model_digest)
        asked = [t.steps for t in trainings]
        jobs = [
            Job(
                t.client_id,
                t.invitation.seed,
                t.steps,
                self._state_of(t.client_id, t.invitation),
                t.invitation.round_id,
                t.invitation.base_version,
                t.invitation.asked_at,
            )
            for t in trainings
        ]
        outcomes = self._engine.train(version, jobs)
        for training, steps, outcome in zip(trainings, asked, outcomes, strict=True):
            self.num_computed += 1
            if training.steps == steps:
                training.outcome = outcome
            yield training
