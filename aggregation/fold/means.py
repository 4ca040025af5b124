"""The weighted mean of one tensor: a rank's sum of its updates, and the mean from the sums of all ranks.

A `Term` is an update that is being folded. A `Total` describes all updates, also those at other ranks: the grid depends
on it alone.
"""

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.fold.device import Device, Summand
from atoll.aggregation.fold.exchange import Bytes
from atoll.aggregation.fold.grid import grid_exponent, grid_scale, mean_from_grid
from atoll.aggregation.fold.integers import from_words, rounded_mean, sum_dtype, to_words, weighted_sum
from atoll.aggregation.fold.kernel import add_within_for
from atoll.aggregation.fold.step import Step
from atoll.tensors.layout import FLOATS, Layout, Tensor
from atoll.tensors.updates.reader import StoredUpdate, UpdateReader


@dataclass(frozen=True, slots=True)
class Weighted:
    """One update of the round, with its weight.

    Args:
        update: the stored update.
        weight: >= 1, which float64 holds exactly (`weights.integer_weights`).
        factor: in [0, 1], the factor of its floats that bounds its norm (`coordinate.clip_factors`); the weight counts
            in full.
        trained_factor: in [0, 1], a further factor of the trained floats alone (`weights.normalized`).
    """

    update: StoredUpdate
    weight: int
    factor: float = 1.0
    trained_factor: float = 1.0

    @property
    def carried(self) -> dict[str, float | int]:
        """The largest |element| of each tensor that the update carries."""
        return {piece.tensor: self.update.magnitudes[piece.tensor] for piece in self.update.pieces}


class Counted(Protocol):
    """The weight and factors of an update, wherever its bytes are; see `Weighted`."""

    @property
    def weight(self) -> int:
        """The weight of the update in the mean."""

    @property
    def factor(self) -> float:
        """The factor of the update's floats."""

    @property
    def trained_factor(self) -> float:
        """The further factor of the update's trained floats."""


def factor_of(item: Counted, tensor: Tensor, trained: Container[str]) -> float:
    """Return the factor of the values of a float tensor before they are added."""
    return item.factor * item.trained_factor if tensor.name in trained else item.factor


@dataclass(frozen=True, slots=True)
class Total:
    """The sum of weights, the magnitude and the count of all updates that carry a tensor."""

    weight: int
    """The sum of the weights of the updates that carry the tensor."""
    magnitude: float | int
    """The largest |element| that an update adds, for floats times the update's factor, so that an update with a tiny
    factor takes no bits from the others."""
    count: int
    """The number of updates, at least 1."""


@dataclass(frozen=True, slots=True)
class Term:
    """An update that is being folded."""

    reader: UpdateReader
    item: Weighted

    def carries(self, tensor: str) -> bool:
        """Return whether the update has this tensor."""
        return self.reader.carries(tensor)

    def magnitude(self, tensor: Tensor) -> float | int:
        """Return the recorded largest |element|, on which the proof of `grid` rests. NaN never is within it."""
        return self.item.update.magnitudes[tensor.name]

    def read(self, tensor: Tensor, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        """Read a block, and check that it is within the recorded magnitude; see `sources.Source.read`.

        Raises:
            ValueError: a value is beyond it.
        """
        block = self.reader.read(tensor, start, stop, out)
        low, high = block.min().item(), block.max().item()
        if not -self.magnitude(tensor) <= low <= high <= self.magnitude(tensor):
            raise self.beyond(tensor, block)
        return block

    def beyond(self, tensor: Tensor, block: NDArray[Any]) -> ValueError:
        """Return the error about a block that is beyond the recorded magnitude."""
        return ValueError(
            f"update {self.item.update.path}: tensor {tensor.name!r} has values in {block.min()}..{block.max()}, "
            f"beyond its recorded magnitude {self.magnitude(tensor)}"
        )


def totals_of(
    layout: Layout, updates: Iterable[tuple[Counted, Mapping[str, float | int]]], trained: Container[str]
) -> dict[str, Total]:
    """Return for each tensor the total weight, magnitude and count of the updates that carry it.

    Args:
        layout: the model's tensors.
        updates: the weight and factors of each, and the magnitudes of the tensors that it carries.
        trained: names of the float tensors that are trained (`step.Step`).

    Returns:
        No entry for a tensor that no update carries.
    """
    totals: dict[str, Total] = {}
    for item, magnitudes in updates:
        for tensor in layout:
            if (magnitude := magnitudes.get(tensor.name)) is None:
                continue
            added = magnitude * factor_of(item, tensor, trained) if tensor.dtype in FLOATS else magnitude
            known = totals.get(tensor.name, Total(0, 0, 0))
            totals[tensor.name] = Total(known.weight + item.weight, max(added, known.magnitude), known.count + 1)
    return totals


class ExactMean:
    """The exact weighted mean of a float tensor: sums on the grid, which add without rounding in any order.

    A private sum has its noise added, on its own grid, and is divided by a fixed number.

    With a device the sums are computed there, with the same bits. The mean of a control variate is the sum of the
    updates, all of weight 1, over the number of all clients.
    """

    def __init__(
        self, step: Step, tensor: Tensor, total: Total, terms: Sequence[Term], device: Device | None = None
    ) -> None:
        self._tensor, self._terms, self._device = tensor, terms, device
        total_weight, weights = total.weight, [term.item.weight for term in terms]
        self._divisor, self._scale = total_weight, step.scale if step.is_trained(tensor) else 1.0
        if step.is_control(tensor):
            assert step.num_clients is not None
            total_weight, weights, self._divisor = total.count, [1] * len(terms), step.num_clients
        self._private = step.private
        if step.private is None:
            self._exponent = grid_exponent(total.magnitude, total_weight=total_weight, count=total.count)
        else:
            self._exponent, self._divisor = step.private.exponent, step.private.divisor
        factors = [factor_of(term.item, tensor, step.trained) for term in terms]
        self._scales = [grid_scale(weight, self._exponent) * f for weight, f in zip(weights, factors, strict=True)]
        self._add_within = add_within_for(tensor.num_elements * len(terms))

    def sum(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return sum_k w_k u_k / q of this rank's updates: integers below 2^53."""
        if self._device is not None:
            return self._sum_on_device(self._device, start, stop)
        total, room = np.zeros(stop - start), np.empty(stop - start, np.float32)
        for term, scale in self._here(start, stop):
            block = term.reader.read(self._tensor, start, stop, room)
            if not self._add_within(total, block, scale, term.magnitude(self._tensor)):
                raise term.beyond(self._tensor, block)
        return total

    def _here(self, start: int, stop: int) -> list[tuple[Term, np.float64]]:
        """Return the updates with values here in elements start..stop, each with its scale: zeros add nothing."""
        pairs = zip(self._terms, self._scales, strict=True)
        return [pair for pair in pairs if pair[0].reader.meets(self._tensor, start, stop)]

    def _sum_on_device(self, device: Device, start: int, stop: int) -> NDArray[np.float64]:
        here = self._here(start, stop)
        summands = [Summand(term.reader, float(scale), term.magnitude(self._tensor)) for term, scale in here]
        total, is_within = device.weighted_sum(self._tensor, start, stop, summands)
        if not is_within.all():
            first = here[int(np.argmin(is_within))][0]
            raise first.beyond(self._tensor, first.reader.read(self._tensor, start, stop))
        return total

    def share(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return this rank's partial sum of elements start..stop, as it is sent; empty if no update here has them."""
        return self.sum(start, stop) if self._here(start, stop) else np.zeros(0)

    def joined(self, parts: Sequence[Bytes], start: int, stop: int) -> NDArray[np.float64]:
        """Return the mean, from the shares of all ranks."""
        total = np.zeros(stop - start)
        for part in parts:
            if part.size:
                total += part.view(np.float64)
        return self._mean(total, start, stop)

    def _mean(self, total: NDArray[np.float64], start: int, stop: int) -> NDArray[np.float64]:
        if self._private is not None:
            total += self._private.noise(self._tensor.name, self._tensor.num_elements, start, stop)
        mean: NDArray[np.float64] = mean_from_grid(total, self._exponent, total_weight=self._divisor)
        return mean if self._scale == 1.0 else np.multiply(mean, self._scale, out=mean)

    def __call__(self, start: int, stop: int) -> NDArray[np.float64]:
        """Return the mean when all updates are here."""
        return self._mean(self.sum(start, stop), start, stop)


class IntegerMean:
    """The rounded weighted mean of an integer tensor, exactly."""

    def __init__(self, tensor: Tensor, total: Total, terms: Sequence[Term]) -> None:
        self._tensor, self._total, self._terms = tensor, total, terms
        self._dtype = sum_dtype(int(total.magnitude), total_weight=total.weight)

    def sum(self, start: int, stop: int) -> NDArray[Any]:
        """Return sum_k w_k u_k of this rank's updates."""
        here = self._here(start, stop)
        blocks = ((term.read(self._tensor, start, stop), term.item.weight) for term in here)
        return weighted_sum(blocks, stop - start, dtype=self._dtype)

    def _here(self, start: int, stop: int) -> list[Term]:
        return [term for term in self._terms if term.reader.meets(self._tensor, start, stop)]

    def share(self, start: int, stop: int) -> NDArray[np.int64]:
        """Return this rank's partial sum of elements start..stop, as it is sent; empty if no update here has them."""
        return to_words(self.sum(start, stop)) if self._here(start, stop) else np.zeros(0, np.int64)

    def joined(self, parts: Sequence[Bytes], start: int, stop: int) -> NDArray[Any]:
        """Return the rounded mean, from the shares of all ranks."""
        total = np.zeros(stop - start, self._dtype)
        for part in parts:
            if part.size:
                total += from_words(part.view(np.int64), stop - start, dtype=self._dtype)
        return self._mean(total)

    def _mean(self, total: NDArray[Any]) -> NDArray[Any]:
        return rounded_mean(total, total_weight=self._total.weight)

    def __call__(self, start: int, stop: int) -> NDArray[Any]:
        """Return the rounded mean when all updates are here."""
        return self._mean(self.sum(start, stop))
