"""A loader for data that can only be read from its beginning on, such as a compressed file or a generator.

Every rank reads the whole stream, shuffles it in the same way and keeps its share of each global batch. So the ranks
take equal steps and agree on each one's counts without a word between them, and any number of ranks continues the same
global batches. What is paid for it: each rank reads everything, and a resume reads again what came before in the epoch.
Where an example can be read alone, a data set and `Loader` avoid both.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch.utils.data import default_collate

from atoll.parallel.data.ahead import ahead
from atoll.parallel.data.batch import Batch, count_units, map_tensors
from atoll.parallel.data.loader import State
from atoll.parallel.data.order import cut
from atoll.parallel.data.shards import generator

T = TypeVar("T")


class IterableLoader:
    """The batches of one data-parallel rank, as `Loader` gives them; how many there are is known when they end.

    Args:
        source: epoch -> examples (inputs, targets), the same ones in the same order whenever it is called.
        batch_size: examples of one step on all ranks together (B >= R).
        rank: the coordinate among the data-parallel ranks.
        num_ranks: how many they are (R).
        buffer_size: examples among which the stream is shuffled, at hand on every rank; 0: it comes as it is.
        seed: of the shuffle.
        last: `uneven` or `drop`, as in `Order`.
        device: where the batches go.
        prefetch: batches that a thread reads ahead.
        count: targets -> units that the task's loss averages over.

    Raises:
        ValueError: a number is out of its range.

    Source: the shuffle is that of tf.data's `shuffle` and of webdataset: each example leaves the buffer from a random
        place, and the next one takes it.
    """

    def __init__(
        self,
        source: Callable[[int], Iterable[Any]],
        *,
        batch_size: int,
        rank: int = 0,
        num_ranks: int = 1,
        buffer_size: int = 0,
        seed: int = 0,
        last: Literal["uneven", "drop"] = "uneven",
        device: torch.device | str = "cpu",
        prefetch: int = 0,
        count: Callable[[Any], int] = count_units,
    ) -> None:
        rules = [
            (0 <= rank < num_ranks, f"rank: must be in 0..{num_ranks - 1}, got {rank}"),
            (batch_size >= num_ranks, f"batch_size: must be at least the {num_ranks} ranks, got {batch_size}"),
            (buffer_size >= 0, f"buffer_size: must not be negative, got {buffer_size}"),
            (seed >= 0, f"seed: must not be negative, got {seed}"),
            (last in ("uneven", "drop"), f"last: must be uneven or drop, got {last!r}"),
            (prefetch >= 0, f"prefetch: must not be negative, got {prefetch}"),
        ]
        if faults := [fault for is_met, fault in rules if not is_met]:
            raise ValueError("; ".join(faults))
        self._source, self._rank, self._num_ranks, self._count = source, rank, num_ranks, count
        self._order: State = {"batch_size": batch_size, "buffer_size": buffer_size, "seed": seed, "last": last}
        self._device, self._prefetch = torch.device(device), prefetch
        self._epoch = self._step = 0
        self._is_over = False
        self._shares: Iterator[tuple[Any, bool, bool]] | None = None

    @property
    def epoch(self) -> int:
        """The epoch of the batch handed out last; 0 at the start."""
        return self._epoch

    @property
    def step(self) -> int:
        """Batches handed out in this epoch."""
        return self._step

    def __iter__(self) -> Iterator[Batch]:
        """The batches that are left of the epoch; all of the next one when none are."""
        if self._is_over:
            self._move(self._epoch + 1, 0)
        while not self._is_over:
            yield self._next()

    def state(self) -> State:
        """Where the loader stands, in plain JSON values."""
        at = {"epoch": self._epoch + 1, "step": 0} if self._is_over else {"epoch": self._epoch, "step": self._step}
        return self._order | at

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on behind the last batch that was handed out when `state` was taken, on any number of ranks.

        Raises:
            ValueError: the state is of another order.
        """
        mine, theirs = self._order, {key: state.get(key) for key in self._order}
        if theirs != mine:
            raise ValueError(f"the state is of another order: this is {mine}, the state's {theirs}")
        epoch, step = state.get("epoch"), state.get("step")
        if not (isinstance(epoch, int) and isinstance(step, int) and min(epoch, step) >= 0):
            raise ValueError(f"the state is of no loader: epoch {epoch!r}, step {step!r}")
        self._move(epoch, step)

    def _move(self, epoch: int, step: int) -> None:
        self._epoch, self._step, self._is_over, self._shares = epoch, step, False, None

    def _next(self) -> Batch:
        if self._shares is None:
            self._shares = self._opened()
        try:
            (inputs, targets), has_data, is_last = next(self._shares)
        except BaseException as error:
            self._shares = None
            if isinstance(error, StopIteration):
                raise ValueError(f"the source ends before step {self._step} of epoch {self._epoch}") from None
            raise
        self._step, self._is_over = self._step + 1, is_last
        batch = Batch(inputs, targets, self._count(targets) if has_data else 0)
        return batch if self._device.type == "cpu" else batch.to(self._device)

    def _opened(self) -> Iterator[tuple[Any, bool, bool]]:
        order = self._order
        examples = iter(self._source(self._epoch))
        if order["buffer_size"]:
            examples = mixed(examples, order["buffer_size"], generator(order["seed"], self._epoch))
        place = {"rank": self._rank, "num_ranks": self._num_ranks}
        shares = _shares(examples, order["batch_size"], step=self._step, last=order["last"], **place)
        if self._device.type == "cuda":
            shares = ((map_tensors(torch.Tensor.pin_memory, batch), *rest) for batch, *rest in shares)
        return ahead(shares, self._prefetch) if self._prefetch else shares


def mixed(examples: Iterable[T], buffer_size: int, draw: np.random.Generator) -> Iterator[T]:
    """The examples shuffled through a buffer of `buffer_size` >= 1."""
    buffer: list[T] = []
    for example in examples:
        if len(buffer) < buffer_size:
            buffer.append(example)
            continue
        place = int(draw.integers(buffer_size))
        yield buffer[place]
        buffer[place] = example
    yield from (buffer[place] for place in draw.permutation(len(buffer)))


def _shares(
    examples: Iterator[Any], batch_size: int, *, step: int, last: str, rank: int, num_ranks: int
) -> Iterator[tuple[Any, bool, bool]]:
    """One rank's collated shares of the global batches from a step on; whether they count; whether one is the last."""
    next(islice(examples, step * batch_size, step * batch_size), None)  # what was handed out before
    block = list(islice(examples, batch_size))
    while block and not (last == "drop" and len(block) < batch_size):
        after = list(islice(examples, batch_size))
        mine = block[cut(len(block), rank, num_ranks) : cut(len(block), rank + 1, num_ranks)]
        is_last = len(after) < (batch_size if last == "drop" else 1)
        yield default_collate(mine or block[:1]), bool(mine), is_last
        block = after
