"""The progress of a copy, as a function that its caller passes in."""

from collections.abc import Callable

OnBytes = Callable[[int, int], None]
"""Function of (bytes since the last call, bytes in total)."""


def not_told(more: int, total: int) -> None:
    """Report no progress."""
