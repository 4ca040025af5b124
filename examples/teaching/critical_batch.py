"""The critical batch size: where more examples in a step begin to cost more than the steps that they save.

Legend: S the steps and E = B S the examples that a training with batch B needs to its target.

    (S / S_min - 1) (E / E_min - 1) = 1,     or     S = S_min (1 + B_crit / B),    B_crit = E_min / S_min

At B_crit a training takes twice the fewest steps and twice the fewest examples.

Source: McCandlish et al., "An Empirical Model of Large-Batch Training", 2018, section 2.3, equation 2.11.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

REACH = 1000.0
"""Factor of the search for B_crit: from the smallest batch / REACH to the largest batch x REACH."""

GOLDEN = (math.sqrt(5) - 1) / 2


@dataclass(frozen=True, slots=True)
class CriticalBatch:
    """The law that a sweep of the batch size gave."""

    min_steps: float
    """S_min: steps to the target with an infinite batch."""

    min_examples: float
    """E_min: examples to the target with a batch of one."""

    @property
    def batch(self) -> float:
        """The critical batch size B_crit, in examples."""
        return self.min_examples / self.min_steps

    def steps(self, batch: float) -> float:
        """Return S, the steps to the target with this batch."""
        return self.min_steps + self.min_examples / batch

    def examples(self, batch: float) -> float:
        """Return E, the examples to the target with this batch."""
        return self.min_examples + self.min_steps * batch


def fit_critical_batch(steps: Mapping[int, float]) -> CriticalBatch:
    """Return the law with the least squares of log S from the measurements.

    For a given B_crit the best S_min is a mean of logs, so only B_crit is searched for: on a grid, then by golden
    section.

    Args:
        steps: by batch size, the steps to the target; at least three batches.

    Raises:
        ValueError: too few batches, a number that is not positive, or no bend in them: the steps fall as 1 / B
            throughout (B_crit is above all batches) or not at all (below).
    """
    if len(steps) < 3 or min(steps) <= 0 or min(steps.values()) <= 0:
        raise ValueError(f"at least three batches with positive steps are needed, got {dict(steps)}")
    batches = np.array(sorted(steps), dtype=np.float64)
    logs = np.log([steps[int(batch)] for batch in batches])

    def variance(log_critical: float) -> float:
        return float(np.var(logs - np.log1p(np.exp(log_critical) / batches)))

    low, high = math.log(batches[0] / REACH), math.log(batches[-1] * REACH)
    grid = np.linspace(low, high, 400)
    best = int(np.argmin([variance(point) for point in grid]))
    if best in (0, len(grid) - 1):
        where = "below the smallest batch" if best == 0 else "above the largest batch"
        raise ValueError(f"the steps have no bend: the critical batch is far {where}, of {dict(steps)}")
    critical = math.exp(_lowest(variance, grid[best - 1], grid[best + 1]))
    min_steps = math.exp(float(np.mean(logs - np.log1p(critical / batches))))
    return CriticalBatch(min_steps, critical * min_steps)


def _lowest(function: Any, low: float, high: float) -> float:
    """Return where the function of one number is lowest between the two, by golden section."""
    for _ in range(80):
        left, right = high - GOLDEN * (high - low), low + GOLDEN * (high - low)
        low, high = (low, right) if function(left) < function(right) else (left, high)
    return (low + high) / 2
