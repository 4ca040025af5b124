"""The part of a task's model that travels."""

from collections.abc import Iterator

ALL, TRAINED = "all", "trained"


def travelling_faults(travels: object) -> Iterator[str]:
    """Yield the faults of `Task.travels`."""
    if travels not in (ALL, TRAINED):
        yield f'travels must be "{ALL}" or "{TRAINED}", got {travels!r}'
