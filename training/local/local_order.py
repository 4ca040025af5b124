"""The batches of one local training, the same in one process and on any mesh."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import torch

from atoll.task.local import Local
from atoll.training.data.batches import batch_sizes, epoch


@dataclass(frozen=True, slots=True)
class LocalOrder:
    """The examples of each step. A mesh divides each batch over its data-parallel ranks, in order."""

    num_examples: int
    sizes: list[int]
    """The examples of each batch of one epoch."""
    epochs: int
    steps: int
    """The number of requested steps, K."""
    seed: int | None
    """The seed of the order; None: the data set's order, in every epoch."""

    def batches(self, first: int = 0) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield the epoch of each batch, and the indices (B,) int64 of its examples.

        Args:
            first: the first step.
        """
        generator = None if self.seed is None else torch.Generator().manual_seed(self.seed)
        every = (
            (number, indices)
            for number in range(self.epochs)
            for indices in epoch(self.num_examples, self.sizes, generator)
        )
        return islice(every, first, self.steps)


def draw_order(num_examples: int, local: Local, model: torch.nn.Module) -> LocalOrder:
    """Return the order of a local training; it takes one number from torch's global generator if it is random.

    A separate generator then draws the order, as in `DataLoader`: the model's draws do not change it.

    Args:
        num_examples: the number of examples of the site's data.
        local: the settings of the round.
        model: the model that is trained, for `batches.batch_sizes`.
    """
    sizes = batch_sizes(num_examples, local.batch_size, model=model)
    steps = local.epochs * len(sizes)
    seed = int(torch.randint(2**62, ())) if local.shuffle else None
    return LocalOrder(num_examples, sizes, local.epochs, min(steps, local.max_steps or steps), seed)
