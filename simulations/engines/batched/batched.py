"""The batched engine, and the trainer that its runs need: of private steps or of any others."""

from atoll.simulations.engines.batched.private_trainer import PrivateTrainer
from atoll.simulations.engines.batched.together import together_if_possible
from atoll.simulations.engines.batched.trainer import BatchTrainer
from atoll.simulations.engines.engine import Training
from atoll.simulations.engines.one_process import OneProcess, on_device, threads_of_torch


def trainer_of(training: Training, *, at_once: int | None = None, kind: str | None = None) -> BatchTrainer:
    """Return the trainer of many clients as one group; arguments and errors as in `BatchTrainer`."""
    made = PrivateTrainer if training.is_private else BatchTrainer
    return made(training, at_once=at_once, kind=kind)


class Batched(OneProcess):
    """Batched engine of one process.

    Args:
        training: the settings of all clients' training.
        at_once: the number of clients in a group (k); None: as many as fit into the cache.
        threads: the threads of each operation.

    Raises:
        CannotBatch: the task cannot be batched; the message has the reason.
    """

    def __init__(self, training: Training, *, at_once: int | None = None, threads: int | None = 1) -> None:
        with threads_of_torch(threads):
            trainer = trainer_of(training, at_once=at_once)
        name = on_device(f"batched (k={trainer.at_once})", training)
        super().__init__(name, trainer, threads, lambda: together_if_possible(training))
        self.at_once, self.kind = trainer.at_once, trainer.kind
