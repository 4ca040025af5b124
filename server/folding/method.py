"""The settings of a run that say how its updates become the next model: the rule, the norm bound, the optimizer."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.fold.device import Device
from atoll.aggregation.fold.step import slots_of
from atoll.aggregation.fold.weights import Normalized, Share, integer_weights, normalized
from atoll.aggregation.optimizers import Optimizer
from atoll.aggregation.rules.coordinate import clip_factors
from atoll.aggregation.rules.rule import Rule
from atoll.protocol.settings import ConfigError
from atoll.server.config.aggregation import AggregationConfig, OptimizerConfig
from atoll.server.rounds.events import Contribution


@dataclass(frozen=True, slots=True)
class _Gone:
    """A user's rule whose code is no longer there."""

    fault: ConfigError

    def reduce(self, rows: NDArray[np.float32]) -> NDArray[np.float64]:
        raise self.fault


@dataclass(frozen=True, slots=True)
class Method:
    """How a run's updates become its next model, ready for the fold."""

    optimizer: Optimizer
    rule: Rule | None = None
    norm_bound: float | Literal["median"] | None = None
    algorithm: str = "fedavg"
    weighting: Literal["examples", "uniform"] = "examples"
    num_clients: int | None = None
    device: Device | None = None

    @classmethod
    def of(
        cls,
        aggregation: AggregationConfig,
        optimizer: OptimizerConfig,
        *,
        is_over: bool = False,
        sums_here: bool = True,
    ) -> "Method":
        """As the settings say; raises as `AggregationConfig.build`.

        A run that has ended needs neither rule nor device: that its code or its GPU is gone concerns only who resumes
        it. Nor is a device needed where others sum (`sums_here`).
        """
        rule: Rule | None
        device: Device | None = None
        try:
            rule, device = aggregation.build(), aggregation.open_device() if sums_here else None
        except ConfigError as error:
            if not is_over:
                raise
            rule = _Gone(error)
        return cls(
            optimizer.build(),
            rule,
            aggregation.norm_bound,
            aggregation.algorithm,
            aggregation.weighting,
            aggregation.num_clients,
            device,
        )

    @property
    def slots(self) -> tuple[str, ...]:
        """Names of what is kept beside each version."""
        return slots_of(self.optimizer, self.rule)

    def weights(self, contributions: Sequence[Contribution]) -> tuple[int, ...]:
        """How much each update counts in the mean."""
        alike = self.weighting == "uniform"
        return integer_weights([Share(1 if alike else c.num_examples, c.scale) for c in contributions])

    def normalized(self, weights: Sequence[int], steps: Iterable[tuple[float, float]]) -> Normalized:
        """What FedNova makes of the steps that the updates took; of any other algorithm nothing.

        Args:
            weights: of the updates.
            steps: the normalizer and the effective steps that each claims; asked only when they matter.
        """
        if self.algorithm != "fednova":
            return Normalized((1.0,) * len(weights), 1.0)
        claims = list(steps)
        return normalized(weights, [norm for norm, _ in claims], [effective for _, effective in claims])

    def factors(self, norms: Sequence[float]) -> Sequence[float]:
        """What each update is multiplied with so that none is longer than the bound."""
        return [1.0] * len(norms) if self.norm_bound is None else clip_factors(norms, self.norm_bound)
