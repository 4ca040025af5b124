"""A loader for data that can only be read from the beginning, such as a compressed file or a generator.

Every rank reads the whole stream, shuffles it in the same way and keeps its share of each global batch. So the ranks
take equal steps and agree on each other's counts without communication, and any number of ranks continues the same
global batches. The price: each rank reads everything, and a resume reads the earlier part of the epoch again. If an
example can be read alone, a data set and `Loader` avoid both.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from itertools import islice
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from torch.utils.data import default_collate

from atoll.ground.printable import count_of
from atoll.parallel.data.batch import Batch, count_units, map_tensors
from atoll.parallel.data.loader import State, ahead
from atoll.parallel.data.order import cut
from atoll.parallel.data.shards import generator
from atoll.task.randomness import generators_kept
from atoll.training.data.draws import Drew, no_draws, seed_example

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamOrder:
    """The order of a stream's examples, and their division over data-parallel ranks.

    Raises:
        ValueError: a field is out of its range; all faults at once.
    """

    batch_size: int
    """Examples of one step on all ranks together (B >= R)."""

    num_ranks: int = 1
    """Data-parallel ranks (R >= 1)."""

    buffer_size: int = 0
    """Examples in the buffer by which the stream is shuffled, in memory on every rank (>= 0); 0: no shuffle."""

    seed: int = 0
    """The seed of the shuffle (>= 0)."""

    last: Literal["uneven", "drop"] = "uneven"
    """The treatment of the last batch, as in `Order`."""

    def __post_init__(self) -> None:
        rules = [
            (self.num_ranks >= 1, f"num_ranks: must be at least 1, got {self.num_ranks}"),
            (
                self.batch_size >= self.num_ranks,
                f"batch_size: must be at least the {count_of(self.num_ranks, 'rank')}, got {self.batch_size}",
            ),
            (self.buffer_size >= 0, f"buffer_size: must not be negative, got {self.buffer_size}"),
            (self.seed >= 0, f"seed: must not be negative, got {self.seed}"),
            (self.last in ("uneven", "drop"), f"last: must be uneven or drop, got {self.last!r}"),
        ]
        if faults := [fault for is_met, fault in rules if not is_met]:
            raise ValueError("; ".join(faults))

    @property
    def described(self) -> State:
        """The order of the global batches, whatever the number of ranks, in plain JSON values."""
        fields = asdict(self)
        del fields["num_ranks"]
        return fields


class IterableLoader:
    """The batches of one data-parallel rank, as `Loader` yields them; their number is known when they end.

    Args:
        source: epoch -> examples (inputs, targets), the same ones in the same order on each call. Random numbers that
            it draws are a function of (the order's seed, epoch, number of the example).
        order: of the examples, and the number of ranks.
        rank: the coordinate among the data-parallel ranks.
        device: of the batches.
        prefetch: batches that a thread reads ahead.
        count: targets -> units over which the task's loss averages.

    Raises:
        ValueError: a number is out of its range.

    Source: the shuffle is that of tf.data's `shuffle` and of webdataset: each example leaves the buffer from a random
    place, and the next one takes it.
    """

    def __init__(
        self,
        source: Callable[[int], Iterable[Any]],
        order: StreamOrder,
        *,
        rank: int = 0,
        device: torch.device | str = "cpu",
        prefetch: int = 0,
        count: Callable[[Any], float] = count_units,
    ) -> None:
        rules = [
            (0 <= rank < order.num_ranks, f"rank: must be in 0..{order.num_ranks - 1}, got {rank}"),
            (prefetch >= 0, f"prefetch: must not be negative, got {prefetch}"),
        ]
        if faults := [fault for is_met, fault in rules if not is_met]:
            raise ValueError("; ".join(faults))
        self._source, self._order, self._rank, self._count = source, order, rank, count
        self._device, self._prefetch = torch.device(device), prefetch
        self._epoch = self._step = 0
        self._is_over = False
        self._shares: Iterator[tuple[Any, bool, bool]] | None = None
        self._has_drawn = False

    @property
    def epoch(self) -> int:
        """The epoch of the batch that was yielded last; 0 at the start."""
        return self._epoch

    @property
    def step(self) -> int:
        """The number of batches yielded in this epoch."""
        return self._step

    def __iter__(self) -> Iterator[Batch]:
        """Yield the remaining batches of the epoch; if there are none, those of the next one."""
        if self._is_over:
            self._move(self._epoch + 1, 0)
        while not self._is_over:
            yield self._next()

    def state(self) -> State:
        """Return the position of the loader, in plain JSON values."""
        at = {"epoch": self._epoch + 1, "step": 0} if self._is_over else {"epoch": self._epoch, "step": self._step}
        return self._order.described | at

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Continue after the last batch that had been yielded when `state` was taken, on any number of ranks.

        Raises:
            ValueError: the state is of another order.
        """
        ours = self._order.described
        theirs = {key: state.get(key) for key in ours}
        if theirs != ours:
            raise ValueError(f"the state belongs to another order: this is {ours}, the state's {theirs}")
        epoch, step = state.get("epoch"), state.get("step")
        if not (isinstance(epoch, int) and isinstance(step, int) and min(epoch, step) >= 0):
            raise ValueError(f"the state is not a loader's: epoch {epoch!r}, step {step!r}")
        self._move(epoch, step)

    def _move(self, epoch: int, step: int) -> None:
        self._epoch, self._step, self._is_over, self._shares = epoch, step, False, None

    def _next(self) -> Batch:
        if self._shares is None:
            self._shares = self._opened()
        try:
            (inputs, targets), has_data, is_last = next(self._shares)
        except Drew:  # in the thread: read on without it
            self._has_drawn, self._shares = True, None
            return self._next()
        except BaseException as error:
            self._shares = None
            if isinstance(error, StopIteration):
                raise ValueError(f"the source ends before step {self._step} of epoch {self._epoch}") from None
            raise
        self._step, self._is_over = self._step + 1, is_last
        batch = Batch(inputs, targets, self._count(targets) if has_data else 0, self._count)
        return batch if self._device.type == "cpu" else batch.to(self._device)

    def _opened(self) -> Iterator[tuple[Any, bool, bool]]:
        order, has_thread = self._order, bool(self._prefetch) and not self._has_drawn
        if has_thread:
            examples = undrawn_stream(self._examples())
        else:
            examples = drawn_stream(self._examples(), order.seed, self._epoch)
        if order.buffer_size:
            examples = mixed(examples, order.buffer_size, generator(order.seed, self._epoch))
        shares = _shares(examples, order, step=self._step, rank=self._rank)
        if self._device.type == "cuda":
            shares = ((map_tensors(torch.Tensor.pin_memory, batch), *rest) for batch, *rest in shares)
        return ahead(shares, self._prefetch) if has_thread else shares

    def _examples(self) -> Iterator[Any]:
        """Yield the examples of the epoch; the source is opened with the first, so that what it draws is seeded."""
        yield from self._source(self._epoch)


def mixed(examples: Iterable[T], buffer_size: int, draw: np.random.Generator) -> Iterator[T]:
    """Yield the examples shuffled through a buffer of `buffer_size` >= 1."""
    buffer: list[T] = []
    for example in examples:
        if len(buffer) < buffer_size:
            buffer.append(example)
            continue
        place = int(draw.integers(buffer_size))
        yield buffer[place]
        buffer[place] = example
    yield from (buffer[place] for place in draw.permutation(len(buffer)))


def _shares(examples: Iterator[Any], order: StreamOrder, *, step: int, rank: int) -> Iterator[tuple[Any, bool, bool]]:
    """Yield one rank's collated shares of the global batches from a step on: (batch, has data, is last)."""
    batch_size, drops = order.batch_size, order.last == "drop"
    next(islice(examples, step * batch_size, step * batch_size), None)  # skip the earlier steps
    block = list(islice(examples, batch_size))
    while block and not (drops and len(block) < batch_size):
        after = list(islice(examples, batch_size))
        share = block[cut(len(block), rank, order.num_ranks) : cut(len(block), rank + 1, order.num_ranks)]
        is_last = len(after) < (batch_size if drops else 1)
        yield default_collate(share or block[:1]), bool(share), is_last
        block = after


def drawn_stream(examples: Iterable[T], seed: int, epoch: int) -> Iterator[T]:
    """Yield the examples of a stream, each with random numbers from (seed, epoch, its number in the stream)."""
    source, number = iter(examples), 0
    while True:
        with generators_kept():
            seed_example(seed, epoch, number)
            try:
                example = next(source)
            except StopIteration:
                return
        yield example
        number += 1


def undrawn_stream(examples: Iterable[T]) -> Iterator[T]:
    """Yield the examples of a stream that is read beside other threads.

    Raises:
        Drew: the stream has drawn a random number, or was about to.
    """
    source, is_first = iter(examples), True
    while True:
        with no_draws(set_back=is_first):
            is_first = False
            try:
                example = next(source)
            except StopIteration:
                return
        yield example
