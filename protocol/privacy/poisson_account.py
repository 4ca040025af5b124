"""The account of Poisson-subsampled Gaussian steps, by the tightest accountant that is installed."""

from collections.abc import Callable
from dataclasses import dataclass, field

from atoll.protocol.privacy import gaussian, loss_distribution, subsampled
from atoll.protocol.privacy.guarantee import EXACT, PLD, RDP

__all__ = ["PRECISION", "PoissonAccount", "most"]

PRECISION = 1e-3
"""Share of the budget that the found noise may leave unused."""

_TRIES = 8


@dataclass(frozen=True, slots=True)
class PoissonAccount:
    """Account of steps in each of which every example takes part with one probability.

    Args:
        q: the probability, in (0, 1]; with 1 the account is exact.
        delta: of the guarantee.
    """

    q: float
    delta: float
    _known: dict[tuple[float, int], float] = field(default_factory=dict, init=False, repr=False, compare=False)

    def account_of(self, z: float, steps: int) -> tuple[float, str]:
        """Return epsilon after some steps with the noise multiplier z, and its formula in words."""
        bound = self.bound_of(z, steps)
        if self.q == 1.0:
            return bound, EXACT
        if not loss_distribution.is_asked(z, steps, bound):
            return bound, RDP
        if (z, steps) not in self._known:
            self._known[z, steps] = loss_distribution.epsilon_of(self.q, z, steps, self.delta, bound)
        tight = self._known[z, steps]
        return (tight, PLD) if tight < bound else (bound, RDP)

    def epsilon_of(self, z: float, steps: int) -> float:
        """Return epsilon after some steps with the noise multiplier z; in tenths of a second, or at once as before."""
        return self.account_of(z, steps)[0]

    def bound_of(self, z: float, steps: int) -> float:
        """Return an upper bound of epsilon in microseconds, whatever is installed; with q = 1 it is exact."""
        if self.q == 1.0:
            return gaussian.epsilon_of(gaussian.mu_of([(z, steps)]), self.delta)
        return subsampled.epsilon_bound(self.q, z, steps, self.delta)

    def bound_noise(self, epsilon: float, steps: int) -> float:
        """Return a noise multiplier that is enough for epsilon by the bound; errors as in `least_noise`."""
        return subsampled.noise_multiplier_bound(epsilon, self.delta, self.q, steps)

    def least_noise(self, epsilon: float, steps: int) -> float:
        """Return a noise multiplier within epsilon that leaves at most `PRECISION` of it, in a few evaluations.

        From the built-in bound, which is enough, by secants of log epsilon over log z.

        Raises:
            ValueError: no noise is enough.
        """
        best, power = self.bound_noise(epsilon, steps), 1.2
        while self.epsilon_of(best, steps) > epsilon:  # an accountant that is not below the bound, by its own rounding
            best *= 1.001
        for _ in range(_TRIES):
            found = self.epsilon_of(best, steps)
            if found >= epsilon * (1.0 - PRECISION) or found <= 0.0:
                break
            tried = best * (found / (epsilon * (1.0 - PRECISION / 2.0))) ** (1.0 / power)
            if self.epsilon_of(tried, steps) <= epsilon:
                best = tried
            else:
                power *= 1.5  # epsilon falls faster with z than was thought
        return best


def most(holds: Callable[[int], bool], below: int, least: int = 0) -> int:
    """Return the largest number below `below` with a monotone condition; `least`: no larger one has it."""
    low, high = least, below
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
