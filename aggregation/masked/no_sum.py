"""Error of a fold in which no secure sum counts."""

from collections.abc import Mapping

__all__ = ["NoSum"]


class NoSum(ValueError):
    """Sessions of which none counts; `dropped` has the reasons."""

    def __init__(self, dropped: Mapping[int, str]) -> None:
        reasons = "; ".join(f"session {number}: {reason}" for number, reason in sorted(dropped.items()))
        super().__init__(f"no secure sum of the round counts: {reasons}")
        self.dropped = dict(dropped)
