"""Rules on the geometry of whole updates: multi-Krum, geometric median, centred clipping; nearest-neighbour mixing.

All of them work on the K x K inner products alone: every point that they visit is a combination z = sum_k c_k u_k of
the updates, and

    ||u_k - z||^2 = g_kk - 2 (G c)_k + c^T G c

so any number of steps costs one pass over the data (`gram`), and one more for the answer. Differences of inner products
are exact to about 1e-8 of the longer vector; updates nearer to each other than that count as equal.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.rules.rule import GeometricRule, Rule, check_count, num_malicious, takes_centre
from atoll.ground.printable import count_of
from atoll.plugins.place import NOWHERE, Place

Array = NDArray[np.float64]

TINY = 2.0**-500
"""A number below any distance of float32 updates, with a finite inverse."""


def squared_distances(gram: Array) -> Array:
    """Return ||u_k - u_l||^2, (K, K) from the inner products (K, K); at least 0, and 0 on the diagonal."""
    squares = gram.diagonal()
    distances: Array = np.maximum(squares[:, np.newaxis] + squares - gram - gram.T, 0.0)
    return distances


def distances_to(gram: Array, coefficients: Array) -> Array:
    """Return ||u_k - z||, (K) distances of all updates to z = sum_k c_k u_k."""
    projections: Array = gram @ coefficients
    squares: Array = np.maximum(gram.diagonal() - 2.0 * projections + coefficients @ projections, 0.0)
    distances: Array = np.sqrt(squares)
    return distances


class _OneRow:
    """Base of rules whose `mixing` has one row: the mixed update is the result."""

    __slots__ = ()

    def reduce(self, rows: NDArray[np.float32], place: Place = NOWHERE) -> Array:
        """Return the single mixed row as the result; see `rule.Rule.reduce`."""
        row: Array = rows[0].astype(np.float64)
        return row


@dataclass(frozen=True, slots=True)
class MultiKrum(_OneRow):
    """The mean of the m updates that lie nearest to their neighbours.

        s_k = sum of the K - f - 2 least ||u_k - u_l||^2, l != k        out = mean of the m updates with the least s_k

    Equal scores go by client id. m = 1 is Krum, which loses accuracy in the absence of an attack.

    Args:
        malicious: f, or f/K in [0, 0.5) rounded down. Needs K >= 2f + 3.
        num_selected: m in 1..K - f; None: K - f, all that may be honest.

    Source: Blanchard et al., "Machine Learning with Adversaries: Byzantine Tolerant Gradient Descent", NIPS 2017.
    """

    malicious: int | float
    num_selected: int | None = None

    def __post_init__(self) -> None:
        num_malicious(self.malicious, 1)
        if self.num_selected is not None and self.num_selected < 1:
            raise ValueError(f"num_selected {self.num_selected} is not at least 1")

    def check(self, num_updates: int) -> None:
        """Raise ValueError unless K >= 2f + 3 and m <= K - f."""
        f = num_malicious(self.malicious, num_updates)
        if num_updates < 2 * f + 3:
            raise ValueError(
                f"{count_of(num_updates, 'update is', 'updates are')} too few: multi-Krum with f={f} needs "
                f"at least {2 * f + 3}"
            )
        if self.num_selected is not None and self.num_selected > num_updates - f:
            raise ValueError(f"num_selected {self.num_selected} is not in 1..{num_updates - f}, K - f of {num_updates}")

    def mixing(self, gram: Array, place: Place = NOWHERE) -> Array:
        """Return (1, K), 1/m for the selected updates; see `rule.GeometricRule.mixing`."""
        num_updates = len(gram)
        self.check(num_updates)
        f = num_malicious(self.malicious, num_updates)
        squares = squared_distances(gram)
        np.fill_diagonal(squares, np.inf)
        scores = np.sort(squares, axis=1)[:, : num_updates - f - 2].sum(axis=1)
        selected = np.argsort(scores, kind="stable")[: self.num_selected or num_updates - f]
        mixing = np.zeros((1, num_updates))
        mixing[0, selected] = 1.0 / len(selected)
        return mixing


@dataclass(frozen=True, slots=True)
class GeometricMedian(_OneRow):
    """The point with nearly the least sum of distances to the updates: robust federated averaging (RFA).

        z_0 = 0,  z_{t+1} = sum_k b_k u_k / sum_k b_k        b_k = 1 / max(v, ||u_k - z_t||)

    Smoothed Weiszfeld steps. They begin at the present global model (z_0 = 0), where the paper begins at the mean: from
    0 an update of any length loses its pull after one step, from the mean it keeps it. v is a fraction of the median
    norm, so the rule does not depend on the updates' scale.

    Args:
        num_steps: T; 3 to 8 are enough.
        smoothing: v, as a fraction of the median ||u_k||.

    Source: Pillutla et al., "Robust Aggregation for Federated Learning", arXiv:1912.13445 (smoothed Weiszfeld), without
    its weights (`rule`).
    """

    num_steps: int = 8
    smoothing: float = 1e-6

    def __post_init__(self) -> None:
        if self.num_steps < 1:
            raise ValueError(f"num_steps {self.num_steps} is not at least 1")
        if not 0.0 <= self.smoothing < 1.0:
            raise ValueError(f"smoothing {self.smoothing} is not in [0, 1)")

    def mixing(self, gram: Array, place: Place = NOWHERE) -> Array:
        """Return (1, K), the coefficients of the point; see `rule.GeometricRule.mixing`."""
        distances = np.sqrt(gram.diagonal())  # to z_0
        least = max(self.smoothing * float(np.median(distances)), TINY)
        for _ in range(self.num_steps):
            pulls = 1.0 / np.maximum(distances, least)
            coefficients = pulls / pulls.sum()
            distances = distances_to(gram, coefficients)
        mixing: Array = coefficients[np.newaxis]
        return mixing


@dataclass(frozen=True, slots=True)
class CenteredClipping(_OneRow):
    """The previous aggregate, moved by the updates' differences to it, each clipped to a radius.

        z_0 = v,  z_{t+1} = z_t + 1/K sum_k (u_k - z_t) min(1, r / ||u_k - z_t||)

    v is the previous round's aggregate: the last row and column of the Gram matrix; zeros in a first round. The rule
    gains most when the updates carry momentum over rounds.

    Args:
        radius: r > 0, about the distance of an honest update to the mean.
        num_steps: L; 1 to 3 are enough.

    Source: Karimireddy et al., "Learning from History for Byzantine Robust Optimization", ICML 2021 (iterative
    clipping).
    """

    radius: float
    num_steps: int = 1

    takes_centre = True

    def __post_init__(self) -> None:
        if not self.radius > 0.0:
            raise ValueError(f"radius {self.radius} is not above 0")
        if self.num_steps < 1:
            raise ValueError(f"num_steps {self.num_steps} is not at least 1")

    def mixing(self, gram: Array, place: Place = NOWHERE) -> Array:
        """Return (1, K + 1), the coefficients of the result; see `rule.GeometricRule.mixing`."""
        num_updates = len(gram) - 1
        coefficients = np.zeros(num_updates + 1)
        coefficients[-1] = 1.0
        for _ in range(self.num_steps):
            distances = distances_to(gram, coefficients)[:-1]
            moves = self.radius / np.maximum(distances, self.radius) / num_updates
            coefficients *= 1.0 - moves.sum()
            coefficients[:-1] += moves
        return coefficients[np.newaxis]


@dataclass(frozen=True, slots=True)
class NearestNeighbourMixing:
    """Mixing before any rule: each update becomes the mean of the K - f updates nearest to it, with itself.

    Where the sites' data differ, honest updates come closer to each other, and the rule after it loses less.

    Args:
        malicious: f, or f/K in [0, 0.5) rounded down. Needs K > 2f.
        rule: the rule after the mixing.

    Source: Allouah et al., "Fixing by Mixing: A Recipe for Optimal Byzantine ML under Heterogeneity", AISTATS 2023.
    """

    malicious: int | float
    rule: Rule

    def __post_init__(self) -> None:
        num_malicious(self.malicious, 1)

    @property
    def takes_centre(self) -> bool:
        """Whether the rule after the mixing needs a centre, which is not mixed."""
        return takes_centre(self.rule)

    def check(self, num_updates: int) -> None:
        """Raise ValueError unless K > 2f and K is enough for the rule after the mixing."""
        f = num_malicious(self.malicious, num_updates)
        if num_updates <= 2 * f:
            raise ValueError(
                f"{count_of(num_updates, 'update is', 'updates are')} too few: mixing with f={f} needs at "
                f"least {2 * f + 1}"
            )
        check_count(self.rule, num_updates)

    def mixing(self, gram: Array, place: Place = NOWHERE) -> Array:
        """Return the neighbours' means, mixed again by the next rule; see `rule.GeometricRule.mixing`."""
        num_updates = len(gram) - self.takes_centre
        self.check(num_updates)
        num_nearest = num_updates - num_malicious(self.malicious, num_updates)
        squares = squared_distances(gram[:num_updates, :num_updates])
        nearest = np.argsort(squares, axis=1, kind="stable")[:, :num_nearest]
        means = np.eye(len(gram))
        means[:num_updates] = 0.0
        np.put_along_axis(means[:num_updates], nearest, 1.0 / num_nearest, axis=1)
        if not isinstance(self.rule, GeometricRule):
            return means
        return self.rule.mixing(means @ gram @ means.T, place) @ means

    def reduce(self, rows: NDArray[np.float32], place: Place = NOWHERE) -> Array:
        """Reduce as the rule after the mixing; see `rule.Rule.reduce`."""
        return self.rule.reduce(rows, place)
