"""The training loss and the statistical utility of an accepted update. Pure.

    loss      sum of losses / number of examples                             statistics "loss" = (sum, number)
    utility   |B| sqrt(sum of squared losses / number of examples)           "loss_squared", when the task measures it
              |B| loss                                                       otherwise

Legend: |B|, the update's num_examples. The sums are over all examples of all steps, each before its step.

Source of the utility:
    Lai et al., "Oort: Efficient Federated Learning via Guided Participant Selection", OSDI 2021, section 4.2.
"""

import math
from collections.abc import Sequence

from atoll.server.rounds.events import Sums, Update

LOSS_MAX = 1e100
"""Bound of |loss|: a client may claim any value, and sums of them must stay finite."""


def loss_of(statistics: Sums) -> float | None:
    """Return the mean loss; None: it is missing, or not a number."""
    return _mean(statistics.get("loss", ()))


def utility_of(update: Update) -> float:
    """Return the statistical utility; 0 when the loss is missing, negative or not a number."""
    return _utility(update, loss_of(update.statistics))


def loss_and_utility(update: Update) -> tuple[float | None, float]:
    """Return both: the utility is computed from the loss."""
    loss = loss_of(update.statistics)
    return loss, _utility(update, loss)


def _utility(update: Update, loss: float | None) -> float:
    squares = update.statistics.get("loss_squared")
    squared = None if squares is None else _mean(squares)
    loss = loss if squared is None else math.sqrt(max(0.0, squared))
    return update.num_examples * max(0.0, loss or 0.0)


def _mean(sums: Sequence[float]) -> float | None:
    if len(sums) != 2:
        return None
    total, number = sums
    if not (math.isfinite(total) and 0 < number < math.inf):
        return None
    return max(-LOSS_MAX, min(total / number, LOSS_MAX))
