"""Exponential back-off with jitter: the delay before the next attempt; errors that pass by themselves. Pure."""

import random

DOUBLINGS_MAX = 30
"""Number of doublings after which a delay without a high bound stops growing: a higher power might overflow."""


class Temporary(Exception):
    """Error that passes by itself: the same operation succeeds later."""


def delay(attempt: int, low: float, high: float, rng: random.Random) -> float:
    """Return the seconds to wait before the next attempt.

        delay = u min(high, low 2^attempt),    u uniform in [1/2, 1)

    The jitter u spreads out the clients that lost the same coordinator at the same instant: they do not return in step.

    Args:
        attempt: the number of attempts that have failed since the last success, from 0.
        low: the first delay [s], before the jitter.
        high: the longest delay [s], before the jitter.
        rng: the source of u.

    Source: Brooker, "Exponential Backoff And Jitter", AWS Architecture Blog 2015 ("equal jitter").
    """
    return min(high, low * 2.0 ** min(attempt, DOUBLINGS_MAX)) * rng.uniform(0.5, 1.0)
