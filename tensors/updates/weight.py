"""The weight that an update claims: its range, in which ratios are exact, and its form on the wire."""

import math

WEIGHT_MIN, WEIGHT_MAX = 1e-30, 1 << 53
"""The least and the largest weight; float64 holds every integer up to 2^53 exactly."""

WEIGHT_RANGE = f"{WEIGHT_MIN:g}..{WEIGHT_MAX}"
"""The range in a message."""


def as_weight(number: float) -> int | float:
    """Return a weight in its form on the wire: a whole number as int, a fraction as float64.

    Raises:
        ValueError: it is out of the range.
    """
    if not (math.isfinite(number) and WEIGHT_MIN <= number <= WEIGHT_MAX):
        raise ValueError(f"a weight must be in {WEIGHT_RANGE}, got {number:g}")
    return int(number) if number == int(number) else float(number)
