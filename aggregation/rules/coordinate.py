"""Rules for each element alone: coordinate median, trimmed mean; and the bound on an update's norm."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.rules.order_statistics import middle_mean
from atoll.aggregation.rules.rule import num_malicious
from atoll.ground.printable import count_of
from atoll.plugins.place import NOWHERE, Place


@dataclass(frozen=True, slots=True)
class Median:
    """The coordinate-wise median. It withstands any minority of updates, and loses accuracy if the sites' data differ.

        out_i = med_k u_ki        the mean of the two in the middle when K is even

    Source: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018,
    definition 1.
    """

    def reduce(self, rows: NDArray[np.float32], place: Place = NOWHERE) -> NDArray[np.float64]:
        """Return the median of each element, for any R >= 1; see `rule.Rule.reduce`."""
        return middle_mean(rows, (len(rows) - 1) // 2, len(rows) // 2 + 1)


@dataclass(frozen=True, slots=True)
class TrimmedMean:
    """The mean of each element without its f least and its f greatest values.

        out_i = 1/(K - 2f) sum_{j=f+1..K-f} u_(j)i        u_(1)i <= ... <= u_(K)i

    Args:
        malicious: f, or f/K in [0, 0.5) rounded down. Needs K > 2f.

    Source: Yin et al., "Byzantine-Robust Distributed Learning: Towards Optimal Statistical Rates", ICML 2018,
    definition 2.
    """

    malicious: int | float

    def __post_init__(self) -> None:
        num_malicious(self.malicious, 1)

    def check(self, num_updates: int) -> None:
        """Raise ValueError unless K > 2f."""
        f = num_malicious(self.malicious, num_updates)
        if num_updates <= 2 * f:
            raise ValueError(
                f"{count_of(num_updates, 'update is', 'updates are')} too few: a trimmed mean with f={f} "
                f"needs at least {2 * f + 1}"
            )

    def reduce(self, rows: NDArray[np.float32], place: Place = NOWHERE) -> NDArray[np.float64]:
        """Return the trimmed mean of each element; see `rule.Rule.reduce`."""
        self.check(len(rows))
        f = num_malicious(self.malicious, len(rows))
        return middle_mean(rows, f, len(rows) - f)


def clip_factors(norms: Sequence[float], bound: float | Literal["median"]) -> tuple[float, ...]:
    """Return for each update the factor that brings its norm within the bound.

        a_k = min(1, C / ||u_k||)        C given, or the median of the norms

    It is the one defence that works for every rule and under secure sums: it blocks updates that are scaled up. The
    norms come from the inspection (square root of its squared norms, summed over the float tensors), so that no file is
    read again.

    Args:
        norms: (K) ||u_k|| >= 0.
        bound: C > 0, or "median".

    Returns:
        K factors in [0, 1]; exactly 1 for an update within the bound.

    Raises:
        ValueError: no norms, a norm that is negative or not finite, or C is not above 0.

    Source:
        Sun et al., "Can You Really Backdoor Federated Learning?", arXiv:1911.07963 (norm thresholding).
    """
    if not norms:
        raise ValueError("no norms to bound")
    for k, norm in enumerate(norms):
        if not 0.0 <= norm < float("inf"):
            raise ValueError(f"norm {norm} of update {k} is not a finite number of at least 0")
    if bound != "median" and not bound > 0.0:
        raise ValueError(f"bound {bound} is not above 0")
    limit = statistics.median(norms) if bound == "median" else bound
    return tuple(1.0 if norm <= limit else limit / norm for norm in norms)
