"""Agreement on local work: if one rank fails, all raise."""

from collections.abc import Callable
from typing import TypeVar

from atoll.parallel.checkpoint.ranks import Ranks
from atoll.task.errors import NotFinite, OutOfTime, TaskBroken, TaskMismatch

T = TypeVar("T")

KINDS: dict[str, type[Exception]] = {
    kind.__name__: kind for kind in (TaskBroken, TaskMismatch, NotFinite, OutOfTime, OSError)
}
"""The errors that keep their kind on the other ranks."""


class RankFailed(RuntimeError):
    """Another rank has failed; the message is its error's."""


def together(ranks: Ranks, work: Callable[[], T]) -> T:
    """Return the result of this rank's work; every rank must call it.

    Raises:
        Exception: the error of this rank.
        TaskBroken, TaskMismatch, NotFinite, OutOfTime, OSError, RankFailed: the error of the first failed rank.
    """
    fault: Exception | None = None
    results: list[T] = []
    try:
        results.append(work())
    except Exception as error:
        fault = error
    mine = None if fault is None else [_kind(fault), getattr(fault, "errno", None), str(fault)]
    found = ranks.gather(mine)
    if fault is not None:
        raise fault
    for rank, of_rank in enumerate(found):
        if of_rank is not None:
            kind, errno, text = of_rank
            if kind == "OSError" and errno is not None:
                raise OSError(errno, text)
            raise KINDS.get(kind, RankFailed)(text if kind in KINDS else f"rank {rank}: {text}")
    return results[0]


def _kind(fault: Exception) -> str:
    return next((name for name, kind in KINDS.items() if isinstance(fault, kind)), type(fault).__name__)
