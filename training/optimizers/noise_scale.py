"""The gradient noise scale: the batch size up to which a larger batch still adds information to its gradient.

Legend: G the true gradient, Σ the covariance of one example's gradient, G_B the gradient of the mean over a batch of B.

    E |G_B|² = |G|² + tr Σ / B         so two batch sizes b < B at the same weights give both, without bias:

    |G|² = (B |G_B|² - b |G_b|²) / (B - b)
    tr Σ = (|G_b|² - |G_B|²) / (1 / b - 1 / B)
    B_simple = tr Σ / |G|²

One pair is a noisy estimate: both quantities are averaged over the steps, each for itself, because a mean of ratios is
biased. A rank's or a micro-batch's gradient is the small one and their mean the big one, before clipping and momentum.
The squared norms of several small ones of equal size are averaged.

Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, section 2.2 and appendix A.1.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate from one pair of gradients; either number may be negative."""

    signal: float
    """The squared norm |G|² of the true gradient."""

    noise: float
    """The trace tr Σ of the covariance."""


def estimate(*, small_batch: float, small_squared: float, big_batch: float, big_squared: float) -> Estimate:
    """Estimate |G|² and tr Σ, without bias.

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
    """The noise scale B_simple during a training, from exponential means of |G|² and tr Σ.

    Args:
        decay: weight of the past in the mean, in [0, 1): 0.99 looks back over about a hundred estimates.
    """

    def __init__(self, decay: float = 0.99) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be in [0, 1), got {decay!r}")
        self.decay = decay
        self._signal, self._noise, self._weight = 0.0, 0.0, 0.0

    def add(self, new: Estimate) -> None:
        """Add the estimate of one step."""
        self._signal = self.decay * self._signal + (1 - self.decay) * new.signal
        self._noise = self.decay * self._noise + (1 - self.decay) * new.noise
        self._weight = self.decay * self._weight + (1 - self.decay)

    @property
    def mean(self) -> Estimate | None:
        """The means, corrected for their start at zero; None before the first estimate."""
        return Estimate(self._signal / self._weight, self._noise / self._weight) if self._weight else None

    @property
    def simple(self) -> float | None:
        """The noise scale B_simple, in examples (or tokens); None while the mean of |G|² or of tr Σ is not positive."""
        if not (self._signal > 0 and self._noise > 0):
            return None
        return self._noise / self._signal

    def state_dict(self) -> dict[str, float]:
        """Return the means, for a checkpoint."""
        return {"signal": self._signal, "noise": self._noise, "weight": self._weight}

    def load_state_dict(self, state: Mapping[str, float]) -> None:
        """Restore the means of a checkpoint."""
        self._signal, self._noise, self._weight = (float(state[key]) for key in ("signal", "noise", "weight"))
