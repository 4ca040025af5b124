"""Fold, don't collect: the exact weighted mean of stored updates, block by block, into the next model version.

    base file ---------------------------+
    update 1 --block--> add on the grid  |
    update 2 --block-->      ...         +--> base + mean --block--> new file
    update K --block-->      ...

One block of each update after the other is read, added and forgotten: memory is a few blocks, whatever the size of
the model or of the cohort.

    mean = sum_k w_k u_k / sum_k w_k                        over the updates that carry the tensor
    new  = float32(apply(float64(base), mean))              floats that are trained (`optimizers`)
    new  = float32(float64(base) + mean)                    other floats; the base holds all floats as F32
    new  = base + round_half_even(mean)                     integers, exactly (`integers`)

A tensor that no update carries stays. Float sums are exact on a grid that depends on the set of updates alone
(`grid`), hence the bits of the result depend neither on the order of the updates nor on blocks, threads, or the boxes
into which an update was cut.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1. The paper averages models; averaging updates is equal when all start from one global model.
"""

from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.blocks import StoredUpdate, UpdateReader
from atoll.aggregation.grid import grid_exponent, grid_scale, mean_from_grid
from atoll.aggregation.integers import apply_mean, rounded_mean, sum_dtype, weighted_sum
from atoll.aggregation.kernel import add_within_for
from atoll.aggregation.layout import FLOATS, Layout, Piece, Tensor, in_order
from atoll.aggregation.optimizers import FedAvg, Optimizer
from atoll.aggregation.tensorfile import NUMPY_DTYPES, TensorFileWriter, parse_header, read_metadata

TILE_ELEMENTS = 1 << 17
"""Elements that one thread folds at once: a tile's sum and scratch stay in its cache, 2.5 MiB with the block read."""

FILES_OPEN_MAX = 256
"""Updates whose files stay open; those of the others are opened at each read."""

_Tag = TypeVar("_Tag")
_Result = TypeVar("_Result")

WEIGHT_MAX = 1 << 53
"""Largest weight: the largest that every float64 up to it holds exactly."""


@dataclass(frozen=True, slots=True)
class Weighted:
    """One update of the mean, with its weight in 1..2^53 (`weights.integer_weights`)."""

    update: StoredUpdate
    weight: int


@dataclass(frozen=True, slots=True)
class Step:
    """How the mean moves the model, and where the optimizer's slots lie: a safetensors file for each.

    The slots of the trained tensors that `base` has are read from `before` (without them: as the optimizer begins) and
    those of the new version appear in `after`, before the new version does.
    """

    optimizer: Optimizer
    trained: Container[str]
    """Names of the float tensors that the optimizer moves; the others follow the mean."""
    before: Mapping[str, Path] = field(default_factory=dict)
    after: Mapping[str, Path] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Folded:
    """What a fold has written."""

    pieces: tuple[Piece, ...]
    """Of the new version: one for each tensor, in canonical order."""
    slots: Mapping[str, tuple[Piece, ...]]
    """Of each slot's file, in the same order."""


PLAIN = Step(FedAvg(), frozenset())
"""Every tensor follows the mean."""


def fold(
    base: Path,
    updates: Sequence[Weighted],
    out: Path,
    *,
    step: Step = PLAIN,
    tile_elements: int = TILE_ELEMENTS,
    threads: int = 1,
    between: Callable[[], None] | None = None,
) -> Folded:
    """Write the version that follows `base` to `out`, atomically and durably.

    Args:
        base: the global model that the updates are added to: a safetensors file, floats as F32.
        updates: K >= 1 accepted updates (covered, sound, with recorded magnitudes), in any order.
        out: where the new version appears, with the base's metadata.
        step: the server optimizer; left out: the mean is added.
        tile_elements: elements that one thread finishes at once.
        threads: how many tiles are folded at the same time; this thread writes the finished ones meanwhile.
        between: called before each tile is written; what it raises ends the fold, and `out` does not appear.

    Returns:
        The manifests of the new version and of the slots.

    Raises:
        ValueError: no updates, a weight out of range, a base with other floats than F32, an update with a tensor of
            another kind or without its magnitude, a value that is not finite or beyond the recorded magnitude, or a
            new value that leaves its dtype.
        TensorFileCorrupted: a file is shorter than it should be, or the base has a broken header.
    """
    layout, data_start = parse_header(base)
    _check(layout, updates, base)
    whole = tuple(Piece(t.name, t.dtype, (0,) * len(t.shape), t.shape, "") for t in layout)
    with ExitStack() as stack:
        masters = stack.enter_context(UpdateReader(StoredUpdate(base, whole, data_start=data_start)))
        slots = [stack.enter_context(_Slot(name, step, layout)) for name in step.optimizer.slots]
        terms = [
            _Term(stack.enter_context(UpdateReader(item.update, keep_open=k < FILES_OPEN_MAX)), item)
            for k, item in enumerate(updates)
        ]
        pool = stack.enter_context(ThreadPoolExecutor(threads))
        writer = stack.enter_context(TensorFileWriter(out, layout, metadata=read_metadata(base)))
        tiles = _tiles(layout, masters, terms, slots, step, tile_elements)
        for moved, parts in _computed_ahead(pool, tiles, depth=2 * threads):
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
    slots: "list[_Slot]",
    step: Step,
    tile_elements: int,
) -> "Iterator[tuple[list[_Slot], Callable[[], tuple[NDArray[Any], ...]]]]":
    """Every tile of the new version, in canonical order: the slots that move with it, and the work."""
    for tensor in in_order(layout):
        carrying = [term for term in terms if term.reader.carries(tensor.name)]
        optimizer, moved = (step.optimizer, slots) if _is_trained(tensor, step) else (None, [])
        rule = _rule_for(tensor, masters, carrying, moved, optimizer)
        for start, stop in _ranges(0, tensor.num_elements, tile_elements):
            yield moved, partial(rule, start, stop)


def _computed_ahead(
    pool: Executor, jobs: "Iterable[tuple[_Tag, Callable[[], _Result]]]", *, depth: int
) -> "Iterator[tuple[_Tag, _Result]]":
    """The results in the order of the jobs, of which never more than `depth` are under way or finished."""
    ahead: deque[tuple[_Tag, Future[_Result]]] = deque()
    try:
        for tag, job in jobs:
            ahead.append((tag, pool.submit(job)))
            if len(ahead) == depth:
                first, future = ahead.popleft()
                yield first, future.result()
        for first, future in ahead:
            yield first, future.result()
    finally:
        for _, future in ahead:
            future.cancel()


@dataclass(frozen=True, slots=True)
class _Term:
    """An update that is being folded."""

    reader: UpdateReader
    item: Weighted

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


class _Slot:
    """One moment of the optimizer: of the base's version, and of the new one."""

    def __init__(self, name: str, step: Step, layout: Layout) -> None:
        self.name, self._init = name, step.optimizer.init(name)
        trained = tuple(Tensor(t.name, "F32", t.shape) for t in layout if _is_trained(t, step))
        self.writer = TensorFileWriter(step.after[name], trained)
        self._reader: UpdateReader | None = None
        if name in step.before:
            _, data_start = parse_header(step.before[name])
            whole = tuple(Piece(t.name, "F32", (0,) * len(t.shape), t.shape, "") for t in in_order(trained))
            self._reader = UpdateReader(StoredUpdate(step.before[name], whole, data_start=data_start))

    def read(self, tensor: Tensor, start: int, stop: int) -> NDArray[np.float64]:
        if self._reader is None:
            return np.full(stop - start, self._init)
        return self._reader.read(tensor, start, stop).astype(np.float64)

    def __enter__(self) -> Self:
        self.writer.__enter__()
        if self._reader is not None:
            self._reader.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.writer.__exit__(kind, error, trace)
        if self._reader is not None:
            self._reader.__exit__(kind, error, trace)


def _is_trained(tensor: Tensor, step: Step) -> bool:
    return tensor.dtype in FLOATS and tensor.name in step.trained


_Rule = Callable[[int, int], tuple[NDArray[Any], ...]]
"""(start, stop) -> the new values of these elements of one tensor, and of its slots."""

_Mean = Callable[[int, int], NDArray[np.float64]]
"""(start, stop) -> the mean update of these elements of one tensor."""


def _rule_for(
    tensor: Tensor, masters: UpdateReader, terms: list[_Term], slots: list[_Slot], optimizer: Optimizer | None
) -> _Rule:
    if not terms:
        return _staying_rule(tensor, [masters, *slots])
    if tensor.dtype not in FLOATS:
        return _integer_rule(tensor, masters, terms)
    mean = _exact_mean(tensor, terms)
    return (
        _adding_rule(tensor, masters, mean)
        if optimizer is None
        else _optimizer_rule(tensor, masters, mean, slots, optimizer)
    )


def _staying_rule(tensor: Tensor, files: Sequence[UpdateReader | _Slot]) -> _Rule:
    dtype = NUMPY_DTYPES[tensor.dtype]
    return lambda start, stop: tuple(file.read(tensor, start, stop).astype(dtype, copy=False) for file in files)


def _exact_mean(tensor: Tensor, terms: list[_Term]) -> _Mean:
    total_weight, magnitude = _weight_and_magnitude(tensor, terms)
    exponent = grid_exponent(magnitude, total_weight=total_weight, count=len(terms))
    scales = [grid_scale(term.item.weight, exponent) for term in terms]
    add_within = add_within_for(tensor.num_elements * len(terms))

    def mean(start: int, stop: int) -> NDArray[np.float64]:
        total = np.zeros(stop - start)
        for term, scale in zip(terms, scales, strict=True):
            block = term.reader.read(tensor, start, stop)
            if not add_within(total, block, scale, term.magnitude(tensor)):
                raise term.beyond(tensor, block)
        return mean_from_grid(total, exponent, total_weight=total_weight)

    return mean


def _weight_and_magnitude(tensor: Tensor, terms: list[_Term]) -> tuple[int, float | int]:
    total_weight = sum(term.item.weight for term in terms)
    return total_weight, max(term.item.update.magnitudes[tensor.name] for term in terms)


def _adding_rule(tensor: Tensor, masters: UpdateReader, mean: _Mean) -> _Rule:
    def new_values(start: int, stop: int) -> tuple[NDArray[Any], ...]:
        values = mean(start, stop)
        np.add(masters.read(tensor, start, stop), values, out=values)
        return (_float32(values, f"tensor {tensor.name!r}: new values"),)

    return new_values


def _optimizer_rule(
    tensor: Tensor, masters: UpdateReader, mean: _Mean, slots: list[_Slot], optimizer: Optimizer
) -> _Rule:
    def new_values(start: int, stop: int) -> tuple[NDArray[Any], ...]:
        master = masters.read(tensor, start, stop).astype(np.float64)
        state = {slot.name: slot.read(tensor, start, stop) for slot in slots}
        new = optimizer.apply(master, mean(start, stop), state)
        moments = (_float32(values, f"tensor {tensor.name!r}: {name}") for name, values in state.items())
        return (_float32(new, f"tensor {tensor.name!r}: new values"), *moments)

    return new_values


def _float32(values: NDArray[np.float64], what: str) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float32)
    if not np.isfinite(rounded).all():
        raise ValueError(f"{what} in {values.min()}..{values.max()} leave float32")
    return rounded


def _integer_rule(tensor: Tensor, masters: UpdateReader, terms: list[_Term]) -> _Rule:
    total_weight, magnitude = _weight_and_magnitude(tensor, terms)
    dtype = sum_dtype(int(magnitude), total_weight=total_weight)

    def new_values(start: int, stop: int) -> tuple[NDArray[Any], ...]:
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
        if not 1 <= item.weight <= WEIGHT_MAX:
            raise ValueError(f"update {item.update.path}: weight {item.weight} is not in 1..{WEIGHT_MAX}")
        for piece in item.update.pieces:
            expected = tensors.get(piece.tensor)
            if expected is None or (piece.dtype != expected.dtype and not {piece.dtype, expected.dtype} <= FLOATS):
                kind = "no such tensor" if expected is None else expected.dtype
                raise ValueError(f"update {item.update.path}: {piece.dtype} {piece.tensor!r}, the base has {kind}")
            if piece.tensor not in item.update.magnitudes:
                raise ValueError(f"update {item.update.path}: tensor {piece.tensor!r} has no recorded magnitude")


def _ranges(start: int, stop: int, step: int) -> Iterator[tuple[int, int]]:
    return ((begin, min(begin + step, stop)) for begin in range(start, stop, step))
