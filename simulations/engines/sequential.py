"""The sequential engine: one client after another in one process, with the bits of a deployed client."""

from atoll.simulations.engines.benches import Benches
from atoll.simulations.engines.engine import Training
from atoll.simulations.engines.loop import Loop
from atoll.simulations.engines.measuring import measurer_of
from atoll.simulations.engines.one_process import OneProcess, Trainer, on_device
from atoll.task.task import Task


class Sequential(OneProcess):
    """The sequential engine.

    Args:
        training: the settings of all clients' training.
        threads: the threads of each operation; more than one may change bits. None: torch's current number.
    """

    def __init__(self, training: Training, *, threads: int | None = 1) -> None:
        trainer = sequential_trainer(training)
        super().__init__(on_device("sequential", training), trainer, threads, lambda: measurer_of(training))


def sequential_trainer(training: Training) -> Trainer:
    """Return the built-in loop, or, for custom training, the trainer on the `Bench` of a deployed worker.

    A task with a custom training or algorithm, or with a kept optimizer, needs the latter, and so do private steps.
    """
    task = training.task
    has_loop = isinstance(task, Task) and task.fit is None and task.algorithm is None
    if not has_loop or training.is_private or training.local.keep_optimizer:
        return Benches(training)
    return Loop(training)
