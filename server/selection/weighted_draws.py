"""Draws without replacement as a race: everyone has a key, and the smallest keys win. Pure.

Of `Random` only `random` is used: Python promises that it never changes.
"""

import heapq
import math
import random
from collections.abc import Iterable, Sequence
from typing import TypeVar

Who = TypeVar("Who")
"""Whoever takes part; of equal keys, which chance gives almost never, the lesser wins."""


def smallest(count: int, keys: Sequence[float], who: Sequence[Who]) -> list[Who]:
    """Those with the `count` smallest keys, the smallest first. Of a million, only those few are looked at."""
    last = max(heapq.nsmallest(count, keys), default=-math.inf)
    ahead = [(key, who[at]) for at, key in enumerate(keys) if key <= last]
    return [winner for _, winner in sorted(ahead)[:count]]


def evenly(count: int, who: Sequence[Who], rng: random.Random) -> list[Who]:
    """Draw without replacement; every set of `count` is equally likely."""
    return smallest(count, [rng.random() for _ in range(len(who))], who)


def in_proportion(count: int, weights: Iterable[float], who: Sequence[Who], rng: random.Random) -> list[Who]:
    """Draw one after another without replacement, each time with probability proportional to the weights (> 0).

    Exponential keys: k has the key E_k / w_k with E_k ~ Exp(1). The first of independent exponentials with rates w_k is
    k with probability w_k / sum(w), and what remains is again such a race.

    Source:
        Efraimidis, Spirakis, "Weighted random sampling with a reservoir", Information Processing Letters 97 (2006),
        algorithm A: the largest u ** (1 / w) are the smallest -log(u) / w, which cannot underflow.
    """
    return smallest(count, [-math.log(1.0 - rng.random()) / weight for weight in weights], who)
