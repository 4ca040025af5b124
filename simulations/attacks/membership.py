"""Inference of membership from one update: which examples a client has trained on, by their gradients.

    score(x) = cos(u, -dL(x)/dw)        larger for the examples of which the update u is made (Nasr et al. 2019)

The adversary has the model, a client's update and candidate examples, and needs no other update.
"""

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


def scores(update: Values, gradients: Values) -> Values:
    """Return the score of each candidate.

    Args:
        update: all values of the update, or of what is taken for it (d,).
        gradients: of the loss of each candidate at the model that the client trained from (n, d).
    """
    lengths = np.linalg.norm(gradients, axis=1) * np.linalg.norm(update)
    found: Values = -(gradients @ update) / np.maximum(lengths, np.finfo(np.float64).tiny)
    return found


def auc(members: Values, others: Values) -> float:
    """Return the area under the ROC curve: how often a member's score is above another's; 0.5 is guessing."""
    above = members[:, None] - others[None]
    return float((above > 0).mean() + 0.5 * (above == 0).mean())
