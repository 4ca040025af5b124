"""Which examples each of several clients takes in each step: the same ones, in the same order, as it takes alone.

Clients are sorted by their number of steps, most first, so that in each step the first m of them train. A batch is cut
to the longest of these m; where one of them has fewer examples, its row is filled up with others that count nothing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from atoll.parallel.task.local import Local
from atoll.simulations.engines.batched import draws
from atoll.simulations.engines.engine import Job
from atoll.simulations.engines.examples import Examples
from atoll.simulations.engines.loop import requested_steps

Array = np.ndarray[Any, np.dtype[np.int64]]


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
        counts = np.array([found.count for found in examples])
        sizes = np.full_like(counts, local.batch_size) if local.batch_size else counts
        per_epoch = -(-counts // sizes)
        self.requested = [requested_steps(local, steps) for steps in per_epoch.tolist()]
        wanted = zip(self.requested, jobs, strict=True)
        self.steps = [min(requested, job.steps or requested) for requested, job in wanted]
        self._order = sorted(range(len(jobs)), key=lambda i: -self.steps[i])
        steps, counts, sizes = np.array(self.steps)[self._order], counts[self._order], sizes[self._order]
        per_epoch = per_epoch[self._order]
        self._sizes = _sizes(steps, counts, sizes, per_epoch)
        self._rows = np.zeros((len(jobs), int(steps.max()), int(sizes.max())), np.int64)
        self._place([jobs[i] for i in self._order], local, -(-steps // per_epoch), counts, per_epoch)
        chosen = [examples[i].chosen for i in self._order]
        if any(rows is not None for rows in chosen):
            found = [torch.arange(n) if rows is None else rows.cpu() for rows, n in zip(chosen, counts, strict=True)]
            begins = np.cumsum([0, *counts[:-1]])[:, None, None]
            self._rows = torch.cat(found).numpy()[self._rows + begins]
        self._rows += np.array(offsets)[self._order][:, None, None]

    @property
    def order(self) -> list[int]:
        """Row -> index of its job."""
        return self._order

    @property
    def length(self) -> int:
        """Examples of the longest row, over all steps."""
        return int(self._sizes.max(axis=0).sum())

    def __iter__(self) -> Iterator[Batch]:
        """Step after step."""
        active = (self._sizes > 0).sum(axis=0)
        for step, m in enumerate(active.tolist()):
            sizes = self._sizes[:m, step]
            yield Batch(torch.from_numpy(self._rows[:m, step, : sizes.max()]), sizes)

    def _place(self, jobs: Sequence[Job], local: Local, epochs: Array, counts: Array, per_epoch: Array) -> None:
        """Positions in each client's data.

        Batches are as wide as the rows, or else an epoch has only one: so its order lies there in one piece.
        """
        flat, width = self._rows.reshape(len(jobs), -1), self._rows.shape[2]
        if local.shuffle:
            draws.place(flat, [job.seed for job in jobs], counts, epochs, per_epoch * width)
        else:
            at = np.arange(flat.shape[1]) % (per_epoch * width)[:, None]
            flat[...] = np.where(at < counts[:, None], at, 0)


def _sizes(steps: Array, counts: Array, sizes: Array, per_epoch: Array) -> Array:
    """(m, S) examples of each client in each step; 0: it takes no such step."""
    every = np.arange(int(steps.max()))[None, :]
    counts, sizes = counts[:, None], sizes[:, None]
    found: Array = np.minimum(sizes, counts - every % per_epoch[:, None] * sizes)
    found[every >= steps[:, None]] = 0
    return found
