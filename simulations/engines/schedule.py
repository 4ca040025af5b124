"""Which examples each of several clients takes in each step: the same ones, in the same order, as it takes alone.

Clients are sorted by their number of steps, most first, so that in each step the first m of them train. A batch is cut
to the longest of these m; where one of them has fewer examples, its row is filled up with others that count nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from atoll.parallel.local import Local
from atoll.simulations.engines.engine import Job
from atoll.simulations.engines.examples import Examples
from atoll.simulations.engines.loop import orders, requested_steps


@dataclass(frozen=True, slots=True)
class Batch:
    """One step of m clients."""

    rows: torch.Tensor
    """(m, n) int64: of the tensors that all examples are taken from."""

    sizes: np.ndarray[tuple[int], np.dtype[np.int64]]
    """(m,) examples of each, at most n."""


class Schedule:
    """The steps of some clients.

    Args:
        jobs: of the clients.
        examples: of each.
        local: with epochs, batch size and the order.
        offsets: where the examples of each begin in the tensors that all are taken from.
    """

    def __init__(self, jobs: Sequence[Job], examples: Sequence[Examples], local: Local, offsets: Sequence[int]) -> None:
        self.requested, self.steps = [], []
        batch_sizes = [local.batch_size or found.count for found in examples]
        for job, found, size in zip(jobs, examples, batch_sizes, strict=True):
            requested = requested_steps(local, -(-found.count // size))
            self.requested.append(requested)
            self.steps.append(min(requested, job.steps or requested))
        self._order = sorted(range(len(jobs)), key=lambda i: -self.steps[i])
        self._generator = torch.Generator() if local.shuffle else None
        self._width = max(batch_sizes)
        self._rows = np.zeros((len(jobs), max(self.steps), self._width), np.int64)
        self._sizes = np.zeros((len(jobs), max(self.steps)), np.int64)
        for at, i in enumerate(self._order):
            self._place(at, jobs[i], examples[i], local, batch_sizes[i], offsets[i])

    @property
    def order(self) -> list[int]:
        """Row -> index of its job."""
        return self._order

    def __iter__(self) -> Iterator[Batch]:
        """Step after step."""
        active = (self._sizes > 0).sum(axis=0)
        for step, m in enumerate(active):
            sizes = self._sizes[:m, step]
            yield Batch(torch.from_numpy(self._rows[:m, step, : sizes.max()]), sizes)

    def _place(self, at: int, job: Job, examples: Examples, local: Local, size: int, offset: int) -> None:
        """One client's rows, drawn as `parallel.training` does after it has seeded everything."""
        torch.default_generator.manual_seed(job.seed)
        first, end = 0, self.steps[self._order[at]]
        for order in orders(examples.count, local.epochs, self._generator):
            rows = examples.rows(order).cpu().numpy() + offset
            for begin in range(0, len(rows), size):
                if first == end:
                    return
                batch = rows[begin : begin + size]
                self._rows[at, first, : len(batch)] = batch
                self._sizes[at, first] = len(batch)
                first += 1
