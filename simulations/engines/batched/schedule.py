"""The schedule of several clients: each gets in each step the examples that it would get alone, in the same order.

Clients are sorted by their number of steps, most first, so that in each step the first m of them train. A batch has the
width of the longest of these m; the rows of the others are padded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from atoll.simulations.engines.batched import draws
from atoll.simulations.engines.engine import Job
from atoll.simulations.engines.examples import Examples
from atoll.simulations.engines.loop import requested_steps
from atoll.task.local import Local

Array = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class Batch:
    """The batch of one step of m clients."""

    rows: torch.Tensor
    """Rows (m, n) int64 of the tensors that contain all examples."""

    sizes: np.ndarray[tuple[int], np.dtype[np.int64]]
    """Number of each client's examples (m,), at most n."""


class Schedule:
    """Training steps of some clients: the examples of each client in each step.

    Args:
        jobs: the jobs of the clients.
        examples: the examples of each client.
        local: the settings with epochs, batch size and order.
        offsets: the offset of each client's examples in the tensors that contain all examples.
        joins: whether a last batch of one example joins the previous batch, as in `batch_sizes`.
    """

    def __init__(
        self,
        jobs: Sequence[Job],
        examples: Sequence[Examples],
        local: Local,
        offsets: Sequence[int],
        *,
        joins: bool = False,
    ) -> None:
        counts = np.array([each.count for each in examples])
        sizes = np.full_like(counts, local.batch_size) if local.batch_size else counts
        joined = (counts % sizes == 1) & (counts > sizes) & joins
        per_epoch = -(-counts // sizes) - joined
        self.requested = [requested_steps(local, steps) for steps in per_epoch.tolist()]
        wanted = zip(self.requested, jobs, strict=True)
        self.steps = [min(requested, job.steps or requested) for requested, job in wanted]
        self._order = sorted(range(len(jobs)), key=lambda i: -self.steps[i])
        steps, counts, sizes = np.array(self.steps)[self._order], counts[self._order], sizes[self._order]
        per_epoch, joined = per_epoch[self._order], joined[self._order]
        self._sizes = _sizes(steps, counts, sizes, per_epoch, joined)
        ordered, epochs = [jobs[i] for i in self._order], -(-steps // per_epoch)
        if joined.any():
            self._rows = self._gathered(ordered, local, epochs, counts, sizes, per_epoch)
        else:
            self._rows = np.zeros((len(jobs), int(steps.max()), int(sizes.max())), np.int64)
            flat = self._rows.reshape(len(jobs), -1)
            _place(flat, ordered, local, epochs, counts, per_epoch * self._rows.shape[2])
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

    def _gathered(
        self, jobs: Sequence[Job], local: Local, epochs: Array, counts: Array, sizes: Array, per_epoch: Array
    ) -> Array:
        """Return the rows (m, S, n) of batches, some of which are longer than others of the same client."""
        flat = np.zeros((len(jobs), int((epochs * counts).max())), np.int64)
        _place(flat, jobs, local, epochs, counts, counts)
        step = np.arange(self._sizes.shape[1])[None, :]
        begins = step // per_epoch[:, None] * counts[:, None] + step % per_epoch[:, None] * sizes[:, None]
        at = begins[:, :, None] + np.arange(int(self._sizes.max()))
        is_own = np.arange(at.shape[2]) < self._sizes[:, :, None]
        found: Array = np.take_along_axis(flat, np.where(is_own, at, 0).reshape(len(jobs), -1), axis=1)
        return found.reshape(at.shape)


def _place(flat: Array, jobs: Sequence[Job], local: Local, epochs: Array, counts: Array, strides: Array) -> None:
    """Write each client's row of example indices (m, L): one epoch's order at each multiple of the client's stride.

    Batches have the width of the rows, or an epoch has only one batch, so that an epoch's order is contiguous.
    """
    if local.shuffle:
        draws.place(flat, [job.seed for job in jobs], counts, epochs, strides)
        return
    at = np.arange(flat.shape[1]) % strides[:, None]
    flat[...] = np.where(at < counts[:, None], at, 0)


def _sizes(steps: Array, counts: Array, sizes: Array, per_epoch: Array, joined: Array) -> Array:
    """Return the number of examples of each client in each step (m, S); 0: the client does not take the step."""
    every = np.arange(int(steps.max()))[None, :]
    counts, sizes, per_epoch = counts[:, None], sizes[:, None], per_epoch[:, None]
    of_step: Array = np.minimum(sizes, counts - every % per_epoch * sizes)
    of_step += joined[:, None] & (every % per_epoch == per_epoch - 1)
    of_step[every >= steps[:, None]] = 0
    return of_step
