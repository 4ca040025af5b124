"""The next version from the sums of a round's sessions.

    mean = sum_s q sum_k v_k / sum_s sum_k a_k                     floats; or a rule over the means of the sessions
    mean = q (sum_s sum_k v_k + noise) / divisor                   floats of a private sum; members may add the noise
    mean = round_half_even(sum_k A_k u_k / sum_k A_k)              integers, over all members
    new  = as in `fold/streaming`, by the server optimizer

The sums of all sessions that count are added as integers. With a noise of the coordinator the norm of their sum is that
with the noise, and if it is larger than the members and the noise make it none of them counts: whether a version exists
then says nothing that its values would not say. A rule such as the median reduces the sessions' means, each
as one update, element by element. Every process has the sums of the elements that it owns, so nothing is exchanged.
"""

import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.fold.exchange import Alone, Exchange, from_all
from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.integers import apply_mean, rounded_mean
from atoll.aggregation.fold.prepared import check_whole
from atoll.aggregation.fold.sharded import TILE_ELEMENTS, tiles_of
from atoll.aggregation.fold.step import Slot, Step
from atoll.aggregation.fold.streaming import Folded, written
from atoll.aggregation.fold.tiles import Mean, Parts, float_rule, integer_rule
from atoll.aggregation.masked.no_sum import NoSum
from atoll.aggregation.masked.sums import Opened, OpenedSum, Session, bound_of, open_sums, weight_in
from atoll.aggregation.ordered_map import computed_ahead
from atoll.aggregation.rules.combine import Scratch, combine
from atoll.aggregation.rules.rule import GeometricRule, check_count
from atoll.tensors.layout import FLOATS, Layout, Piece, Tensor
from atoll.tensors.ownership import owned_pieces
from atoll.tensors.pieces import cut_layout, first_element, piece_bytes_of
from atoll.tensors.safetensors_file import NUMPY_DTYPES, TensorFileWriter, read_metadata
from atoll.tensors.secure.plan import Vector
from atoll.tensors.secure.vector import next_exponent, step_of
from atoll.tensors.updates.reader import UpdateReader, stored_model, stored_shard

__all__ = ["Outcome", "Session", "fold_masked"]

Tile = tuple[list[Slot], Parts]
"""The slots that move with a tile, and its new values."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the sums of a round say beside the model; the same at every rank."""

    dropped: Mapping[int, str]
    """The sessions that count in no version, by number, each with the reason."""
    members: int
    """Number of members of the sums that count."""
    weight: float
    """Sum of their weights a."""
    within: int
    """Number of members whose update had at most the norm C."""
    exponents: tuple[int, ...]
    """Exponents of the float tensors' ranges in the next round."""
    statistics: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    """Sums of the training's metrics."""


def fold_masked(
    base: Path,
    sessions: Sequence[Session],
    out: Path,
    *,
    vector: Vector,
    exchange: Exchange | None = None,
    step: Step = Step(),  # noqa: B008 - a value
    execution: Execution = Execution(),  # noqa: B008 - a value
    durable: bool = True,
) -> tuple[Folded, Outcome]:
    """Write the version that follows `base` to `out`, atomically and, unless durable=False, durably.

    Args:
        base: the global model, or this rank's shard of it; floats as F32.
        sessions: the opened sessions of the round, in order.
        out: the file of the new version, or shard, which gets the base's metadata.
        vector: of the sums, with the whole model's tensors.
        exchange: with the other ranks; None: all updates are here.
        step: the rule over sessions, the server optimizer, and the files of the slots.
        execution: threads and tiles of this rank.
        durable: sync the files before returning.

    Returns:
        The pieces that were written, and the outcome.

    Raises:
        NoSum: no session counts.
        ExchangeBroken: another rank is gone or has failed.
        ValueError: an update has other tensors than the vector; the rule needs more sessions, or whole updates; or a
            new value leaves its dtype.
        TensorFileCorrupted: a file is shorter than it should be.
        OSError: a file cannot be read or written.
    """
    exchange, layout = exchange or Alone(), vector.layout
    pieces = tuple(cut_layout(layout, piece_bytes_of(layout)))
    is_alone = exchange.size == 1
    _check_step(step, layout, {} if is_alone else Counter(piece.tensor for piece in pieces))
    parts = [owned_pieces(pieces, rank, exchange.size) for rank in range(exchange.size)]
    owned = parts[exchange.rank]
    with ExitStack() as stack:
        masters = stack.enter_context(UpdateReader(stored_model(base) if is_alone else stored_shard(base, owned)))
        opened = open_sums(
            vector,
            sessions,
            parts,
            exchange=exchange,
            folder=out.parent,
            stack=stack,
            execution=execution,
            are_judged=step.private_sums is None or step.private_sums.noise is None,
        )
        opened = _fitting(opened, layout, masters, owned, exchange)
        if not opened.sums:
            raise NoSum(opened.dropped)
        if step.rule is not None:
            check_count(step.rule, len(opened.sums))
        slots = [stack.enter_context(Slot(name, step, layout, owned)) for name in step.slots]
        writer = stack.enter_context(TensorFileWriter(out, layout, metadata=read_metadata(base), pieces=owned))
        news = _NewValues(vector, opened.sums, step, masters, slots)
        whole = tuple(cut_layout(layout, sys.maxsize))
        tiles = tiles_of(layout, whole if is_alone else owned, execution.tile_elements or TILE_ELEMENTS, step)
        jobs = ((news.moved(tile.tensor), partial(news.of, tile.tensor, tile.start, tile.stop)) for tile in tiles)
        finished = stack.enter_context(closing(computed_ahead(jobs, threads=execution.threads)))
        judged = _judged(finished, news, exchange)
        folded = written(judged, writer, slots, execution.between, durable=durable)
    return folded, _outcome(vector, opened.sums, opened.dropped)


def _judged(finished: Iterator[Tile], news: "_NewValues", exchange: Exchange) -> Iterator[Tile]:
    """Yield the tiles, and at their end, before a file has its name, judge the norm of a sum with one noise for all.

    Raises:
        NoSum: it is too large.
    """
    yield from finished
    if (bound := news.bound) is None:
        return
    everywhere = from_all(exchange, np.array([math.fsum(news.squares)]))
    norm = math.sqrt(math.fsum(float(part.view(np.float64)[0]) for part in everywhere))
    if norm > bound:
        why = f"the norm of all sums with their noise is {norm:.4g}; allowed of their weight: {bound:.4g}"
        raise NoSum(dict.fromkeys(news.numbers, why))


def _fitting(
    opened: Opened, layout: Layout, masters: UpdateReader, owned: Sequence[Piece], exchange: Exchange
) -> Opened:
    """Drop the sessions whose integers leave the dtype of a tensor: what no single one leaves, their mean does not."""
    tensors = {tensor.name: tensor for tensor in layout if tensor.dtype not in FLOATS}
    places = [(tensors[p.tensor], first_element(p, tensors[p.tensor]), p) for p in owned if p.tensor in tensors]
    faults = np.zeros(len(opened.sums), np.uint8)
    for index, each in enumerate(opened.sums):
        for tensor, start, piece in places:
            stop = start + piece.num_elements
            if start == stop:
                continue
            total = each.exact.integers[tensor.name][start:stop]
            mean = rounded_mean(total, total_weight=each.exact.weight)
            try:
                apply_mean(masters.read(tensor, start, stop), mean, NUMPY_DTYPES[tensor.dtype])
            except ValueError:
                faults[index] = 1
    is_wrong = np.bitwise_or.reduce([part.view(np.uint8) for part in from_all(exchange, faults)])
    reason = "an integer tensor of its mean leaves the dtype"
    dropped = {each.number: reason for each, wrong in zip(opened.sums, is_wrong, strict=True) if wrong}
    kept = tuple(each for each in opened.sums if each.number not in dropped)
    return Opened(kept, {**opened.dropped, **dropped})


def _check_step(step: Step, layout: Layout, num_pieces: Mapping[str, int]) -> None:
    """Raise ValueError if the step reads whole updates, which a secure sum does not show, or tensors that are cut."""
    check_whole(step, layout, num_pieces)
    if isinstance(step.rule, GeometricRule) or getattr(step.optimizer, "has_prepare", False):
        raise ValueError("a secure sum shows no single update to a rule or an optimizer that compares whole ones")


def _outcome(vector: Vector, sums: Sequence[OpenedSum], dropped: Mapping[int, str]) -> Outcome:
    exact = [each.exact for each in sums]
    members = sum(each.members for each in exact)
    exponents = tuple(
        next_exponent(
            exponent, members, sum(each.cut[index] for each in exact), sum(each.small[index] for each in exact)
        )
        for index, exponent in enumerate(vector.encoding.exponents)
    )
    statistics: dict[str, tuple[float, ...]] = {}
    for each in exact:  # multiples of 2^-20, so that their sum has no order
        for name, numbers in each.statistics.items():
            known = statistics.get(name, (0.0,) * len(numbers))
            statistics[name] = tuple(a + b for a, b in zip(known, numbers, strict=True))
    weight = weight_in(sum(each.weight for each in exact))
    return Outcome(dropped, members, weight, sum(each.within for each in exact), exponents, statistics)


class _NewValues:
    """The new values of tiles that this process owns."""

    def __init__(
        self, vector: Vector, sums: Sequence[OpenedSum], step: Step, masters: UpdateReader, slots: Sequence[Slot]
    ) -> None:
        self._vector, self._sums, self._step, self._masters, self._slots = vector, sums, step, masters, slots
        self._scratch = Scratch()
        self.squares: list[float] = []
        """Squares of the norms of the parts of the sum with its noise."""
        self._weight = sum(each.exact.weight for each in sums)
        self._integers = {
            name: rounded_mean(np.sum([each.exact.integers[name] for each in sums], axis=0), total_weight=self._weight)
            for name in vector.exact.integers
        }

    @property
    def numbers(self) -> list[int]:
        """The numbers of the sessions."""
        return [each.number for each in self._sums]

    @property
    def bound(self) -> float | None:
        """The largest norm of the sum with one noise for all sessions; None: each of them was judged."""
        if (private := self._step.private_sums) is None or private.noise is None:
            return None
        members = sum(each.exact.members for each in self._sums)
        return bound_of(self._vector, members, self._weight, private.noise.deviation)

    def moved(self, tensor: Tensor) -> list[Slot]:
        """Return the slots that move with a tensor."""
        return [slot for slot in self._slots if slot.carries(tensor.name)]

    def of(self, tensor: Tensor, start: int, stop: int) -> Parts:
        """Return the new values of some elements of a tensor, and of its slots."""
        if tensor.dtype not in FLOATS:
            mean = self._integers[tensor.name]
            return integer_rule(tensor, self._masters, lambda begin, end: mean[begin:end])(start, stop)
        mean_of: Mean = partial(self._mean if self._step.rule is None else self._reduced, tensor)
        return float_rule(tensor, self._masters, mean_of, self.moved(tensor), self._step)(start, stop)

    def _mean(self, tensor: Tensor, start: int, stop: int) -> NDArray[np.float64]:
        total: NDArray[Any] = np.zeros(stop - start, np.int64)
        for each in self._sums:
            total += each.words(tensor, start, stop)
        divisor: float = weight_in(self._weight)
        if (private := self._step.private_sums) is not None:
            divisor = private.divisor
            if private.noise is not None:
                total += private.noise.between(tensor.name, tensor.num_elements, start, stop)
        mean = total.astype(np.float64)
        np.multiply(mean, step_of(self._vector.encoding.bits, self._vector.ranges[tensor.name]), out=mean)
        if private is not None and private.noise is not None:
            self.squares.append(float(np.square(mean).sum()))
        return np.divide(mean, divisor, out=mean)

    def _reduced(self, tensor: Tensor, start: int, stop: int) -> NDArray[np.float64]:
        assert self._step.rule is not None
        place = self._step.place
        return combine(tensor, start, stop, self._sums, self._step.rule, scratch=self._scratch, place=place)
