"""The algorithms in which the client takes part, and what each of them demands of a client's training."""

from collections.abc import Iterator

from atoll.parallel.task.errors import TaskBroken
from atoll.parallel.task.local import Local

ALGORITHMS = ("fedavg", "fednova", "scaffold")
"""By the name that an invitation uses. Of "fedavg" the client need not know; FedSGD and FedProx are settings of
`Local`."""


def check_algorithm(algorithm: str, local: Local | None, *, has_fit: bool = False) -> None:
    """Insist that an algorithm can be carried out with a task's own training.

    Args:
        algorithm: as the run has it.
        local: the training of one round; None for a task that trains by itself (an `ArrayTask`).
        has_fit: whether the task has a `fit` in place of the built-in loop.

    Raises:
        TaskBroken: it cannot; with every reason.
    """
    faults = list(_faults(algorithm, local, has_fit))
    if faults:
        raise TaskBroken(f"algorithm {algorithm!r} cannot be used here: {'; '.join(faults)}")


def _faults(algorithm: str, local: Local | None, has_fit: bool) -> Iterator[str]:
    if algorithm not in ALGORITHMS:
        yield f"this version of Atoll knows {', '.join(ALGORITHMS)}"
    elif algorithm != "fedavg":
        if local is None or has_fit:
            kind = "a `fit` of its own" if has_fit else "a training of its own (an ArrayTask)"
            yield f"it needs the built-in training loop, and the task has {kind}"
        if local is not None:
            yield from (
                f"local.{name} must be {needed!r} ({reason}), got {getattr(local, name)!r}"
                for name, needed, reason in _NEEDED[algorithm]
                if getattr(local, name) != needed
            )


_PLAIN = "the control variate is what all steps moved over their number: each must be lr times the gradient"

_NEEDED: dict[str, list[tuple[str, object, str]]] = {
    "fednova": [("optimizer", "sgd", "the normalizer counts its steps")],
    "scaffold": [
        ("optimizer", "sgd", _PLAIN),
        ("momentum", 0.0, _PLAIN),
        ("weight_decay", 0.0, _PLAIN),
        ("clip_norm", None, _PLAIN),
        ("prox_mu", 0.0, _PLAIN),
    ],
}
"""Of each algorithm: the field of `Local`, its only value, and why."""
