"""The engine of one process, around any trainer."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch

from atoll.simulations.engines.engine import Failed, Job, Trained, Training
from atoll.simulations.engines.measuring import Measurer, windows_of
from atoll.simulations.engines.rows import Form, Rows
from atoll.simulations.engines.shared_memory import Blocks
from atoll.task.arrays import Arrays
from atoll.task.metrics import Statistics


class Trainer(Protocol):
    """Trainer of clients into rows, in any process."""

    @property
    def form(self) -> Form:
        """The form of the results."""
        ...

    def window(self, num_jobs: int) -> int:
        """Return the number of clients in a window, which share rows, for a cohort of `num_jobs`."""
        ...

    def begin(self, version: Arrays, number: int = 0) -> None:
        """Set the version that the next clients train from, and its number."""
        ...

    def train(self, jobs: Sequence[Job], rows: Rows) -> Iterator[Trained | Failed]:
        """Train a window's clients, each into its row, and yield the results in their order."""
        ...


class OneProcess:
    """Engine around a trainer.

    Args:
        name: the name of the engine.
        trainer: the trainer of the clients.
        threads: the threads of each operation; more than one may change bits. None: torch's current number.
        measurer: makes the measurer of the clients, when the first one evaluates.
    """

    def __init__(self, name: str, trainer: Trainer, threads: int | None, measurer: Callable[[], Measurer]) -> None:
        self.name, self._trainer, self._threads = name, trainer, threads
        self._make_measurer = measurer
        self._measurer: Measurer | None = None
        self._blocks = Blocks(trainer.form, is_shared=False)

    def train(self, version: Arrays, jobs: Sequence[Job]) -> Iterator[Trained | Failed]:
        """Train the clients, as `Engine.train`."""
        self._trainer.begin(version, jobs[0].version if jobs else 0)
        at_once = self._trainer.window(len(jobs))
        for first in range(0, len(jobs), at_once):
            window = jobs[first : first + at_once]
            _, rows, _ = self._blocks.take(len(window))
            results = self._trainer.train(window, rows)
            del rows  # from here on, only the results keep the memory
            for _ in window:
                if self._threads in (None, torch.get_num_threads()):
                    yield next(results)
                    continue
                with threads_of_torch(self._threads):
                    result = next(results)
                yield result

    def evaluate(self, version: Arrays, jobs: Sequence[Job]) -> list[Statistics | str]:
        """Evaluate the clients, as `Engine.evaluate`."""
        with threads_of_torch(self._threads):
            self._measurer = measurer = self._measurer or self._make_measurer()
            measurer.begin(version, jobs[0].version if jobs else 0)
            return [found for window in windows_of(jobs) for found in measurer.measure(window)]

    def close(self) -> None:
        """Do nothing: there is no other process."""


def on_device(name: str, training: Training) -> str:
    """Return an engine's name, with the device if that is not the CPU."""
    return name if training.device == "cpu" else f"{name} on {training.device}"


@contextmanager
def threads_of_torch(threads: int | None) -> Iterator[None]:
    """Set torch's number of threads (None: leave it), and restore it at the end."""
    before = torch.get_num_threads()
    if threads is not None and threads != before:
        torch.set_num_threads(threads)
    try:
        yield
    finally:
        if threads is not None and threads != before:
            torch.set_num_threads(before)
