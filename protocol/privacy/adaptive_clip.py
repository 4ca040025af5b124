r"""The clip norm that follows a quantile of the updates' lengths (Andrew et al. 2021, arXiv 1905.03871, algorithm 1).

A round also adds up one bit of each client, with noise, of which the next clip norm follows:

    b = (sum_i (1[|u_i| <= C] - 1/2) + N(0, sigma^2)) / m + 1/2
    C <- C exp(-eta (b - gamma))

for m clients, the quantile gamma and the learning rate eta. A client's bit moves the count by 1/2 at most, so the count
is a Gaussian mechanism of the multiplier 2 sigma. Sum and count together have the multiplier z if the sum has

    z_delta = (z^-2 - (2 sigma)^-2)^(-1/2)

so z must be below 2 sigma, and both are charged as one use of z.
"""

import math
from dataclasses import dataclass

CLIP_MIN, CLIP_MAX = 1e-9, 1e9
"""Bounds of a clip norm, whatever the updates are."""

STEP_MAX = 50.0
"""Largest step of its logarithm, which reaches any bound from any norm."""


@dataclass(frozen=True, slots=True)
class AdaptiveClip:
    """Rule of a clip norm that follows the updates.

    Attributes:
        quantile: gamma, the share of updates that are not clipped, in (0, 1).
        learning_rate: eta, above 0.
        sigma: standard deviation of the noise of the count, in clients.
        clients: m, the fixed number of clients of a round.
    """

    quantile: float
    learning_rate: float
    sigma: float
    clients: int

    def sum_multiplier(self, z: float) -> float:
        """Return z_delta, the noise multiplier of the sum.

        Raises:
            ValueError: z is 2 sigma or more: the count alone would cost more than the round.
        """
        if z >= 2.0 * self.sigma:
            raise ValueError(f"a noise multiplier of {z:g} is not below twice {self.sigma:g}")
        return 1.0 / math.sqrt(z**-2 - (2.0 * self.sigma) ** -2)

    def next_norm(self, clip_norm: float, count: float) -> float:
        """Return the clip norm of the next round.

        Args:
            clip_norm: C of this round.
            count: sum_i (1[|u_i| <= C] - 1/2), with its noise.
        """
        share = count / self.clients + 0.5
        step = -self.learning_rate * (share - self.quantile)
        return min(max(clip_norm * math.exp(min(max(step, -STEP_MAX), STEP_MAX)), CLIP_MIN), CLIP_MAX)
