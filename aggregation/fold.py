"""Fold, don't collect: the exact weighted mean of stored updates, block by block, into the next model version.

    base file ---------------------------+
    update 1 --block--> add on the grid  |
    update 2 --block-->      ...         +--> base + mean --block--> new file
    update K --block-->      ...

One block of each update after the other is read, added and forgotten: memory is a few blocks, whatever the size of
the model or of the cohort.

    mean = sum_k w_k u_k / sum_k w_k                        over the updates that carry the tensor, or a rule (`rules`)
    mean = scale sum_k w_k f_k u_k / sum_k w_k              of trained floats under FedNova (`weights.normalized`)
    mean = sum_k u_k / N                                    of SCAFFOLD's control variates, N clients in all
    new  = float32(apply(float64(base), mean))              floats that are trained (`optimizers`)
    new  = float32(float64(base) + mean)                    other floats; the base holds all floats as F32
    new  = base + round_half_even(mean)                     integers, exactly (`integers`)

A tensor that no update carries stays. Float sums are exact on a grid that depends on the set of updates alone
(`grid`), hence the bits of the result depend neither on the order of the updates nor on blocks, threads, or the boxes
into which an update was cut.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1. The paper averages models; averaging updates is equal when all start from one global model.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.ahead import computed_ahead
from atoll.aggregation.blocks import StoredUpdate, UpdateReader, stored_model
from atoll.aggregation.combine import combine, mixing_for
from atoll.aggregation.grid import grid_exponent, grid_scale, mean_from_grid
from atoll.aggregation.integers import apply_mean, rounded_mean, sum_dtype, weighted_sum
from atoll.aggregation.kernel import add_within_for
from atoll.aggregation.layout import FLOATS, Layout, Piece, Tensor, in_order
from atoll.aggregation.optimizers import Optimizer
from atoll.aggregation.sources import Scaled, Source
from atoll.aggregation.step import AGGREGATE, Slot, Step
from atoll.aggregation.tensorfile import NUMPY_DTYPES, TensorFileWriter, parse_header, read_metadata

TILE_ELEMENTS = 1 << 17
"""Elements that one thread folds at once: a tile's sum and scratch stay in its cache, 2.5 MiB with the block read."""

FILES_OPEN_MAX = 256
"""Updates whose files stay open; those of the others are opened at each read."""

WEIGHT_MAX = 1 << 53
"""Largest weight: the largest that every float64 up to it holds exactly."""


@dataclass(frozen=True, slots=True)
class Weighted:
    """One update of the round.

    weight: in 1..2^53 (`weights.integer_weights`). factor: in [0, 1], what its floats are multiplied with so that they
    stay within the bound of the norm (`robust.clip_factors`); the weight counts in full. trained_factor: in [0, 1], the
    same for what is trained alone (`weights.normalized`).
    """

    update: StoredUpdate
    weight: int
    factor: float = 1.0
    trained_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Folded:
    """What a fold has written."""

    pieces: tuple[Piece, ...]
    """Of the new version: one for each tensor, in canonical order."""
    slots: Mapping[str, tuple[Piece, ...]]
    """Of each slot's file, in the same order."""


def fold(
    base: Path,
    updates: Sequence[Weighted],
    out: Path,
    *,
    step: Step = Step(),  # noqa: B008 - a value
    tile_elements: int = TILE_ELEMENTS,
    threads: int = 1,
    between: Callable[[], None] | None = None,
) -> Folded:
    """Write the version that follows `base` to `out`, atomically and durably.

    Args:
        base: the global model that the updates are added to: a safetensors file, floats as F32.
        updates: K >= 1 accepted updates (covered, sound, with recorded magnitudes), in any order; for a rule in the
            order of their client ids.
        out: where the new version appears, with the base's metadata.
        step: the rule and the server optimizer; left out: the exact mean is added.
        tile_elements: elements that one thread finishes at once.
        threads: how many tiles are folded at the same time; this thread writes the finished ones meanwhile.
        between: called before each tile is written; what it raises ends the fold, and `out` does not appear.

    Returns:
        The manifests of the new version and of the slots.

    Raises:
        ValueError: no updates, or too few for the rule, a weight or a factor out of range, a base with other floats
            than F32, an update with a tensor of another kind or without its magnitude, a value that is not finite or
            beyond the recorded magnitude, or a new value that leaves its dtype.
        TensorFileCorrupted: a file is shorter than it should be, or the base has a broken header.
    """
    layout, _ = parse_header(base)
    _check(layout, updates, base)
    with ExitStack() as stack:
        masters = stack.enter_context(UpdateReader(stored_model(base)))
        slots = [stack.enter_context(Slot(name, step, layout)) for name in step.slots]
        terms = [
            _Term(stack.enter_context(UpdateReader(item.update, keep_open=k < FILES_OPEN_MAX)), item)
            for k, item in enumerate(updates)
        ]
        writer = stack.enter_context(TensorFileWriter(out, layout, metadata=read_metadata(base)))
        mean_of = _mean_by(step, layout, terms, slots, threads)
        tiles = _tiles(layout, masters, terms, slots, mean_of, step, tile_elements)
        finished = stack.enter_context(closing(computed_ahead(tiles, threads=threads)))  # before a file is closed
        for moved, parts in finished:
            if between is not None:
                between()
            for file, part in zip((writer, *(slot.writer for slot in moved)), parts, strict=True):
                file.append(part)
        of_slots = {slot.name: slot.writer.finish() for slot in slots}
        return Folded(writer.finish(), of_slots)


def _tiles(
    layout: Layout,
    masters: UpdateReader,
    terms: "list[_Term]",
    slots: list[Slot],
    mean_of: "_MeanOf",
    step: Step,
    tile_elements: int,
) -> "Iterator[tuple[list[Slot], Callable[[], _Parts]]]":
    """Every tile of the new version, in canonical order: the slots that move with it, and the work."""
    for tensor in in_order(layout):
        carrying = [term for term in terms if term.carries(tensor.name)]
        moved = [slot for slot in slots if slot.carries(tensor.name)]
        if not carrying:
            rule = _staying_rule(tensor, [masters, *moved])
        elif tensor.dtype in FLOATS:
            optimizer = step.optimizer if step.is_trained(tensor) else None
            rule = _float_rule(tensor, masters, mean_of(tensor, carrying), moved, optimizer)
        else:
            rule = _integer_rule(tensor, masters, carrying)
        for start, stop in _ranges(0, tensor.num_elements, tile_elements):
            yield moved, partial(rule, start, stop)


@dataclass(frozen=True, slots=True)
class _Term:
    """An update that is being folded."""

    reader: UpdateReader
    item: Weighted

    def carries(self, tensor: str) -> bool:
        """Whether the update has this tensor."""
        return self.reader.carries(tensor)

    def magnitude(self, tensor: Tensor) -> float | int:
        """What the proof of `grid` rests on. NaN is within nothing."""
        return self.item.update.magnitudes[tensor.name]

    def read(self, tensor: Tensor, start: int, stop: int) -> NDArray[Any]:
        """A block within the recorded magnitude."""
        block = self.reader.read(tensor, start, stop)
        low, high = block.min().item(), block.max().item()
        if not -self.magnitude(tensor) <= low <= high <= self.magnitude(tensor):
            raise self.beyond(tensor, block)
        return block

    def beyond(self, tensor: Tensor, block: NDArray[Any]) -> ValueError:
        """What to raise about a block that is not."""
        return ValueError(
            f"update {self.item.update.path}: tensor {tensor.name!r} has values in {block.min()}..{block.max()}, "
            f"beyond its recorded magnitude {self.magnitude(tensor)}"
        )


_Parts = tuple[NDArray[Any], ...]
"""New values of some elements of one tensor, and of its slots."""

_TileRule = Callable[[int, int], _Parts]
"""(start, stop) -> what becomes of these elements of one tensor."""

_Mean = Callable[[int, int], NDArray[np.float64]]
"""(start, stop) -> the mean update of these elements of one tensor, or what a rule makes in its place."""

_MeanOf = Callable[[Tensor, list[_Term]], _Mean]
"""(a float tensor, the updates that carry it) -> their mean."""


def _mean_by(step: Step, layout: Layout, terms: list[_Term], slots: list[Slot], threads: int) -> _MeanOf:
    """The exact weighted mean, or a rule, which may first look at how the updates lie to each other."""
    if step.rule is None:
        return partial(_exact_mean, step)
    rule = step.rule
    centre = next((slot for slot in slots if slot.name == AGGREGATE), None)
    by_name: dict[str, Source] = {str(term.item.update.path): Scaled(term, term.item.factor) for term in terms}
    mixing = mixing_for(rule, layout, by_name, centre=centre, threads=threads)

    def mean_of(tensor: Tensor, carrying: list[_Term]) -> _Mean:
        sources: list[Source] = [Scaled(term, term.item.factor) for term in carrying]
        if centre is not None:
            sources.append(centre)
        return lambda start, stop: combine(tensor, start, stop, sources, rule, mixing)

    return mean_of


def _exact_mean(step: Step, tensor: Tensor, terms: list[_Term]) -> _Mean:
    is_trained = step.is_trained(tensor)
    weights = [term.item.weight for term in terms]
    divisor = sum(weights)
    if step.is_control(tensor):
        assert step.num_clients is not None
        weights, divisor = [1] * len(terms), step.num_clients
    factors = [term.item.factor * (term.item.trained_factor if is_trained else 1.0) for term in terms]
    # of what is added, so that an update that is scaled down to nothing takes no bits from the others
    magnitude = max(term.magnitude(tensor) * factor for term, factor in zip(terms, factors, strict=True))
    exponent = grid_exponent(magnitude, total_weight=sum(weights), count=len(terms))
    scales = [grid_scale(weight, exponent) * factor for weight, factor in zip(weights, factors, strict=True)]
    add_within = add_within_for(tensor.num_elements * len(terms))

    def mean(start: int, stop: int) -> NDArray[np.float64]:
        total = np.zeros(stop - start)
        for term, scale in zip(terms, scales, strict=True):
            block = term.reader.read(tensor, start, stop)
            if not add_within(total, block, scale, term.magnitude(tensor)):
                raise term.beyond(tensor, block)
        mean = mean_from_grid(total, exponent, total_weight=divisor)
        return mean if step.scale == 1.0 or not is_trained else np.multiply(mean, step.scale, out=mean)

    return mean


def _staying_rule(tensor: Tensor, files: Sequence[UpdateReader | Slot]) -> _TileRule:
    dtype = NUMPY_DTYPES[tensor.dtype]
    return lambda start, stop: tuple(file.read(tensor, start, stop).astype(dtype, copy=False) for file in files)


def _float_rule(
    tensor: Tensor, masters: UpdateReader, mean_of: _Mean, slots: list[Slot], optimizer: Optimizer | None
) -> _TileRule:
    what = f"tensor {tensor.name!r}: "

    def new_values(start: int, stop: int) -> _Parts:
        mean = mean_of(start, stop)
        master = masters.read(tensor, start, stop)
        state = {slot.name: slot.read(tensor, start, stop).astype(np.float64) for slot in slots}
        if AGGREGATE in state:
            state[AGGREGATE] = mean.copy()
        if optimizer is None:
            new = np.add(master, mean, out=mean)
        else:
            new = optimizer.apply(master.astype(np.float64), mean, state)
        kept = (_float32(values, what + name) for name, values in state.items())
        return (_float32(new, what + "new values"), *kept)

    return new_values


def _float32(values: NDArray[np.float64], what: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    if not np.isfinite(rounded).all():
        raise ValueError(f"{what} in {values.min()}..{values.max()} leave float32")
    return rounded


def _integer_rule(tensor: Tensor, masters: UpdateReader, terms: list[_Term]) -> _TileRule:
    total_weight = sum(term.item.weight for term in terms)
    dtype = sum_dtype(int(max(term.magnitude(tensor) for term in terms)), total_weight=total_weight)

    def new_values(start: int, stop: int) -> _Parts:
        blocks = ((term.read(tensor, start, stop), term.item.weight) for term in terms)
        mean = rounded_mean(weighted_sum(blocks, stop - start, dtype=dtype), total_weight=total_weight)
        try:
            return (apply_mean(masters.read(tensor, start, stop), mean, NUMPY_DTYPES[tensor.dtype]),)
        except ValueError as fault:
            raise ValueError(f"tensor {tensor.name!r}: {fault}") from fault

    return new_values


def _check(layout: Layout, updates: Sequence[Weighted], base: Path) -> None:
    if not updates:
        raise ValueError("no updates to fold")
    tensors = {tensor.name: tensor for tensor in layout}
    for tensor in layout:
        if tensor.dtype in FLOATS and tensor.dtype != "F32":
            raise ValueError(f"base {base}: tensor {tensor.name!r} is {tensor.dtype}, masters are F32")
    for item in updates:
        _check_numbers(item)
        for piece in item.update.pieces:
            expected = tensors.get(piece.tensor)
            if expected is None or (piece.dtype != expected.dtype and not {piece.dtype, expected.dtype} <= FLOATS):
                kind = "no such tensor" if expected is None else expected.dtype
                raise ValueError(f"update {item.update.path}: {piece.dtype} {piece.tensor!r}, the base has {kind}")
            if piece.tensor not in item.update.magnitudes:
                raise ValueError(f"update {item.update.path}: tensor {piece.tensor!r} has no recorded magnitude")


def _check_numbers(item: Weighted) -> None:
    if not 1 <= item.weight <= WEIGHT_MAX:
        raise ValueError(f"update {item.update.path}: weight {item.weight} is not in 1..{WEIGHT_MAX}")
    for factor in (item.factor, item.trained_factor):
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"update {item.update.path}: factor {factor} is not in [0, 1]")


def _ranges(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + step, stop)) for begin in range(start, stop, step))
