"""Draws without replacement as a race: everyone has a key, and the smallest keys win. Pure.

Of `Random` only `random` is used: Python promises that it never changes.
"""

import heapq
import math
import random
from collections.abc import Iterable, Sequence
from typing import TypeVar

from atoll.protocol.vocabulary import ClientId

Name = TypeVar("Name", bound=str)


def smallest(count: int, keys: Iterable[float], names: Iterable[Name]) -> list[Name]:
    """The names with the `count` smallest keys, the smallest first; of equal keys the lesser name."""
    return [name for _, name in heapq.nsmallest(count, zip(keys, names, strict=True))]


def in_proportion(
    count: int, weights: Iterable[float], names: Sequence[ClientId], rng: random.Random
) -> list[ClientId]:
    """Draw one after another without replacement, each time with probability proportional to the weights (> 0).

    Exponential keys: k has the key E_k / w_k with E_k ~ Exp(1). The first of independent exponentials with rates w_k is
    k with probability w_k / sum(w), and what remains is again such a race.

    Source:
        Efraimidis, Spirakis, "Weighted random sampling with a reservoir", Information Processing Letters 97 (2006),
        algorithm A: the largest u ** (1 / w) are the smallest -log(u) / w, which cannot underflow.
    """
    keys = [-math.log(1.0 - rng.random()) / weight for weight in weights]
    return smallest(count, keys, names)
