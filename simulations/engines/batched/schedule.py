"""The schedule of several clients: the examples of each in each step, the same and in the same order as alone.

Clients are sorted by their number of steps, most first, so that in each step the first m of them train. A batch has the
width of the longest of these m; the rows of the others are padded with examples that do not count.
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
    """The batch of one step of m clients."""

    rows: torch.Tensor
    """Rows (m, n) int64 of the tensors that contain all examples."""

    sizes: np.ndarray[tuple[int], np.dtype[np.int64]]
    """Number of each client's examples (m,), at most n."""


class Schedule:
    """The steps of some clients.

    Args:
        jobs: the jobs of the clients.
        examples: the examples of each client.
        local: the settings with epochs, batch size and order.
        offsets: the offset of each client's examples in the tensors that contain all examples.
    """

    def __init__(self, jobs: Sequence[Job], examples: Sequence[Examples], local: Local, offsets: Sequence[int]) -> None:
        counts = np.array([each.count for each in examples])
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
            indices = [torch.arange(n) if rows is None else rows.cpu() for rows, n in zip(chosen, counts, strict=True)]
            begins = np.cumsum([0, *counts[:-1]])[:, None, None]
            self._rows = torch.cat(indices).numpy()[self._rows + begins]
        self._rows += np.array(offsets)[self._order][:, None, None]

    @property
    def order(self) -> list[int]:
        """The index of the job of each row."""
        return self._order

    @property
    def length(self) -> int:
        """The number of examples in the widest rows of all steps."""
        return int(self._sizes.max(axis=0).sum())

    def __iter__(self) -> Iterator[Batch]:
        """Yield the batches of all steps."""
        active = (self._sizes > 0).sum(axis=0)
        for step, m in enumerate(active.tolist()):
            sizes = self._sizes[:m, step]
            yield Batch(torch.from_numpy(self._rows[:m, step, : sizes.max()]), sizes)

    def _place(self, jobs: Sequence[Job], local: Local, epochs: Array, counts: Array, per_epoch: Array) -> None:
        """Write the positions in each client's data into the rows.

        Batches have the width of the rows, or an epoch has only one batch, so that an epoch's order is contiguous.
        """
        flat, width = self._rows.reshape(len(jobs), -1), self._rows.shape[2]
        if local.shuffle:
            draws.place(flat, [job.seed for job in jobs], counts, epochs, per_epoch * width)
        else:
            at = np.arange(flat.shape[1]) % (per_epoch * width)[:, None]
            flat[...] = np.where(at < counts[:, None], at, 0)


def _sizes(steps: Array, counts: Array, sizes: Array, per_epoch: Array) -> Array:
    """Return the number of examples of each client in each step (m, S); 0: the client does not take the step."""
    every = np.arange(int(steps.max()))[None, :]
    counts, sizes = counts[:, None], sizes[:, None]
    of_step: Array = np.minimum(sizes, counts - every % per_epoch[:, None] * sizes)
    of_step[every >= steps[:, None]] = 0
    return of_step
