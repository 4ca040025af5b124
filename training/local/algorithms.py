"""The algorithms with a client's part, and the requirements of each on a client's training."""

from collections.abc import Iterator

from atoll.task.errors import TaskBroken
from atoll.task.local import Local, optimizer_factory
from atoll.task.task import Task

CONCATENATE = "concatenate"
"""The algorithm whose updates are no differences, but rows that the client appends to each tensor."""

ALGORITHMS = ("fedavg", "fednova", "scaffold", CONCATENATE)
"""The algorithms by their names in an invitation. "fedavg" has no requirements; FedSGD and FedProx are settings of
`Local`."""


def check_algorithm(algorithm: str, local: Local | None, *, has_fit: bool = False, has_own: bool = False) -> None:
    """Check that a task's training fits an algorithm.

    Args:
        algorithm: the run's algorithm.
        local: the training of one round; None for a task that trains by itself (an `ArrayTask`).
        has_fit: the task has a `fit` in place of the built-in loop.
        has_own: the task has a custom algorithm.

    Raises:
        TaskBroken: it does not fit; the message lists every reason.
    """
    faults = list(_faults(algorithm, local, has_fit, has_own))
    if faults:
        raise TaskBroken(f"algorithm {algorithm!r} cannot be used here: {'; '.join(faults)}")


def check_training(task: Task, algorithm: str, local: Local) -> None:
    """Check that the training of a `Task` fits an algorithm, and that its optimizer loads.

    Errors: `check_algorithm` and `optimizer_factory`.
    """
    check_algorithm(algorithm, local, has_fit=task.fit is not None, has_own=task.algorithm is not None)
    if local.has_custom_optimizer:
        optimizer_factory(local)


def _faults(algorithm: str, local: Local | None, has_fit: bool, has_own: bool) -> Iterator[str]:
    if algorithm not in ALGORITHMS:
        yield f"this version of Atoll supports {', '.join(ALGORITHMS)}"
    elif algorithm == CONCATENATE:
        if local is not None or has_fit:
            yield "the tensors of a PyTorch model have fixed shapes: write an ArrayTask, whose arrays may grow"
    elif algorithm == "fedavg":
        if local is not None and local.keep_optimizer and (has_own or has_fit):
            yield "local.keep_optimizer must be False: the task's code decides about its state"
    else:
        if has_own:
            yield "the task has a custom algorithm, so the run must name fedavg"
        if local is None or has_fit:
            kind = "a custom `fit`" if has_fit else "a custom training (an ArrayTask)"
            yield f"it needs the built-in training loop, and the task has {kind}"
        if local is not None:
            yield from (
                f"local.{name} must be {needed!r} ({reason}), got {_shown(local, name)!r}"
                for name, needed, reason in _NEEDED[algorithm]
                if getattr(local, name) != needed
            )


def _shown(local: Local, name: str) -> object:
    return local.optimizer_name if name == "optimizer" else getattr(local, name)


_PLAIN = "the control variate is the mean of the steps' gradients: each step must be lr times its gradient"

_NEEDED: dict[str, list[tuple[str, object, str]]] = {
    "fednova": [
        ("optimizer", "sgd", "the normalizer counts its steps"),
        ("keep_optimizer", False, "the normalizer counts from the first step of a momentum"),
    ],
    "scaffold": [
        ("optimizer", "sgd", _PLAIN),
        ("momentum", 0.0, _PLAIN),
        ("weight_decay", 0.0, _PLAIN),
        ("clip_norm", None, _PLAIN),
        ("prox_mu", 0.0, _PLAIN),
        ("keep_optimizer", False, _PLAIN),
    ],
}
"""The fields of `Local` with a required value, by algorithm, with the value and the reason."""
