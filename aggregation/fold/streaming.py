"""Fold, don't collect: the exact weighted mean of stored updates, block by block, into the next model version.

    base file ---------------------------+
    update 1 --block--> add on the grid  |
    update 2 --block-->      ...         +--> base + mean --block--> new file
    update K --block-->      ...

One block of each update after the other is read, added and dropped: memory is a few blocks, whatever the size of the
model or of the cohort.

    mean = sum_k w_k u_k / sum_k w_k                        over the updates that carry the tensor, or a rule (`rules`)
    mean = scale sum_k w_k f_k u_k / sum_k w_k              of trained floats under FedNova (`weights.normalized`)
    mean = sum_k u_k / N                                    of SCAFFOLD's control variates, N clients in all
    new  = float32(apply(float64(base), mean))              floats that are trained (`optimizers`)
    new  = float32(float64(base) + mean)                    other floats; the base holds all floats as F32
    new  = base + round_half_even(mean)                     integers, exactly (`integers`)

With an anchor (`step`) the mean of floats is first pulled by its share of the difference from the base to an older
version.

A tensor that no update carries stays. Float sums are exact on a grid that depends on the set of updates alone
(`grid`), hence the bits of the result depend neither on the order of the updates nor on blocks, threads, or the boxes
into which an update was cut.

Source: McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data", AISTATS 2017,
Algorithm 1. The paper averages models; averaging updates is equal when all start from one global model.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.fold import device
from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.fedasync import drawn
from atoll.aggregation.fold.means import ExactMean, IntegerMean, Term, Total, Weighted, totals_of
from atoll.aggregation.fold.prepared import prepared, whole_tensors
from atoll.aggregation.fold.step import AGGREGATE, Anchor, Slot, Step
from atoll.aggregation.fold.tiles import Mean, Parts, float_rule, integer_rule, staying_rule
from atoll.aggregation.fold.weights import is_integer_weight
from atoll.aggregation.ordered_map import computed_ahead
from atoll.aggregation.rules.combine import Scratch, combine, mixing_for
from atoll.aggregation.rules.gram import gram_matrix
from atoll.tensors.layout import FLOATS, Layout, Piece, Tensor, in_order, update_dtypes
from atoll.tensors.pieces import cut_layout, piece_bytes_of
from atoll.tensors.safetensors_file import TensorFileWriter, parse_header, read_metadata
from atoll.tensors.updates.reader import StoredUpdate, UpdateReader, stored_model
from atoll.tensors.updates.sources import Scaled, Source

TILE_ELEMENTS = 1 << 19
"""Number of elements that one thread folds at once, 10 MiB with sum and base. Each update's 2 MiB of it are one read:
after shorter reads Linux counts the pages as often used, keeps them, and if memory is scarce evicts pages that it has
read ahead, and reads them again."""

FILES_OPEN_MAX = 256
"""Number of updates whose files stay open; the files of further updates are opened at each read."""


@dataclass(frozen=True, slots=True)
class Folded:
    """The pieces that a fold has written."""

    pieces: tuple[Piece, ...]
    """The pieces of the new version, cut by `pieces.cut_layout`, in canonical order."""
    slots: Mapping[str, tuple[Piece, ...]]
    """The pieces of each slot's file, cut as the model's tensors are."""


def fold(
    base: Path,
    updates: Sequence[Weighted],
    out: Path,
    *,
    step: Step = Step(),  # noqa: B008 - a value
    execution: Execution = Execution(),  # noqa: B008 - a value
    durable: bool = True,
) -> Folded:
    """Write the version that follows `base` to `out`, atomically and, unless durable=False, durably.

    Args:
        base: the global model to which the updates are added: a safetensors file, floats as F32.
        updates: K >= 1 accepted updates (covered, sound, with recorded magnitudes), in any order; for a rule in the
            order of their client ids.
        out: the file of the new version, which gets the base's metadata.
        step: the rule and the server optimizer; left out: the exact mean is added.
        execution: threads, tiles, device.
        durable: sync the files before returning.

    Returns:
        The pieces of the new version and of the slots.

    Raises:
        ValueError: no updates, or too few for the rule; a weight or a factor out of range; a base with other floats
            than F32; an update with a tensor of another kind or without its magnitude; a value that is not finite or
            beyond the recorded magnitude; or a new value that leaves its dtype.
        TensorFileCorrupted: a file is shorter than it should be, or the base has a broken header.
    """
    layout, _ = parse_header(base)
    pieces = tuple(cut_layout(layout, piece_bytes_of(layout)))
    if not updates:
        raise ValueError("no updates to fold")
    check_updates(layout, updates, base)
    with ExitStack() as stack:
        masters = stack.enter_context(UpdateReader(stored_model(base)))
        slots = [stack.enter_context(Slot(name, step, layout, pieces)) for name in step.slots]
        terms = opened(updates, stack)
        step = prepared(step, layout, partial(_gram_of, terms, execution.threads))
        writer = stack.enter_context(TensorFileWriter(out, layout, metadata=read_metadata(base), pieces=pieces))
        mean_of = _drawn(step.anchor, _mean_by(step, layout, terms, slots, execution), layout, masters, stack)
        tiles = _tiles(layout, masters, terms, slots, mean_of, step, _tile_elements(step, execution))
        finished = computed_ahead(tiles, threads=execution.threads)
        stack.enter_context(closing(finished))  # last, so that its jobs end before a file is closed
        return written(finished, writer, slots, execution.between, durable=durable)


def _gram_of(terms: Sequence[Term], threads: int, layout: Layout) -> NDArray[np.float64]:
    sources: dict[str, Source] = {str(term.item.update.path): Scaled(term, term.item.factor) for term in terms}
    return gram_matrix(layout, sources, threads=threads)


def opened(updates: Sequence[Weighted], stack: ExitStack) -> list[Term]:
    """Open the updates which the exit stack closes; if there are many, files are opened at each read."""
    readers = opened_readers([item.update for item in updates], stack)
    return [Term(reader, item) for reader, item in zip(readers, updates, strict=True)]


def opened_readers(updates: Sequence[StoredUpdate], stack: ExitStack) -> list[UpdateReader]:
    """Open stored updates which the exit stack closes; if there are many, files are opened at each read."""
    up_to = accumulate(max(1, len(update.parts)) for update in updates)
    return [
        stack.enter_context(UpdateReader(update, keep_open=num_files <= FILES_OPEN_MAX))
        for num_files, update in zip(up_to, updates, strict=True)
    ]


def written(
    finished: Iterable[tuple[list[Slot], Parts]],
    writer: TensorFileWriter,
    slots: Sequence[Slot],
    between: Callable[[], None] | None,
    *,
    durable: bool = True,
) -> Folded:
    """Write the tiles in order, each with its slots; then give the files their names, the slots first."""
    for moved, parts in finished:
        if between is not None:
            between()
        for file, part in zip((writer, *(slot.writer for slot in moved)), parts, strict=True):
            file.append(part)
    slot_pieces = {slot.name: slot.writer.finish(durable=durable) for slot in slots}
    return Folded(writer.finish(durable=durable), slot_pieces)


def _tiles(
    layout: Layout,
    masters: UpdateReader,
    terms: list[Term],
    slots: list[Slot],
    mean_of: "_MeanOf",
    step: Step,
    tile_elements: int,
) -> "Iterator[tuple[list[Slot], Callable[[], Parts]]]":
    """Yield every tile of the new version, in canonical order: its optimizer slots, and the job that computes it."""
    totals = totals_of(layout, ((term.item, term.item.carried) for term in terms), step.trained)
    for tensor in in_order(layout):
        carrying = [term for term in terms if term.carries(tensor.name)]
        moved = [slot for slot in slots if slot.carries(tensor.name)]
        if not carrying:
            rule = staying_rule(tensor, [masters, *moved])
        elif tensor.dtype in FLOATS:
            rule = float_rule(tensor, masters, mean_of(tensor, totals[tensor.name], carrying), moved, step)
        else:
            rule = integer_rule(tensor, masters, IntegerMean(tensor, totals[tensor.name], carrying))
        is_whole = step.is_trained(tensor) and whole_tensors(step)
        elements = max(1, tensor.num_elements) if is_whole else tile_elements
        for start in range(0, tensor.num_elements, elements):
            yield moved, partial(rule, start, min(start + elements, tensor.num_elements))


_MeanOf = Callable[[Tensor, Total, list[Term]], Mean]
"""(a float tensor, the total of its updates, the updates that carry it) -> the mean."""


def _tile_elements(step: Step, execution: Execution) -> int:
    is_on_device = execution.device is not None and step.rule is None
    return execution.tile_elements or (device.TILE_ELEMENTS if is_on_device else TILE_ELEMENTS)


def _mean_by(step: Step, layout: Layout, terms: list[Term], slots: list[Slot], execution: Execution) -> _MeanOf:
    """Return the exact weighted mean, or a rule, which may first read all updates for its mixing matrix."""
    if step.rule is None:
        return partial(ExactMean, step, device=execution.device)
    rule, scratch = step.rule, Scratch()
    centre = next((slot for slot in slots if slot.name == AGGREGATE), None)
    by_name: dict[str, Source] = {str(term.item.update.path): Scaled(term, term.item.factor) for term in terms}
    mixing = mixing_for(rule, layout, by_name, centre=centre, threads=execution.threads, place=step.place)

    def mean_of(tensor: Tensor, _: Total, carrying: list[Term]) -> Mean:
        sources: list[Source] = [Scaled(term, term.item.factor) for term in carrying]
        if centre is not None:
            sources.append(centre)
        return lambda start, stop: combine(
            tensor, start, stop, sources, rule, mixing, scratch=scratch, place=step.place
        )

    return mean_of


def _drawn(anchor: Anchor | None, mean_of: _MeanOf, layout: Layout, masters: UpdateReader, stack: ExitStack) -> _MeanOf:
    """Return the function of means, pulled towards the step's anchor (an older version) if it has one."""
    if anchor is None:
        return mean_of
    if parse_header(anchor.version)[0] != layout:
        raise ValueError(f"anchor {anchor.version}: its tensors are not the base's")
    older, share = stack.enter_context(UpdateReader(stored_model(anchor.version))), anchor.share
    return lambda tensor, total, carrying: drawn(mean_of(tensor, total, carrying), tensor, masters, older, share)


def check_updates(layout: Layout, updates: Sequence[Weighted], base: Path) -> None:
    """Raise ValueError if updates cannot be added to the base (no updates, other dtypes, ...)."""
    tensors = {tensor.name: tensor for tensor in layout}
    for tensor in layout:
        if tensor.dtype in FLOATS and tensor.dtype != "F32":
            raise ValueError(f"base {base}: tensor {tensor.name!r} is {tensor.dtype}, masters are F32")
    for item in updates:
        _check_numbers(item)
        for piece in item.update.pieces:
            expected = tensors.get(piece.tensor)
            if expected is None or piece.dtype not in update_dtypes(expected.dtype):
                kind = "no such tensor" if expected is None else expected.dtype
                raise ValueError(f"update {item.update.path}: {piece.dtype} {piece.tensor!r}, the base has {kind}")
            if piece.tensor not in item.update.magnitudes:
                raise ValueError(f"update {item.update.path}: tensor {piece.tensor!r} has no recorded magnitude")


def _check_numbers(item: Weighted) -> None:
    if not is_integer_weight(item.weight):
        raise ValueError(
            f"update {item.update.path}: weight {item.weight} is no integer >= 1 that float64 holds exactly"
        )
    for factor in (item.factor, item.trained_factor):
        if not 0.0 <= factor <= 1.0:
            raise ValueError(f"update {item.update.path}: factor {factor} is not in [0, 1]")
