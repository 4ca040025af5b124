"""When each client is awake: instants of waking and falling asleep, which may repeat with a period. Pure.

A client's edges are w_0 < s_0 < w_1 < s_1 < ... < w_0 + P, and with them all edges + k P for whole k:

    awake at t    iff    w_i + k P <= t < s_i + k P    for some i and k        (k = 0 alone when P is infinite)

A client without edges is always awake. At an edge its state is the new one already, and `next_change` gives the very
floats that `is_awake` compares with: whoever goes from change to change never steps on the spot.
"""

import bisect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Awake:
    """All clients, by their place."""

    edges: Floats
    """[s], of all clients, one after the other."""
    begins: NDArray[np.int64]
    """Where the edges of each begin, and the end (clients + 1,); empty: everyone is always awake."""
    periods: Floats
    """[s] (clients,); infinite: nothing repeats."""

    @classmethod
    def always(cls) -> "Awake":
        """Nobody ever sleeps."""
        return cls(np.empty(0), np.empty(0, np.int64), np.empty(0))

    @classmethod
    def daily(cls, wakes: Floats, awake_s: float, day_s: float, sleeps: NDArray[np.bool_]) -> "Awake":
        """Each client is awake once a day, for `awake_s` < `day_s`, from its instant `wakes` (clients,) on.

        Who is not in `sleeps` (clients,) is always awake.
        """
        edges = np.stack([wakes, wakes + awake_s], axis=1)[sleeps].ravel()
        begins = np.concatenate([[0], np.cumsum(2 * sleeps.astype(np.int64))])
        return cls(edges, begins, np.full(len(wakes), day_s))

    @classmethod
    def of(cls, edges: Sequence[Sequence[float]], periods: Sequence[float]) -> "Awake":
        """From each client's own edges, as the module has them, and period."""
        begins = np.concatenate([[0], np.cumsum([len(own) for own in edges], dtype=np.int64)])
        return cls(np.fromiter((edge for own in edges for edge in own), np.float64), begins, np.array(periods))

    def is_awake(self, at: int, t: float) -> bool:
        """Whether client `at` is awake at `t` [s]."""
        edges, period = self._of(at)
        return not edges or bisect.bisect_right(_around(edges, period, t), t) % 2 == 1

    def next_change(self, at: int, t: float) -> float | None:
        """The first edge after `t` [s]; None: there is none."""
        edges, period = self._of(at)
        around = _around(edges, period, t) if edges else []
        after = bisect.bisect_right(around, t)
        return around[after] if after < len(around) else None

    def _of(self, at: int) -> tuple[list[float], float]:
        if not len(self.begins):
            return [], math.inf
        return self.edges[self.begins[at] : self.begins[at + 1]].tolist(), float(self.periods[at])


def _around(edges: list[float], period: float, t: float) -> list[float]:
    """The edges of the cycle that `t` is in, and the first of the next one; of what does not repeat all there are."""
    if math.isinf(period):
        return edges
    first, cycle = edges[0], math.floor((t - edges[0]) / period)
    while first + cycle * period > t:  # the quotient may be rounded across an edge
        cycle -= 1
    while first + (cycle + 1) * period <= t:
        cycle += 1
    return [*(edge + cycle * period for edge in edges), first + (cycle + 1) * period]


def edges_of(intervals: Sequence[tuple[float, float]], period: float) -> list[float]:
    """The edges of intervals (from, to) that are in order and do not overlap, all within 0 and the period [s].

    Those that touch are one; the last touches the first of the next period, too. No edges: never asleep.
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
