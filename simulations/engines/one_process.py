"""The engine of one process, around whatever trains its clients."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from atoll.parallel.task.arrays import Arrays
from atoll.simulations.engines.engine import Failed, Job, Trained, Training
from atoll.simulations.engines.rows import Form, Rows
from atoll.simulations.engines.shared import Blocks


class Trainer(Protocol):
    """Trains clients into rows, in whatever process it is."""

    @property
    def form(self) -> Form:
        """Of the results."""
        ...

    def window(self, num_jobs: int) -> int:
        """How many clients of a cohort of so many are trained into the same rows."""
        ...

    def begin(self, version: Arrays) -> None:
        """Take the version that the next clients train from."""
        ...

    def train(self, jobs: Sequence[Job], rows: Rows) -> Iterator[Trained | Failed]:
        """Train a window's clients, each into its row; in their order."""
        ...


class OneProcess:
    """An engine around a trainer.

    Args:
        name: of the engine.
        trainer: of the clients.
        threads: of each operation; more than one may change bits. None: as torch is set.
    """

    def __init__(self, name: str, trainer: Trainer, threads: int | None) -> None:
        self.name, self._trainer, self._threads = name, trainer, threads
        self._blocks = Blocks(trainer.form, is_shared=False)

    def train(self, version: Arrays, jobs: Sequence[Job]) -> Iterator[Trained | Failed]:
        """As `Engine.train`."""
        self._trainer.begin(version)
        at_once = self._trainer.window(len(jobs))
        for first in range(0, len(jobs), at_once):
            window = jobs[first : first + at_once]
            _, rows, _ = self._blocks.take(len(window))
            results = self._trainer.train(window, rows)
            del rows  # from here on, whoever holds results holds them
            for _ in window:
                if self._threads in (None, torch.get_num_threads()):
                    yield next(results)
                    continue
                with threads_of_torch(self._threads):
                    result = next(results)
                yield result

    def close(self) -> None:
        """Nothing runs."""


def on_device(name: str, training: Training) -> str:
    """An engine's name, with the device where that is not the CPU."""
    return name if training.device == "cpu" else f"{name} on {training.device}"


@contextmanager
def threads_of_torch(threads: int | None) -> Iterator[None]:
    """Compute with so many threads, and leave their number as it was."""
    before = torch.get_num_threads()
    if threads is not None and threads != before:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads is not None and threads != before:
            torch.set_num_threads(before)
