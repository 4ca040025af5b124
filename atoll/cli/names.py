"""The refusal of a name that is unknown, with the known name that is nearest to it."""

from collections.abc import Iterable
from difflib import get_close_matches

NAMES_MAX = 20
"""Most known names that a refusal lists."""


def instead_of(name: str, known: Iterable[str]) -> str:
    """Return the way out of a mistyped name: `did you mean north? (known: north, south)`."""
    names = sorted(set(known))
    near = get_close_matches(name, names)
    listed = ", ".join(names[:NAMES_MAX]) or "none"
    more = f" and {len(names) - NAMES_MAX} more" if len(names) > NAMES_MAX else ""
    return (f"did you mean {' or '.join(near)}? " if near else "") + f"(known: {listed}{more})"
