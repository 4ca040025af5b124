"""Checks that a task is deterministic: the same seed gives the same model and the same update of a client.

Without this, a simulation cannot be repeated.
"""

from collections.abc import Callable, Sequence

import numpy as np

from atoll.simulations.engines.engine import Engine, Failed, Job, Trained, Training
from atoll.task.arrays import Arrays
from atoll.task.context import context_of, within
from atoll.task.errors import TaskBroken
from atoll.task.metrics import Statistics
from atoll.task.task import Task
from atoll.training.model.parameters import initial_parameters

CLIENTS = 2
"""Number of clients that the check trains twice."""

STEPS = 3
"""Largest number of local steps of each training in the check."""

TRAINED_TWICE = (
    "two trainings of client {} with the same seed differ in {}. Look for a generator that the seed "
    "does not set, for state that one training leaves to the next, and for operations that "
    "torch.use_deterministic_algorithms warns of; on a GPU, torch.use_deterministic_algorithms(True) in the task's "
    "file replaces those that torch can replace"
)
READ_TWICE = (
    "the update of client {} changes when its data are read again: it differs in {}. "
    "task.data must return the same examples of a site, in the same order, at every call, and the loss must not hold a "
    "parameter of one model: a simulation makes several"
)
MEASURED_TWICE = (
    "two evaluations of client {} differ in {}. Look for state that a forward pass leaves on the model or on the loss, "
    "and for a generator that the seed does not set"
)
BUILT_TWICE = (
    "{} made twice from the same seed differs in {}. The generators of Python, numpy and torch are seeded: draw from "
    "them, or from a generator that your code seeds"
)


class NotDeterministic(TaskBroken):
    """Error: a result differs between two computations; the message says where, and what to look for."""


def check_model(training: Training) -> None:
    """Check that the initial model is the same when it is made twice.

    Raises:
        NotDeterministic: the models differ.
    """
    task, seed = training.task, training.model_seed
    with within(context_of(task, seed=seed)):
        first, second = (
            initial_parameters(task, seed) if isinstance(task, Task) else task.initial(seed) for _ in range(2)
        )
    _compare("the model", first, second, BUILT_TWICE)


def check_deterministic(make: Callable[[], Engine], version: Arrays, client_ids: Sequence[str]) -> None:
    """Train the first few clients twice, a few steps of each, and once more with their data read again.

    Args:
        make: makes an engine; ideally sequential, so that the second training follows the first in one process.
        version: the version that the clients train from.
        client_ids: the clients of the run.

    Raises:
        NotDeterministic: two updates differ.
        ClientFailed: the task's code failed.
    """
    jobs = [Job(client_id, seed=number, steps=STEPS) for number, client_id in enumerate(client_ids[:CLIENTS])]
    engine = make()
    first, second, anew = ([_arrays(result) for result in one.train(version, jobs)] for one in (engine, engine, make()))
    for others, message in ((second, TRAINED_TWICE), (anew, READ_TWICE)):
        for job, before, after in zip(jobs, first, others, strict=True):
            _compare(job.client_id, before, after, message)


def check_evaluation(engine: Engine, version: Arrays, client_ids: Sequence[str], seed: int) -> None:
    """Evaluate the first few clients twice, as all clients share one model.

    Args:
        engine: measures one client after another.
        version: the version that the clients measure.
        client_ids: the clients of the run.
        seed: the seed of the run's model.

    Raises:
        NotDeterministic: two evaluations differ.
        ClientFailed: the task's code failed.
    """
    jobs = [Job(client_id, seed) for client_id in client_ids[:CLIENTS]]
    for job, *both in zip(jobs, engine.evaluate(version, jobs), engine.evaluate(version, jobs), strict=True):
        first, second = ({} if isinstance(found, str) else _as_arrays(found) for found in both)
        if first or second:
            _compare(job.client_id, first, second, MEASURED_TWICE)


def _as_arrays(sums: Statistics) -> Arrays:
    return {f"the sums of {name!r}": np.array(numbers) for name, numbers in sums.items()}


def _compare(name: str, before: Arrays, after: Arrays, message: str) -> None:
    for difference in filter(None, (_difference(key, before, after) for key in before | after)):
        raise NotDeterministic(f"the task is not deterministic: {message.format(name, difference)}")


def _difference(name: str, before: Arrays, after: Arrays) -> str:
    """Describe the difference of a tensor in words; empty: there is none."""
    if not (before and after):
        return "whether it diverges to NaN or infinity"
    if name not in before or name not in after:
        return f"whether it has {name}"
    one, other = before[name], after[name]
    if one.shape != other.shape:
        return f"the shape of {name}, {one.shape} and {other.shape}"
    if np.array_equal(one, other, equal_nan=True):
        return ""
    return f"{name} by up to {float(np.max(np.abs(one.astype(np.float64) - other))):.1e}"


def _arrays(result: Trained | Failed) -> Arrays:
    """Return the arrays that a client sends and its state; none if the training produced non-finite numbers."""
    if isinstance(result, Failed):
        return {}
    own = {f"{name} (local state)": array for name, array in result.own.items()}
    return {name: array.copy() for name, array in (result.update | own).items()}
