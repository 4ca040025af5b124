"""FedExP: the server's step is longer the less the clients' updates agree.

    x <- x + η sum_k p_k u_k,      η = max(1, sum_k p_k |u_k|² / (2 (|sum_k p_k u_k|² + ε)))

Source: Jhunjhunwala et al., "FedExP: Speeding Up Federated Averaging via Extrapolation", ICLR 2023, equation 7, with
p_k = 1/M.
"""

import numpy as np
from digit_sites import task_of


class FedExP:
    """The server, whose step is extrapolated."""

    def __init__(self, epsilon: float = 1e-3) -> None:
        self.epsilon = epsilon

    def prepare(self, gram, place):
        """Return η, from the inner products of the updates."""
        shares = np.array(place.shares)
        return max(1.0, shares @ np.diag(gram) / (2 * (shares @ gram @ shares + self.epsilon)))

    def apply(self, master, mean, state, place):
        return master + place.prepared * mean


task = task_of()
