"""One client after another in one process, with the bits of a deployed client."""

from atoll.parallel.task.task import Task
from atoll.simulations.engines.benches import Benches
from atoll.simulations.engines.engine import Training
from atoll.simulations.engines.loop import Loop
from atoll.simulations.engines.one_process import OneProcess, Trainer, on_device


class Sequential(OneProcess):
    """The sequential engine.

    Args:
        training: of all clients.
        threads: of each operation; more than one may change bits. None: as torch is set.
    """

    def __init__(self, training: Training, *, threads: int | None = 1) -> None:
        super().__init__(on_device("sequential", training), sequential_trainer(training), threads)


def sequential_trainer(training: Training) -> Trainer:
    """The lean loop where the training is the built-in one, else the benches."""
    has_loop = isinstance(training.task, Task) and training.task.fit is None
    return Loop(training) if has_loop else Benches(training)
