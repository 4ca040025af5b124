"""The order of examples for each data-parallel rank and step: index arithmetic, without communication.

An epoch is a grid. Step s has one global batch of B examples (the last one: see `last`), and its examples are cut as
evenly as possible, in order: into P parts when they are drawn, into the shares of R ranks when they are loaded.

    cut(m, k, K) = floor(m k / K)           where share k of K begins among m examples
    global      P = 1: every epoch draws one permutation of all examples; any rank may get any of them
    partition   P = R: all are shuffled once, each rank owns a run of them, and every epoch permutes each run

So both samplings are one formula; the grid, and with it the number of steps and every rank's count, depends on neither
the sampling nor the ranks. The order itself is a function of (seed, epoch, step, P): it continues anywhere, and on
another number of ranks as the same global batches.

Source: both samplings are the classic ones of data-parallel SGD (global: one permutation that all ranks share, as in
torch's DistributedSampler; partition: local shuffling); a convergence analysis of the two is Meng et al., "Convergence
Analysis of Distributed Stochastic Gradient Descent with Shuffling", Neurocomputing 337, 2019.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import get_args

import numpy as np
import numpy.typing as npt

from atoll.ground.faults import Refused
from atoll.ground.printable import count_of
from atoll.parallel.data.division import Last, Sampling
from atoll.parallel.data.shards import Take, generator, sharded, shuffled

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Order:
    """The order of the examples, and their division over data-parallel ranks.

    Raises:
        ValueError: a field is out of its range; all faults at once.
    """

    num_examples: int
    """The size of the data set (n >= 1)."""

    batch_size: int
    """Examples of one step on all ranks together (B >= R). A multiple of R gives every rank the same number."""

    num_ranks: int = 1
    """Data-parallel ranks (R >= 1): dp_replicate x dp_shard, not the world's."""

    sampling: Sampling = "global"
    """The sampling, `global` or `partition`; see the module."""

    shuffle: bool = True
    """Draw the order at random; else it is the data set's, in every epoch."""

    seed: int = 0
    """The seed of the order (>= 0). The same seed gives the same order for one version of numpy."""

    last: Last = "uneven"
    """The treatment of the n mod B examples that fill no global batch. `uneven`: they are a batch, split as evenly as
    possible, so that each example comes exactly once (a rank without any gets a filler); `drop`: they are left out,
    different ones in each epoch if the order is random; `wrap`: filled up with examples from the start of the epoch."""

    last_min: int = 1
    """The size below which, with `uneven`, the last batch joins the one before. A model with BatchNorm, which cannot
    normalize one example, needs 2 R; then only a data set below 2 R leaves a rank with fewer than two."""

    shards: tuple[int, ...] = ()
    """Sizes of the shards, whose sum is n, if the data is too large for random reads: shards come in random order, and
    examples are shuffled among the open ones alone."""

    open_shards: int = 1
    """The number of shards that are shuffled together, and have to be available together (>= 1)."""

    def __post_init__(self) -> None:
        faults = [f"{name}: {rule}, got {getattr(self, name)!r}" for is_met, name, rule in _rules(self) if not is_met]
        if faults:
            raise Refused(*faults)

    @property
    def num_steps(self) -> int:
        """Steps of one epoch, on every rank."""
        full, rest = divmod(self.num_examples, self.batch_size)
        if self.last == "drop" or rest == 0 or (self.last == "uneven" and full and rest < self.last_min):
            return full
        return full + 1

    @property
    def num_parts(self) -> int:
        """Parts that are shuffled independently (P)."""
        return self.num_ranks if self.sampling == "partition" else 1

    def size(self, step: int) -> int:
        """Return the examples of one step on all ranks together."""
        if self.last == "uneven" and step == self.num_steps - 1:
            return self.num_examples - step * self.batch_size
        return self.batch_size

    def counts(self, step: int, num_ranks: int | None = None) -> list[int]:
        """Return the examples of one step on each rank; 0 is a filler."""
        size, ranks = self.size(step), num_ranks or self.num_ranks
        return [share(size, rank, ranks) for rank in range(ranks)]

    def steps(self, epoch: int, rank: int, num_ranks: int | None = None) -> Callable[[int], Indices]:
        """Return the function from a step to the indices of its examples, for one epoch and one rank.

        It returns `counts(step)[rank]` indices, or one, of a filler, where that is 0. Drawing a permutation takes 8
        bytes for each example of the parts that the rank meets; with shards, of the open ones.

        Args:
            epoch: 0, 1, ...
            rank: 0 .. R - 1, the coordinate among the data-parallel ranks.
            num_ranks: the present number of ranks, if the epoch began on another one; P stays.
        """
        ranks = num_ranks or self.num_ranks
        part = cache(lambda index: self._part(epoch, index))

        def indices(step: int) -> Indices:
            size = self.size(step)
            begin, end = cut(size, rank, ranks), cut(size, rank + 1, ranks)
            if begin == end:
                return self._filler(part, min(rank, self.num_parts - 1))
            pieces = []
            for index in range(self.num_parts):
                start, stop = cut(size, index, self.num_parts), cut(size, index + 1, self.num_parts)
                if (low := max(begin, start)) < (high := min(end, stop)):
                    done = step * share(self.batch_size, index, self.num_parts)
                    pieces.append(part(index)(done + low - start, done + high - start))
            return np.concatenate(pieces)

        return indices

    def _filler(self, part: Callable[[int], Take], index: int) -> Indices:
        """Return the index of one example as a filler, for a rank without data; one of the rank's if it has any."""
        start, stop = self._bounds(index)
        return part(index)(0, 1) if start < stop else np.zeros(1, np.int64)

    def _part(self, epoch: int, index: int) -> Take:
        start, stop = self._bounds(index)
        draw = generator(self.seed, epoch + 1, index) if self.shuffle else None
        once = generator(self.seed, 0) if self.shuffle and self.num_parts > 1 else None
        if self.shards:
            return sharded(self.shards, start, stop, open_shards=self.open_shards, once=once, draw=draw)
        return shuffled(self.num_examples, start, stop, once=once, draw=draw)

    def _bounds(self, index: int) -> tuple[int, int]:
        """Return the first and last bound of a part of all examples, in proportion to the part's draws in an epoch."""
        step = self.num_steps - 1
        total = step * self.batch_size + self.size(step)
        before = [
            step * cut(self.batch_size, k, self.num_parts) + cut(self.size(step), k, self.num_parts)
            for k in (index, index + 1)
        ]
        return self.num_examples * before[0] // total, self.num_examples * before[1] // total


def cut(size: int, index: int, num_shares: int) -> int:
    """Return the index at which a share begins when `size` things in a row are cut as evenly as possible."""
    return size * index // num_shares


def share(size: int, index: int, num_shares: int) -> int:
    """Return the size of a share."""
    return cut(size, index + 1, num_shares) - cut(size, index, num_shares)


def _rules(order: Order) -> list[tuple[bool, str, str]]:
    few = order.num_examples < order.batch_size
    return [
        (order.num_examples >= 1, "num_examples", "must be at least 1"),
        (order.num_ranks >= 1, "num_ranks", "must be at least 1"),
        (
            order.batch_size >= order.num_ranks,
            "batch_size",
            f"must be at least the {count_of(order.num_ranks, 'rank')}",
        ),
        (order.sampling in get_args(Sampling), "sampling", f"must be one of {', '.join(get_args(Sampling))}"),
        (order.last in get_args(Last), "last", f"must be one of {', '.join(get_args(Last))}"),
        (order.seed >= 0, "seed", "must not be negative"),
        (order.last_min >= 1, "last_min", "must be at least 1"),
        (order.open_shards >= 1, "open_shards", "must be at least 1"),
        (
            not order.shards or (min(order.shards) >= 0 and sum(order.shards) == order.num_examples),
            "shards",
            f"sizes must not be negative and sum up to the {count_of(order.num_examples, 'example')}",
        ),
        (
            not (few and order.last == "drop"),
            "last",
            f"leaves no step: {count_of(order.num_examples, 'example is', 'examples are')} no global batch "
            f"of {order.batch_size}",
        ),
        (
            not (few and order.last == "wrap" and order.sampling == "partition"),
            "last",
            f"cannot fill parts of {count_of(order.num_examples, 'example')} to a global batch of {order.batch_size}",
        ),
    ]
