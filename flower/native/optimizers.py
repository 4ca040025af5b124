"""Flower's adaptive server optimizers, as objects of `optimizer.name`: the steps of flwr 1.42, element by element.

Legend as in `aggregation/optimizers.py`: x the model, D the mean update, m and v the moments, t the round from 1.

    m <- b1 m + (1 - b1) D        x <- x + lr m / (sqrt(v) + tau)
    FedAdagrad   v <- v + D^2
    FedAdam      v <- b2 v + (1 - b2) D^2;   lr sqrt(1 - b2^(t+1)) / (1 - b1^(t+1)) in place of lr
    FedYogi      v <- v - (1 - b2) D^2 sign(v - D^2)

They differ from Atoll's, which follow the paper: v begins at 0 here, at tau^2 there, and Adam corrects its bias.

Source: flwr/serverapp/strategy/{fedopt,fedadagrad,fedadam,fedyogi}.py, after Reddi et al., "Adaptive Federated
Optimization", ICLR 2021, Algorithm 2.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

Block = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Adaptive:
    lr: float = 0.1
    beta1: float = 0.0
    beta2: float = 0.0
    tau: float = 1e-3
    slots: ClassVar[tuple[str, ...]] = ("first_moment", "second_moment")

    def init(self, slot: str) -> float:
        """Return 0, where both moments begin."""
        return 0.0

    def apply(self, master: Block, mean: Block, state: dict[str, Block], place: Any) -> Block:
        """Update both moments and return the moved model; see `aggregation.optimizers.Optimizer`."""
        first = state["first_moment"] = self.beta1 * state["first_moment"] + (1.0 - self.beta1) * mean
        second = state["second_moment"] = self._second(state["second_moment"], mean * mean)
        moved: Block = master + self._rate(place.version) * first / (np.sqrt(second) + self.tau)
        return moved

    def _rate(self, version: int) -> float:
        return self.lr

    def _second(self, second: Block, square: Block) -> Block:
        raise NotImplementedError


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAdagrad(_Adaptive):
    """v <- v + D^2, with b1 = 0."""

    def _second(self, second: Block, square: Block) -> Block:
        return second + square


@dataclass(frozen=True, slots=True, kw_only=True)
class FedAdam(_Adaptive):
    """v <- b2 v + (1 - b2) D^2, with the bias corrected by powers of t + 1."""

    def _rate(self, version: int) -> float:
        return float(self.lr * np.sqrt(1.0 - self.beta2 ** (version + 1)) / (1.0 - self.beta1 ** (version + 1)))

    def _second(self, second: Block, square: Block) -> Block:
        return self.beta2 * second + (1.0 - self.beta2) * square


@dataclass(frozen=True, slots=True, kw_only=True)
class FedYogi(_Adaptive):
    """v <- v - (1 - b2) D^2 sign(v - D^2)."""

    def _second(self, second: Block, square: Block) -> Block:
        moved: Block = second - (1.0 - self.beta2) * square * np.sign(second - square)
        return moved
