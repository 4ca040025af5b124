"""The method of a run, built from its settings for the fold: algorithm, rule, norm bound, optimizer, device."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.custom_optimizer import CustomOptimizer
from atoll.aggregation.fold.device import Device
from atoll.aggregation.fold.step import slots_of
from atoll.aggregation.fold.weights import Normalized, Share, integer_weights, normalized
from atoll.aggregation.optimizers import Block, Optimizer, State
from atoll.aggregation.rules.coordinate import clip_factors
from atoll.aggregation.rules.rule import Rule
from atoll.plugins.place import NOWHERE, Place
from atoll.protocol.settings import ConfigError
from atoll.server.config.aggregation import AggregationConfig, OptimizerConfig
from atoll.server.rounds.events import Contribution


@dataclass(frozen=True, slots=True)
class _Gone:
    """Placeholder for a custom rule or optimizer whose code no longer exists; it raises when it is used."""

    fault: ConfigError
    slots: ClassVar[tuple[str, ...]] = ()

    def reduce(self, rows: NDArray[np.float32], place: Place = NOWHERE) -> NDArray[np.float64]:
        raise self.fault

    def init(self, slot: str) -> float:
        raise self.fault

    def apply(self, master: Block, mean: Block, state: State, place: Place = NOWHERE) -> Block:
        raise self.fault


@dataclass(frozen=True, slots=True)
class Method:
    """Method by which a run's updates become its next version, ready for the fold."""

    optimizer: Optimizer
    """Server optimizer, whose numbers may have a schedule: a plan has the values for its fold."""
    rule: Rule | None = None
    norm_bound: float | Literal["median"] | None = None
    algorithm: str = "fedavg"
    weighting: Literal["examples", "uniform"] = "examples"
    num_clients: int | None = None
    device: Device | None = None
    grows: bool = False
    """Whether the rows of the updates are appended to the model's; all other fields then have no effect."""

    @classmethod
    def of(
        cls,
        aggregation: AggregationConfig,
        optimizer: OptimizerConfig,
        *,
        is_over: bool = False,
        sums_here: bool = True,
    ) -> "Method":
        """Build the method of a run.

        Args:
            aggregation: the settings of the aggregation.
            optimizer: the settings of the server optimizer.
            is_over: whether the run has ended: then a missing rule or GPU is not an error before the run is resumed.
            sums_here: whether this process computes the sums; otherwise aggregation ranks do, and it needs no device.

        Raises:
            ConfigError: the custom rule or optimizer, or the device, does not exist; or they are incompatible.
        """
        rule: Rule | None
        device: Device | None = None
        faults: list[str] = []
        try:
            rule, device = aggregation.build(), aggregation.open_device() if sums_here else None
        except ConfigError as error:
            faults += error.faults
            rule = _Gone(error)
        step: Optimizer
        try:
            step = optimizer.build()
        except ConfigError as error:
            faults += error.faults
            step = _Gone(error)
        else:
            faults += _faults_together(step, aggregation)
        if faults and not is_over:
            raise ConfigError(faults)
        return cls(
            step,
            rule,
            aggregation.norm_bound,
            aggregation.algorithm,
            aggregation.weighting,
            aggregation.num_clients,
            device,
            aggregation.grows,
        )

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the optimizer's tensors beside each version."""
        return slots_of(self.optimizer, self.rule)

    def weights(self, contributions: Sequence[Contribution]) -> tuple[int, ...]:
        """Return the integer weight of each update in the mean."""
        is_uniform = self.weighting == "uniform"
        return integer_weights([Share(1 if is_uniform else c.num_examples, c.scale) for c in contributions])

    def normalized(self, weights: Sequence[int], steps: Iterable[tuple[float, float]]) -> Normalized:
        """Return FedNova's factors of the updates and of their sum; 1 for any other algorithm.

        Args:
            weights: the weights of the updates.
            steps: the normalizer and the effective steps that each update claims; used only by FedNova.
        """
        if self.algorithm != "fednova":
            return Normalized((1.0,) * len(weights), 1.0)
        claims = list(steps)
        return normalized(weights, [norm for norm, _ in claims], [effective for _, effective in claims])

    def factors(self, norms: Sequence[float]) -> Sequence[float]:
        """Return the factor of each update that keeps its norm within the bound."""
        return [1.0] * len(norms) if self.norm_bound is None else clip_factors(norms, self.norm_bound)


def _faults_together(optimizer: Optimizer, aggregation: AggregationConfig) -> list[str]:
    """Return the reasons why a server optimizer is incompatible with the aggregation."""
    if not (isinstance(optimizer, CustomOptimizer) and optimizer.has_prepare):
        return []
    what = "the optimizer has `prepare`, which reads whole updates and their exact mean: it cannot be combined with"
    faults = [f"aggregation: {what} rule {aggregation.rule!r}: only mean does"] * (aggregation.rule != "mean")
    return faults + [f"aggregation: {what} partial"] * aggregation.partial
