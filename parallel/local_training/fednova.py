"""FedNova at the client: how much one unit of every gradient has moved the model.

Legend: τ steps with gradients g_0 .. g_{τ-1}, rate η, momentum ρ, proximal weight μ, x the global model, y the local.

    x - y = η sum_k a_k g_k,   a_k = d_{τ-k}                     what one gradient does, τ - k steps later:
    d_0 = v_0 = 0;   v_{j+1} = ρ v_j - η μ d_j  (+ 1 if j = 0);   d_{j+1} = d_j + v_{j+1}
    normalizer ‖a‖₁ = sum_{j=1}^{τ} |d_j|

For plain SGD that is τ; with momentum sum_k (1 - ρ^(τ-k)) / (1 - ρ); with a proximal term (1 - (1 - ημ)^τ) / (ημ).
Weight decay and clipping change the gradients, and not what becomes of them.

Source: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS
2020, section 4. With momentum and a proximal term together the authors' code has another recurrence, because there the
term is no part of the gradient that the momentum collects; here it is.
"""

import math

from atoll.parallel.task.errors import TaskBroken
from atoll.parallel.task.local import Local

NORMALIZER_MAX = 1e9
"""The largest that an update may claim (`aggregation.weights`)."""


class Normalizer:
    """Counts the steps of one local training."""

    def __init__(self, local: Local) -> None:
        self._momentum, self._pull = local.momentum, local.lr * local.prox_mu
        self._velocity, self._distance = 1.0, 0.0
        self._num_steps, self._norm = 0, 0.0

    def step(self) -> None:
        """One more step was taken."""
        if self._num_steps:
            self._velocity = self._momentum * self._velocity - self._pull * self._distance
        self._distance += self._velocity
        self._norm += abs(self._distance)
        self._num_steps += 1

    @property
    def normalizer(self) -> float:
        """‖a‖₁ >= 1.

        Raises:
            TaskBroken: the proximal term throws the model ever further (ημ > 2), or there were more than 1e9 steps.
        """
        if not (math.isfinite(self._norm) and self._norm <= NORMALIZER_MAX):
            raise TaskBroken(
                f"FedNova's normalizer is {self._norm:g} after {self._num_steps} steps; allowed: at most "
                f"{NORMALIZER_MAX:g} (local.lr * local.prox_mu is {self._pull:g}, above 2 it grows without end)"
            )
        return self._norm

    @property
    def effective_steps(self) -> float:
        """What this client brings to τ_eff: ‖a‖₁, and with a proximal term τ, as in the authors' code."""
        return float(self._num_steps) if self._pull else self.normalizer
