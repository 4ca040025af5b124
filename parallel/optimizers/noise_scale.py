"""The gradient noise scale: how large a batch may become before its gradient holds little that is new.

Legend: G the true gradient, Σ the covariance of one example's gradient, G_B the gradient of the mean over a batch of B.

    E |G_B|² = |G|² + tr Σ / B         so two batch sizes b < B at the same weights tell both apart, without bias:

    |G|² = (B |G_B|² - b |G_b|²) / (B - b)
    tr Σ = (|G_b|² - |G_B|²) / (1 / b - 1 / B)
    B_simple = tr Σ / |G|²

One pair says little: both estimates are averaged over the steps, each for itself, because a mean of ratios is biased.
A rank's or a micro-batch's gradient is the small one and their mean the big one, before clipping and momentum. The
squared norms of several small ones of equal size are averaged.

Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, section 2.2 and appendix A.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """What one pair of gradients says; either may be negative."""

    signal: float
    """|G|²."""

    noise: float
    """tr Σ."""


def estimate(*, small_batch: float, small_squared: float, big_batch: float, big_squared: float) -> Estimate:
    """|G|² and tr Σ, without bias.

    Args:
        small_batch: b, examples (or tokens).
        small_squared: |G_b|², or its mean over several.
        big_batch: B.
        big_squared: |G_B|².

    Raises:
        ValueError: the batches are not 0 < b < B.
    """
    if not 0 < small_batch < big_batch:
        raise ValueError(f"the batches must be 0 < small < big, got {small_batch} and {big_batch}")
    signal = (big_batch * big_squared - small_batch * small_squared) / (big_batch - small_batch)
    noise = (small_squared - big_squared) / (1 / small_batch - 1 / big_batch)
    return Estimate(signal, noise)


class NoiseScale:
    """B_simple as a training goes on, from exponential means of |G|² and tr Σ.

    Args:
        decay: share of the past in the mean, in [0, 1): 0.99 looks back over about a hundred estimates.
    """

    def __init__(self, decay: float = 0.99) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {decay!r}")
        self.decay = decay
        self._signal, self._noise, self._weight = 0.0, 0.0, 0.0

    def add(self, new: Estimate) -> None:
        """Take in what one step has shown."""
        self._signal = self.decay * self._signal + (1 - self.decay) * new.signal
        self._noise = self.decay * self._noise + (1 - self.decay) * new.noise
        self._weight = self.decay * self._weight + (1 - self.decay)

    @property
    def mean(self) -> Estimate | None:
        """The means, with what is missing in them at first divided out; None before the first estimate."""
        return Estimate(self._signal / self._weight, self._noise / self._weight) if self._weight else None

    @property
    def simple(self) -> float | None:
        """B_simple, in examples (or tokens); None as long as the mean of |G|² or of tr Σ is not positive."""
        if not (self._signal > 0 and self._noise > 0):
            return None
        return self._noise / self._signal

    def state_dict(self) -> dict[str, float]:
        """The means, for a checkpoint."""
        return {"signal": self._signal, "noise": self._noise, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Carry on from a checkpoint."""
        self._signal, self._noise, self._weight = (float(state[key]) for key in ("signal", "noise", "weight"))
