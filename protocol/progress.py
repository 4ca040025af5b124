"""The progress of a copy, as a function that its caller passes in."""

from collections.abc import Callable

OnBytes = Callable[[int, int], None]
"""(bytes since the last call, bytes in all)."""


def not_told(more: int, total: int) -> None:
    """Tell nothing of a copy's progress."""
