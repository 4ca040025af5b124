"""The numbers among a run's terms of privacy, as a site's policy reads them."""

from collections.abc import Mapping
from typing import Any

from atoll.task.given import PRIVACY

NORM_MIN, NORM_MAX = 1e-9, 1e9
"""Ends of the clip norms, and of the divisors of a step."""


def number_of(terms: Mapping[str, Any], name: str, least: float, most: float) -> float:
    """Return a number of a run's terms.

    Args:
        terms: the values by the names of the settings in `[privacy]`.
        name: the name of the number.
        least: the least that is allowed.
        most: the most that is allowed.

    Raises:
        ValueError: it is none; the message follows the words "a training".
    """
    found: Any = terms.get(name)
    is_number = isinstance(found, int | float) and not isinstance(found, bool)
    if not is_number or not least <= found <= most:  # NaN is not
        what = "without" if found is None else f"with {found!r} as"
        raise ValueError(f"{what} {PRIVACY}{name}: allowed is a number in {least:g}..{most:g}")
    return float(found)
