"""The availability of each client: the times at which it wakes and falls asleep, which may repeat. Pure.

A client's edges are w_0 < s_0 < w_1 < s_1 < ... < w_0 + P, with period P, and all edges + k P for whole k:

    awake at t    iff    w_i + k P <= t < s_i + k P    for some i and k        (k = 0 alone if P is infinite)

A client without edges is always awake. At an edge the new state already holds, and `next_change` returns exactly the
floats with which `is_awake` compares, so that a loop from change to change always advances.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Availability:
    """Edges of all clients; a client is named by its index."""

    edges: Floats
    """Edges [s] of all clients, one client after the other."""
    begins: NDArray[np.int64]
    """Offsets of each client's edges, and their end (clients + 1,); empty: all clients are always awake."""
    periods: Floats
    """Periods [s] (clients,); infinite: the edges do not repeat."""

    @classmethod
    def always(cls) -> "Availability":
        """Return an availability under which all clients are always awake."""
        return cls(np.empty(0), np.empty(0, np.int64), np.empty(0))

    @classmethod
    def daily(cls, wakes: Floats, awake_s: float, day_s: float, sleeps: NDArray[np.bool_]) -> "Availability":
        """Return an availability of `awake_s` < `day_s` once a day, from each client's time `wakes` (clients,) on.

        A client that is not in the mask `sleeps` (clients,) is always awake.
        """
        edges = np.stack([wakes, wakes + awake_s], axis=1)[sleeps].ravel()
        begins = np.concatenate([[0], np.cumsum(2 * sleeps.astype(np.int64))])
        return cls(edges, begins, np.full(len(wakes), day_s))

    @classmethod
    def of(cls, edges: Sequence[Sequence[float]], periods: Sequence[float]) -> "Availability":
        """Return the availability by each client's edges, in the form of the module, and period."""
        begins = np.concatenate([[0], np.cumsum([len(each) for each in edges], dtype=np.int64)])
        return cls(np.fromiter((edge for each in edges for edge in each), np.float64), begins, np.array(periods))

    def is_awake(self, at: int, t: float) -> bool:
        """Return whether the client at index `at` is awake at `t` [s]."""
        edges, period = self._of(at)
        return not edges or bisect.bisect_right(_around(edges, period, t), t) % 2 == 1

    def next_change(self, at: int, t: float) -> float | None:
        """Return the first edge after `t` [s]; None: there is none."""
        edges, period = self._of(at)
        around = _around(edges, period, t) if edges else []
        after = bisect.bisect_right(around, t)
        return around[after] if after < len(around) else None

    def _of(self, at: int) -> tuple[list[float], float]:
        if not len(self.begins):
            return [], math.inf
        return self.edges[self.begins[at] : self.begins[at + 1]].tolist(), float(self.periods[at])


def _around(edges: list[float], period: float, t: float) -> list[float]:
    """Return the edges of the cycle that contains `t` and the first edge of the next; all edges if none repeats."""
    if math.isinf(period):
        return edges
    first, cycle = edges[0], math.floor((t - edges[0]) / period)
    while first + cycle * period > t:  # rounding may move the quotient across an edge
        cycle -= 1
    while first + (cycle + 1) * period <= t:
        cycle += 1
    return [*(edge + cycle * period for edge in edges), first + (cycle + 1) * period]


def edges_of(intervals: Sequence[tuple[float, float]], period: float) -> list[float]:
    """Return the edges of ordered, disjoint intervals (from, to), all within 0 and the period [s].

    Intervals that touch are joined, the last with the first of the next period, too. Empty: always awake.
    """
    joined: list[tuple[float, float]] = []
    for begin, end in intervals:
        if joined and joined[-1][1] == begin:
            joined[-1] = (joined[-1][0], end)
        else:
            joined.append((begin, end))
    if joined[0][0] == 0 and joined[-1][1] == period:
        (_, end), *joined = joined
        if not joined:
            return []
        joined[-1] = (joined[-1][0], period + end)
    return [edge for interval in joined for edge in interval]
