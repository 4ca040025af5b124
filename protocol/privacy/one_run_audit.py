r"""The lower bound of epsilon from one run with canaries (Steinke, Nasr, Jagielski 2023, arXiv 2305.08846).

Each of m canaries takes part in a run with probability 1/2, independently. From what the run released an adversary
guesses of r of them whether they took part. If the run is (epsilon, delta)-private, then by theorem 5.2

    P[v or more guesses are right] <= beta + 2 m delta alpha
    W ~ Binomial(r, e^epsilon / (1 + e^epsilon)),  beta = P[W >= v],  alpha = max_i P[v - i <= W < v] / i

An epsilon at which this is below the error rate is refuted: the least one that is not is a lower bound.

Guesses are the k canaries with the largest scores, which are guessed to have taken part, and the k with the smallest,
which are guessed to have not. The best of several numbers k and of several scores counts, so each of them has a part of
the error rate (a union bound).
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

ERROR_RATE = 0.05
"""Probability with which a lower bound may be above the truth."""

NEARLY_ALL = 0.45
"""Share of the canaries of each kind: more than the actual number of them would make guesses wrong."""
Guessed = tuple[tuple[float, float], ...]
"""Numbers k, in canaries, each with its part of the error rate."""

SURE: Guessed = ((NEARLY_ALL, 0.05),)
"""For a score that tells everything if a fault is there, and little else: a small part of the error rate is enough."""
GUESSED: Guessed = ((1 / 50, 0.6), (1 / 8, 0.3), *SURE)

EPSILON_MAX = 30.0
_HALVINGS = 40


@dataclass(frozen=True, slots=True)
class Score:
    """The score of each canary, larger where it is more likely in.

    Attributes:
        name: what it is, in words.
        values: one of each canary.
        guessed: numbers k that are tried.
    """

    name: str
    values: Sequence[float]
    guessed: Guessed = GUESSED


@dataclass(frozen=True, slots=True)
class Found:
    """The best guesses of an adversary.

    Attributes:
        bound: lower bound of epsilon.
        score: name of the score.
        guesses: number of guesses r.
        right: number of right guesses v.
    """

    bound: float
    score: str
    guesses: int
    right: int


def p_value(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return the bound of the probability of at least `right` right guesses in an (epsilon, delta)-private run.

    Args:
        canaries: m, each in with probability 1/2.
        guesses: r, at most m.
        right: v, at most r.
        epsilon: at least 0.
        delta: at least 0.
    """
    probabilities = _binomial(guesses, epsilon)
    beta, below, alpha = math.fsum(probabilities[right:]), 0.0, 0.0
    for i in range(1, right + 1):
        below += probabilities[right - i]
        alpha = max(alpha, below / i)
    return min(1.0, beta + 2.0 * canaries * delta * alpha)


def lower_bound(canaries: int, guesses: int, right: int, delta: float, error_rate: float = ERROR_RATE) -> float:
    """Return the largest epsilon that the right guesses refute, rounded down; 0: they refute none.

    Args:
        canaries: m, each in with probability 1/2.
        guesses: r, at most m.
        right: v, at most r.
        delta: of the claim.
        error_rate: probability with which the bound may be above the truth.
    """
    low, high = 0.0, EPSILON_MAX
    if p_value(canaries, guesses, right, low, delta) > error_rate:
        return 0.0
    for _ in range(_HALVINGS):
        middle = (low + high) / 2.0
        if p_value(canaries, guesses, right, middle, delta) < error_rate:
            low = middle
        else:
            high = middle
    return low


def best_of(scores: Sequence[Score], is_in: Sequence[bool], delta: float) -> Found:
    """Return the best lower bound of some scores.

    Args:
        scores: of the same canaries.
        is_in: whether each canary took part.
        delta: of the claim.
    """
    canaries, found = len(is_in), []
    for score, count, error_rate in _tries(scores, canaries):
        order = sorted(range(canaries), key=score.values.__getitem__)
        right = sum(not is_in[i] for i in order[:count]) + sum(is_in[i] for i in order[-count:])
        bound = lower_bound(canaries, 2 * count, right, delta, error_rate)
        found.append(Found(bound, score.name, 2 * count, right))
    return max(found, key=lambda each: each.bound)


def bound_max(scores: Sequence[Score], canaries: int, delta: float) -> float:
    """Return the lower bound if every guess is right: no audit with this number of canaries finds more."""
    tries = _tries(scores, canaries)
    return max(lower_bound(canaries, 2 * count, 2 * count, delta, error_rate) for _, count, error_rate in tries)


def _tries(scores: Sequence[Score], canaries: int) -> Iterator[tuple[Score, int, float]]:
    """Yield each score with a number k and its error rate; the error rates add up to `ERROR_RATE`."""
    whole = math.fsum(part for score in scores for _, part in score.guessed)
    for score in scores:
        for share, part in score.guessed:
            yield score, max(1, int(share * canaries)), ERROR_RATE * part / whole


def _binomial(number: int, epsilon: float) -> list[float]:
    """Return the probabilities of 0 .. number successes, each of probability e^epsilon / (1 + e^epsilon)."""
    log_success = -math.log1p(math.exp(-epsilon))
    log_failure = log_success - epsilon
    of_all = math.lgamma(number + 1)
    return [
        math.exp(
            of_all - math.lgamma(k + 1) - math.lgamma(number - k + 1) + k * log_success + (number - k) * log_failure
        )
        for k in range(number + 1)
    ]
