"""The troubles of a drill: what a line does to its bytes, and when a line is cut or a process is killed. Pure.

All draws follow from a seed, so that a drill that has found a fault can be run again:

    delay of a block     latency + jitter u                   u uniform in [0, 1)
    instants             at steps of every (1/2 + u)          so their mean distance is `every`
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True, kw_only=True)
class Troubles:
    """What a line does to the bytes that pass through it.

    Attributes:
        latency_s: delay of each block in each direction [s].
        jitter_s: largest further delay of a block [s]; blocks stay in order.
        rate: bytes a second in each direction, shared by all connections; 0: no limit.
        cut_every_s: mean time between two cuts of all open connections [s]; 0: none.
        half_open: share of the cuts after which both ends still take the connections for open.
        seed: of all draws.
    """

    latency_s: float = 0.0
    jitter_s: float = 0.0
    rate: float = 0.0
    cut_every_s: float = 0.0
    half_open: float = 0.0
    seed: int = 0

    def faults(self) -> list[str]:
        """Return what is wrong, a sentence for each value."""
        found = [
            f"{name} = {value:g}: allowed: 0 or more, and finite"
            for name, value in (
                ("latency", self.latency_s),
                ("jitter", self.jitter_s),
                ("rate", self.rate),
                ("cut-every", self.cut_every_s),
            )
            if not 0 <= value < math.inf
        ]
        if not 0 <= self.half_open <= 1:
            found.append(f"half-open = {self.half_open:g}: allowed: a share of the cuts, 0 to 1")
        elif self.half_open and self.cut_every_s == 0:
            found.append(f"half-open = {self.half_open:g} is a share of the cuts, and there are none: add --cut-every")
        return found

    def delays(self, connection: int, way: str) -> Iterator[float]:
        """Yield the delays of the blocks of a connection in one direction [s]."""
        draw = random.Random(f"{self.seed}/delay/{connection}/{way}")
        while True:
            yield self.latency_s + self.jitter_s * draw.random()

    def cuts(self) -> Iterator["Cut"]:
        """Yield the cuts in order; without `cut_every_s` there is none."""
        draw = random.Random(f"{self.seed}/half open")
        if self.cut_every_s:
            for wait_s in waits(self.cut_every_s, self.seed):
                yield Cut(wait_s, draw.random() < self.half_open)


class Cut(NamedTuple):
    """A cut of all connections of a line."""

    wait_s: float
    """Time after the cut before it [s]."""
    is_half_open: bool
    """Whether both ends still take the connections for open, and nothing passes any more."""


def waits(every_s: float, seed: int, for_s: float = math.inf) -> Iterator[float]:
    """Yield the times from one instant to the next [s], until they sum up to more than `for_s`."""
    draw, total = random.Random(f"{seed}/instants"), 0.0
    while (total := total + (wait_s := every_s * (0.5 + draw.random()))) <= for_s:
        yield wait_s
