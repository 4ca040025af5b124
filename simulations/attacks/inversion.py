"""Inversion of one update: inputs that a client has trained on, from the change of its model's first linear layer.

    dL/dW_i = (dL/db_i) x        of one example, so that x = dW_i / db_i of any unit i (Geiping et al. 2020, section 3)

Of more examples each unit gives a mean of those that activate it, weighted by their errors. The attack needs a single
client's update and no optimization; it is what a coordinator can do with every plain update that it receives.
"""

import numpy as np
from numpy.typing import NDArray

Values = NDArray[np.float64]


def inverted(weight: Values, bias: Values, low: float, high: float) -> Values:
    """Return the input that each unit of the first layer gives; units whose bias did not change give none.

    Args:
        weight: change of the layer's weights (units, inputs), or of what is taken for it.
        bias: change of its biases (units,).
        low: smallest value of an input, to which the result is limited.
        high: largest value of an input.
    """
    is_changed = bias != 0
    found: Values = np.clip(weight[is_changed] / bias[is_changed, None], low, high)
    return found


def distance(guesses: Values, inputs: Values) -> float:
    """Return the mean squared distance between the best of some guesses (g, d) and the input (n, d) closest to it."""
    if not len(guesses):
        return float("inf")
    return float(np.square(guesses[:, None] - inputs[None]).mean(axis=2).min())
