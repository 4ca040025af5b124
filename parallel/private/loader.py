"""The Poisson samples of a private training as batches, with the interface of `data.loader.Loader`."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from atoll.parallel.data.batch import Batch
from atoll.training.data.draws import drawing
from atoll.training.private.sampler import PoissonSampler


class PoissonLoader:
    """The batches of a training's steps: a `for` yields the rest of the epoch, or, if it is over, the next epoch.

    An epoch is 1 / sample rate steps. A sample is of the whole data set, and each rank has every n-th of its examples.
    A batch without examples has `rows` 0, and one example as a filler. Batches are read when their step needs them.

    Args:
        dataset: map-style, of (inputs, targets).
        sampler: the sampler of its examples.
        steps: of an epoch.
        seed: the seed of the data set's draws (`training.data.draws`).
        device: the device of the batches.
        rank: of data parallelism.
        num_ranks: of data parallelism.
    """

    def __init__(
        self,
        dataset: Any,
        sampler: PoissonSampler,
        *,
        steps: int,
        seed: int,
        device: torch.device | str = "cpu",
        rank: int = 0,
        num_ranks: int = 1,
    ) -> None:
        self._fetch: Callable[[int, torch.Tensor], Any] = drawing(dataset, seed)
        self.sampler, self._steps, self._device = sampler, steps, torch.device(device)
        self.num_examples = len(dataset)
        self._rank, self._num_ranks = rank, num_ranks
        self.epoch = self.step = 0

    def __len__(self) -> int:
        """Return the steps of one epoch."""
        return self._steps

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of the epoch; if there are none, the batches of the next epoch."""
        if self.step == self._steps:
            self.epoch, self.step = self.epoch + 1, 0
        while self.step < self._steps:
            batch = self._batch(self.epoch * self._steps + self.step)
            self.step += 1
            yield batch

    def _batch(self, number: int) -> Batch:
        indices = torch.from_numpy(self.sampler.indices(number)[self._rank :: self._num_ranks].copy())
        rows = len(indices)
        inputs, targets = self._fetch(self.epoch, indices if rows else torch.zeros(1, dtype=torch.int64))
        return Batch(inputs, targets, 1.0, rows=rows, is_filler=not rows).to(self._device)

    def state(self) -> dict[str, Any]:
        """Return the position, in plain JSON values."""
        return {"epoch": self.epoch, "step": self.step}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue after the last batch that had been yielded when `state` was taken."""
        self.epoch, self.step = state["epoch"], state["step"]
