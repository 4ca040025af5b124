"""FedNova at the client: the total weight of the gradients in the model's movement.

Legend: τ steps with gradients g_0 .. g_{τ-1}, rate η, momentum ρ, proximal weight μ, x the global model, y the local.

    x - y = η sum_k a_k g_k,   a_k = d_{τ-k}                     the effect of a gradient, τ - k steps later:
    d_0 = v_0 = 0;   v_{j+1} = ρ v_j - η μ d_j  (+ 1 if j = 0);   d_{j+1} = d_j + v_{j+1}
    normalizer ‖a‖₁ = sum_{j=1}^{τ} |d_j|

For plain SGD that is τ; with momentum sum_k (1 - ρ^(τ-k)) / (1 - ρ); with a proximal term (1 - (1 - ημ)^τ) / (ημ).
Weight decay and clipping change the gradients, not their weights.

Source: Wang et al., "Tackling the Objective Inconsistency Problem in Heterogeneous Federated Optimization", NeurIPS
2020, section 4. With momentum and a proximal term together the authors' code (JYWa/FedNova) has another recurrence,
a <- (1 - ημ) (a + c) + 1 with c <- ρ c + 1, which is not the norm of the weights in its steps: its weights are the ones
above, because its momentum buffer accumulates the term, too.
"""

import math

from atoll.ground.printable import count_of
from atoll.task.errors import TaskBroken
from atoll.task.local import Local

NORMALIZER_MAX = 1e9
"""The largest normalizer that an update may claim (`aggregation/fold/weights`)."""


class Normalizer:
    """The normalizer of one local training, updated step by step."""

    def __init__(self, local: Local) -> None:
        self._momentum, self._pull = local.momentum, local.lr * local.prox_mu
        self._velocity, self._distance = 1.0, 0.0
        self._num_steps, self._norm = 0, 0.0

    def step(self) -> None:
        """Add one more step to the normalizer."""
        if self._num_steps:
            self._velocity = self._momentum * self._velocity - self._pull * self._distance
        self._distance += self._velocity
        self._norm += abs(self._distance)
        self._num_steps += 1

    @property
    def normalizer(self) -> float:
        """The normalizer ‖a‖₁ >= 1.

        Raises:
            TaskBroken: the proximal term makes the steps diverge (ημ > 2), or there were more than 1e9 steps.
        """
        if not (math.isfinite(self._norm) and self._norm <= NORMALIZER_MAX):
            raise TaskBroken(
                f"FedNova's normalizer is {self._norm:g} after {count_of(self._num_steps, 'step')}; allowed: at most "
                f"{NORMALIZER_MAX:g} (local.lr * local.prox_mu is {self._pull:g}; above 2 it diverges)"
            )
        return self._norm

    @property
    def effective_steps(self) -> float:
        """This client's part of τ_eff: ‖a‖₁, and with a proximal term τ, as in the authors' code."""
        return float(self._num_steps) if self._pull else self.normalizer
