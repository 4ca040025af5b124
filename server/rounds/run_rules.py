"""The rules of a run: its straggler policy, its length, its evaluations, its best version, its early stop. Pure values.

A metric watches a run: its best version is kept, or its course ends the run (Prechelt 1998, "Early stopping, but
when?").
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from atoll.ground.printable import count_of
from atoll.protocol.vocabulary import Version
from atoll.server.rounds.policy import StragglerPolicy
from atoll.server.rounds.privacy_rules import (
    CorrelatedRules,
    ExampleRules,
    PrivacyRules,
    SharedExampleRules,
    SharedRules,
)
from atoll.server.rounds.secure_rules import SecureRules

Source = Literal["server", "clients"]
"""Data of an evaluation: the server's, or the data of all clients together."""


@dataclass(frozen=True, slots=True)
class WatchedMetric:
    """Metric that chooses the best version or ends the run early."""

    name: str
    source: Source
    mode: Literal["max", "min"]  # whether a larger or a smaller value is better

    def is_better(self, value: float, other: float, by: float = 0.0) -> bool:
        """Return whether a value is better than another one by more than `by`."""
        return value > other + by if self.mode == "max" else value < other - by

    def __str__(self) -> str:
        return f"{self.name} ({self.source})"


@dataclass(frozen=True, slots=True)
class MeasuredVersion:
    """Version with its value of a metric."""

    version: Version
    value: float

    def __str__(self) -> str:
        return f"{self.value:.6g} at version {self.version}"


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of an early stop's metric."""

    best: MeasuredVersion
    num_since: int  # number of evaluations since the best one


@dataclass(frozen=True, slots=True)
class EarlyStop:
    """End of a run by the course of a metric: at a target, or after `patience` evaluations without improvement."""

    metric: WatchedMetric
    patience: int = 0  # evaluations; 0: no limit
    min_delta: float = 0.0
    target: float | None = None

    def after(self, progress: Progress | None, measured: MeasuredVersion) -> Progress:
        """Return the progress after an evaluation, an improvement if it is better by more than `min_delta`."""
        if progress is None or self.metric.is_better(measured.value, progress.best.value, self.min_delta):
            return Progress(measured, 0)
        return Progress(progress.best, progress.num_since + 1)

    def cause(self, progress: Progress, measured: MeasuredVersion) -> str:
        """Return why the run ends after an evaluation; empty: it continues."""
        if self.target is not None and not self.metric.is_better(self.target, measured.value):
            return f"early stop: {self.metric} is {measured}, and its target is {self.target:g}"
        if not self.patience or progress.num_since < self.patience:
            return ""
        least = f" by more than {self.min_delta:g}" if self.min_delta else ""
        evaluations = count_of(progress.num_since, "evaluation")
        return f"early stop: {self.metric} has not improved{least} in {evaluations}, its best is {progress.best}"


@dataclass(frozen=True, slots=True)
class WaitRules:
    """Wait of a run until time or human action removes the cause: its length, and the next state."""

    most: float | None = None  # seconds; None: unlimited
    then: Literal["pause", "fail"] = "pause"


@dataclass(frozen=True, slots=True)
class RunRules:
    """Rules of a run: its straggler policy, its length, its evaluations, its best version, its early stop."""

    policy: StragglerPolicy
    rounds: int  # number of commits after which the run is finished
    seed: int = 0
    evaluate_server_every: int = 0  # versions; 0: never; otherwise the last version is always evaluated
    evaluate_clients_every: int = 0
    evaluate_clients_max: int = 0  # 0: all connected clients
    evaluation_deadline: float = 60.0  # seconds for the clients' answers
    pacer_window: int = 0  # commits; 0: the sampler uses no pacer
    best: WatchedMetric | None = None  # its best version is kept; None: there is no best version
    stop: EarlyStop | None = None
    keep_sites: int = 100
    """The number of newest versions whose metrics of single sites are kept; 0: none."""
    weighs: bool = True
    """Whether updates count by their examples, so that `max_share` bounds them; else all count the same."""
    unevaluated_max: int = 0
    """The number of versions waiting for the server's evaluation at which no round begins; 0: rounds do not wait."""
    wait: WaitRules | None = None
    """The wait for clients; None: a round without them is abandoned, as in a simulation and in runs of earlier
    releases."""
    secure: SecureRules | None = None
    """The rules of secure sums; None: updates are sent plain."""
    privacy: SharedExampleRules | ExampleRules | SharedRules | CorrelatedRules | PrivacyRules | None = None
    """The rules of differential privacy; None: no noise is added."""

    @property
    def watched(self) -> tuple[WatchedMetric, ...]:
        """The metrics that choose the best version or end the run early; empty: there are none."""
        of_stop = None if self.stop is None else self.stop.metric
        return tuple(metric for metric in (self.best, of_stop) if metric is not None)

    @property
    def charges_max(self) -> int:
        """Most charges of a client in one private round: with noise of the clients, one for each attempt at its sum.

        Masked updates of a sample of examples leave once in a round, and so are charged once.
        """
        if self.secure is None or self.privacy is None or self.privacy.noise_by != "clients":
            return 1
        return self.secure.attempts if self.privacy.hides_clients else 1

    def watches(self, source: Source) -> bool:
        """Return whether a metric of this data source chooses the best version or ends the run early."""
        return any(metric.source == source for metric in self.watched)


def value_in(metric: WatchedMetric, values: Mapping[str, float | None], source: Source) -> float | None:
    """Return the metric's value in an evaluation; None: it is measured on other data, or has no value."""
    return values.get(metric.name) if source == metric.source else None
