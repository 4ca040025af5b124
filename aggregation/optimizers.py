"""Server optimizers: the step of the global model along the mean update. Pure pairs (init, apply), block by block.

Legend: x the global model, D the mean of the round's updates (local - global: it points downhill, so it is added),
m and v the moments, t the round. All arithmetic is float64, element by element, so the result depends on no block and
no rank; x and the moments are stored as float32.

    fedavg       x <- x + lr D
    fedavgm      m <- b m + D;                       x <- x + lr m,  or Nesterov: x + lr (D + b m)
    fedadagrad   m <- b1 m + (1 - b1) D;  v <- v + D^2;                              x <- x + lr m / (sqrt(v) + tau)
    fedadam      m as above;              v <- b2 v + (1 - b2) D^2;                  x as above
    fedyogi      m as above;              v <- v - (1 - b2) D^2 sign(v - D^2);       x as above

No bias correction, and v begins at tau^2: the paper's Algorithm 2, where other libraries differ (Flower's FedAdam
corrects the bias with the exponent t + 1 and begins at 0).

An optimizer moves trained floats only: a running variance pushed through Adam may turn negative. Buffers, and
integers, follow the mean.

Sources: Reddi et al., "Adaptive Federated Optimization", ICLR 2021, Algorithm 2 (the adaptive three); Hsu et al.,
"Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification", arXiv:1909.06335
(FedAvgM); Douillard et al., "DiLoCo", arXiv:2311.08105 (Nesterov with lr 0.7 and momentum 0.9).
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.plugins.place import NOWHERE, Place

Block = NDArray[np.float64]
"""(n) elements of one tensor."""

State = dict[str, Block]
"""The same elements of each slot."""


class Optimizer(Protocol):
    """A server optimizer. `slots` are the tensors that it stores beside each trained tensor."""

    @property
    def slots(self) -> tuple[str, ...]:
        """The names of the moments; empty for an optimizer without state."""
        ...

    def init(self, slot: str) -> float:
        """Return the value of every element of a slot before the first round."""
        ...

    def apply(self, master: Block, mean: Block, state: State, place: Place = NOWHERE) -> Block:
        """Return the new elements of the model, and change the elements of `state` in place.

        Args:
            master: (n) elements of the model.
            mean: (n) of the mean update; may be overwritten.
            state: (n) of each slot.
            place: the place of the elements in the model and the run.
        """
        ...


@dataclass(frozen=True, slots=True)
class FedAvg:
    """x <- x + lr D; with lr = 1 the mean of the clients' models.

    Raises:
        ValueError: lr is not positive and finite.
    """

    lr: float = 1.0
    slots: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self) -> None:
        _check_positive(lr=self.lr)

    def init(self, slot: str) -> float:
        """Raise KeyError: FedAvg has no slot."""
        raise KeyError(slot)

    def apply(self, master: Block, mean: Block, state: State, place: Place = NOWHERE) -> Block:
        """Return x + lr D."""
        return master + (mean if self.lr == 1.0 else self.lr * mean)


@dataclass(frozen=True, slots=True)
class FedAvgM:
    """Momentum: m <- b m + D; x <- x + lr m, with Nesterov x + lr (D + b m).

    The momentum is not damped: in a steady direction the step is lr / (1 - b).

    Raises:
        ValueError: lr is not positive and finite, or b not in [0, 1).
    """

    lr: float = 1.0
    momentum: float = 0.9
    nesterov: bool = False
    slots: ClassVar[tuple[str, ...]] = ("momentum",)

    def __post_init__(self) -> None:
        _check_positive(lr=self.lr)
        _check_decay(momentum=self.momentum)

    def init(self, slot: str) -> float:
        """Return 0, the first value of the momentum."""
        return 0.0

    def apply(self, master: Block, mean: Block, state: State, place: Place = NOWHERE) -> Block:
        """Update the momentum in place and return the moved model."""
        momentum = state["momentum"]
        np.multiply(momentum, self.momentum, out=momentum)
        np.add(momentum, mean, out=momentum)
        step = mean + self.momentum * momentum if self.nesterov else momentum
        return master + self.lr * step


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adaptive(ABC):
    """The common part of the three adaptive optimizers: x <- x + lr m / (sqrt(v) + tau).

    Raises:
        ValueError: lr or tau is not positive and finite, or a decay not in [0, 1).
    """

    lr: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3
    slots: ClassVar[tuple[str, ...]] = ("first_moment", "second_moment")

    def __post_init__(self) -> None:
        _check_positive(lr=self.lr, tau=self.tau)
        _check_decay(beta1=self.beta1, beta2=self.beta2)

    def init(self, slot: str) -> float:
        """Return tau^2 for the second moment, 0 for the first."""
        return self.tau**2 if slot == "second_moment" else 0.0

    def apply(self, master: Block, mean: Block, state: State, place: Place = NOWHERE) -> Block:
        """Update both moments in place and return the moved model."""
        first, second = state["first_moment"], state["second_moment"]
        np.multiply(first, self.beta1, out=first)
        np.add(first, (1.0 - self.beta1) * mean, out=first)
        self._add_square(second, mean * mean)
        return master + self.lr * first / (np.sqrt(second) + self.tau)

    @abstractmethod
    def _add_square(self, second: Block, square: Block) -> None:
        """Update v with D^2, in place."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAdagrad(_Adaptive):
    """v <- v + D^2; the paper's experiments set b1 = 0."""

    beta1: float = 0.0

    def _add_square(self, second: Block, square: Block) -> None:
        np.add(second, square, out=second)


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAdam(_Adaptive):
    """v <- b2 v + (1 - b2) D^2."""

    def _add_square(self, second: Block, square: Block) -> None:
        np.multiply(second, self.beta2, out=second)
        np.add(second, (1.0 - self.beta2) * square, out=second)


@dataclass(frozen=True, slots=True, kw_only=True)
class FedYogi(_Adaptive):
    """v <- v - (1 - b2) D^2 sign(v - D^2): v grows at once and shrinks slowly."""

    def _add_square(self, second: Block, square: Block) -> None:
        np.subtract(second, (1.0 - self.beta2) * square * np.sign(second - square), out=second)


@dataclass(frozen=True, slots=True)
class DiLoCo(FedAvgM):
    """The outer optimizer of DiLoCo: Nesterov momentum with lr 0.7 and b 0.9."""

    lr: float = 0.7
    nesterov: bool = True


OPTIMIZERS: Mapping[str, type[Any]] = {
    "fedavg": FedAvg,
    "fedavgm": FedAvgM,
    "fedadagrad": FedAdagrad,
    "fedadam": FedAdam,
    "fedyogi": FedYogi,
    "diloco": DiLoCo,
}
"""The optimizers by their names in a run's TOML."""


def _check_positive(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 < value < np.inf:
            raise ValueError(f"{name} {value} is not positive and finite")


def _check_decay(**values: float) -> None:
    for name, value in values.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name} {value} is not in [0, 1)")
