"""Draws without replacement by random keys: the participants with the smallest keys win. Pure.

Of `Random` only the method `random` is used: Python guarantees that its sequence never changes.
"""

import heapq
import math
import random
from collections.abc import Iterable, Sequence
from typing import TypeVar

Item = TypeVar("Item")
"""Participant of a draw; among equal keys, which are very improbable, the lesser item wins."""


def smallest(count: int, keys: Sequence[float], items: Sequence[Item]) -> list[Item]:
    """Return the items with the `count` smallest keys, the smallest first; only these few are sorted."""
    last = max(heapq.nsmallest(count, keys), default=-math.inf)
    ahead = [(key, items[at]) for at, key in enumerate(keys) if key <= last]
    return [winner for _, winner in sorted(ahead)[:count]]


def evenly(count: int, items: Sequence[Item], rng: random.Random) -> list[Item]:
    """Draw without replacement; every set of `count` items is equally likely."""
    return smallest(count, [rng.random() for _ in range(len(items))], items)


def in_proportion(count: int, weights: Iterable[float], items: Sequence[Item], rng: random.Random) -> list[Item]:
    """Draw one after another without replacement, each time with probability proportional to the weights (> 0).

    Exponential keys: item k has the key E_k / w_k with E_k ~ Exp(1). The first of independent exponentials with rates
    w_k is k with probability w_k / sum(w), and the remaining items are again such a race.

    Source:
        Efraimidis, Spirakis, "Weighted random sampling with a reservoir", Information Processing Letters 97 (2006),
        algorithm A: the largest u ** (1 / w) are the smallest -log(u) / w, which cannot underflow.
    """
    return smallest(count, [-math.log(1.0 - rng.random()) / weight for weight in weights], items)
