"""A sampler for cyclic training: one client after the other, those first that were chosen least often."""

from collections.abc import Sequence
from typing import Any


def in_turn(candidates: Sequence[Any], count: int, rng: object) -> list[str]:
    """Return the clients that were chosen least often; equal ones in the order of their names."""
    ordered = sorted(candidates, key=lambda candidate: (candidate.times_chosen, candidate.client_id))
    return [candidate.client_id for candidate in ordered[:count]]
