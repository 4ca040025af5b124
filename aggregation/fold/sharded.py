"""The fold on several ranks: each has the updates of its clients, and owns a part of the model.

    rank 0:  own updates --> sum of tile t of every rank's part --+                +--> tile t of its part: mean,
    rank 1:  own updates --> sum of tile t of every rank's part --+-- all-to-all --+    optimizer, its shard
    ...                                                                            +--> ...

Every rank sums its updates over all parts, tile by tile, sends each owner its share, adds the shares for the part that
it owns and finishes it as `streaming` does. Sums lie on the same grid at every rank (`means.Total` covers all updates),
so they add without rounding: the shards, one after the other, have the bits that one rank makes. A rank sends (N-1)/N
of one accumulator of the model, 8 bytes for each float, whatever the number of clients; no rank holds a whole one.

A rule needs every update of an element: then the ranks exchange the updates' values, (N-1)/N of them.

The parts of one update may lie at several ranks. A missing part counts as zero, which adds exactly; the divisor covers
all updates (`means.Total`). So the bits are the same wherever the parts are.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from atoll.aggregation.fold.exchange import NOTHING, Bytes, Exchange, swapped
from atoll.aggregation.fold.execution import Execution
from atoll.aggregation.fold.fedasync import drawn
from atoll.aggregation.fold.means import ExactMean, IntegerMean, Term, Total, Weighted
from atoll.aggregation.fold.prepared import check_whole, prepared, whole_tensors
from atoll.aggregation.fold.sharded_rules import Gathered, gram_of_ranks, mixing_of_ranks, num_updates_in
from atoll.aggregation.fold.step import AGGREGATE, Slot, Step
from atoll.aggregation.fold.streaming import Folded, check_updates, opened, written
from atoll.aggregation.fold.tiles import Mean, Parts, float_rule, integer_rule, staying_rule
from atoll.aggregation.ordered_map import computed_ahead
from atoll.tensors.layout import FLOATS, Layout, Piece, Tensor
from atoll.tensors.ownership import owned_pieces
from atoll.tensors.pieces import cut_layout, first_element, piece_bytes_of
from atoll.tensors.safetensors_file import TensorFileWriter, read_metadata
from atoll.tensors.updates.reader import UpdateReader, stored_shard

TILE_ELEMENTS = 1 << 18
"""Number of elements of every rank's part that are exchanged at once: 2 MiB to each."""


@dataclass(frozen=True, slots=True)
class Cohort:
    """The facts about all updates of the round that every rank knows."""

    totals: Mapping[str, Total]
    """The totals by tensor (`means.totals_of`); no entry for a tensor that no update carries."""
    places: tuple[tuple[int, ...], ...]
    """The places of each rank's updates, in the rank's order, among all updates in the order of the client ids: 0 to K
    - 1. An update whose parts are spread is at each rank that has one of them."""
    omitted: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """The places (0 to K - 1) of the updates that leave a tensor out, by tensor."""


def fold_shard(
    layout: Layout,
    base: Path,
    updates: Sequence[Weighted],
    out: Path,
    *,
    cohort: Cohort,
    exchange: Exchange,
    step: Step = Step(),  # noqa: B008 - a value
    execution: Execution = Execution(),  # noqa: B008 - a value
) -> Folded:
    """Write this rank's shard of the next version to `out`, atomically and durably, together with all other ranks.

    Args:
        layout: the whole model's tensors.
        base: this rank's shard of the global model: the pieces of `ownership.owned_pieces`, floats as F32.
        updates: the accepted updates at this rank, or its parts of them (`StoredUpdate.is_partial`), possibly none; in
            the order of their client ids.
        out: the file of the new shard, which gets the base's metadata.
        cohort: the cohort of all ranks, the same at each.
        exchange: the exchange with the other ranks, each of which folds the same round with the same arguments.
        step: the rule, the server optimizer, and the files of this rank's shards of the slots.
        execution: threads, tiles, device of this rank.

    Returns:
        The pieces of the shards.

    Raises:
        ExchangeBroken: another rank is gone or has failed.
        ValueError, TensorFileCorrupted: as `streaming.fold`.
    """
    pieces = tuple(cut_layout(layout, piece_bytes_of(layout)))
    parts = [owned_pieces(pieces, rank, exchange.size) for rank in range(exchange.size)]
    check_updates(layout, updates, base)
    check_whole(step, layout, Counter(piece.tensor for piece in pieces))
    with ExitStack() as stack:
        owned = parts[exchange.rank]
        inputs = _opened(layout, base, updates, owned, step, stack)
        writer = stack.enter_context(TensorFileWriter(out, layout, metadata=read_metadata(base), pieces=owned))
        sums = _Sums(layout, cohort, step, inputs, exchange, execution)
        tile_elements = sums.tile_elements(execution.tile_elements or TILE_ELEMENTS)
        tiles = [list(tiles_of(layout, of_rank, tile_elements, step)) for of_rank in parts]
        ready = stack.enter_context(closing(swapped(tiles, sums.share, exchange, threads=execution.threads)))
        jobs = ((sums.moved(tile.tensor), partial(sums.finish, tile, shares)) for tile, shares in ready)
        finished = stack.enter_context(closing(computed_ahead(jobs, threads=execution.threads)))
        return written(finished, writer, inputs.slots, execution.between)


@dataclass(frozen=True, slots=True)
class _Inputs:
    """The open files of a fold at this rank."""

    terms: list[Term]
    """The updates at this rank."""
    masters: UpdateReader
    """This rank's shard of the base."""
    slots: list[Slot]
    """This rank's shards of the slots."""
    older: UpdateReader | None
    """This rank's shard of the step's anchor, if the step has one."""


def _opened(
    layout: Layout, base: Path, updates: Sequence[Weighted], owned: Sequence[Piece], step: Step, stack: ExitStack
) -> _Inputs:
    """Open all inputs, which the exit stack closes."""
    masters = stack.enter_context(UpdateReader(stored_shard(base, owned)))
    slots = [stack.enter_context(Slot(name, step, layout, owned)) for name in step.slots]
    terms = opened(updates, stack)
    older = None
    if step.anchor is not None:
        older = stack.enter_context(UpdateReader(stored_shard(step.anchor.version, owned)))
    return _Inputs(terms, masters, slots, older)


@dataclass(frozen=True, slots=True)
class Tile:
    """A range of elements of one tensor."""

    tensor: Tensor
    start: int
    stop: int


def tiles_of(layout: Layout, pieces: Sequence[Piece], tile_elements: int, step: Step) -> Iterator[Tile]:
    """Yield the tiles of a rank's pieces, in their order."""
    tensors, needs_whole = {tensor.name: tensor for tensor in layout}, whole_tensors(step)
    for piece in pieces:
        begin = first_element(piece, tensors[piece.tensor])
        end = begin + piece.num_elements
        is_whole = needs_whole and step.is_trained(tensors[piece.tensor])
        elements = max(1, end - begin) if is_whole else tile_elements
        for start in range(begin, end, elements):
            yield Tile(tensors[piece.tensor], start, min(start + elements, end))


class _Sums:
    """The shares of this rank in every tile, and the new values of the tiles that it owns."""

    def __init__(
        self,
        layout: Layout,
        cohort: Cohort,
        step: Step,
        inputs: _Inputs,
        exchange: Exchange,
        execution: Execution,
    ) -> None:
        self._cohort, self._step, self._inputs, self._device = cohort, step, inputs, execution.device
        self._places = cohort.places, cohort.omitted
        self._centre = next((slot for slot in inputs.slots if slot.name == AGGREGATE), None)
        self._step = prepared(step, layout, partial(self._gram_of, exchange, execution.threads), exchange)
        self._mixing = None
        if step.rule is not None:
            self._mixing = mixing_of_ranks(
                step.rule,
                layout,
                inputs.terms,
                self._places,
                self._centre,
                exchange,
                threads=execution.threads,
                place=step.place,
            )
        self._means: dict[str, ExactMean | IntegerMean | Gathered | None] = {t.name: self._mean_of(t) for t in layout}

    def _gram_of(self, exchange: Exchange, threads: int, layout: Layout) -> NDArray[Any]:
        return gram_of_ranks(layout, self._inputs.terms, self._places, exchange, threads=threads)

    def _mean_of(self, tensor: Tensor) -> ExactMean | IntegerMean | Gathered | None:
        total = self._cohort.totals.get(tensor.name)
        if total is None:
            return None
        carrying = [term for term in self._inputs.terms if term.carries(tensor.name)]
        if tensor.dtype not in FLOATS:
            return IntegerMean(tensor, total, carrying)
        if self._step.rule is None:
            return ExactMean(self._step, tensor, total, carrying, self._device)
        terms = self._inputs.terms
        return Gathered(self._step.rule, tensor, terms, self._places, self._centre, self._mixing, self._step.place)

    def tile_elements(self, wanted: int) -> int:
        """Return the number of elements of a tile; for a rule, which exchanges all values, at most 2^22 / K."""
        if self._step.rule is None:
            return wanted
        num_updates = num_updates_in(self._cohort.places)
        return min(wanted, 1 << max(0, ((1 << 22) // max(num_updates, 1)).bit_length() - 1))

    def moved(self, tensor: Tensor) -> list[Slot]:
        """Return the optimizer slots whose values the fold updates together with a tensor."""
        return [slot for slot in self._inputs.slots if slot.carries(tensor.name)]

    def share(self, tile: Tile) -> NDArray[Any]:
        """Return this rank's partial sum of a tile, for the rank that owns the tile."""
        mean = self._means[tile.tensor.name]
        return NOTHING if mean is None else mean.share(tile.start, tile.stop)

    def finish(self, tile: Tile, shares: Sequence[Bytes]) -> Parts:
        """Return the tile's new values from the shares of all ranks."""
        tensor, mean, moved = tile.tensor, self._means[tile.tensor.name], self.moved(tile.tensor)
        masters, older, anchor = self._inputs.masters, self._inputs.older, self._step.anchor
        if mean is None:
            rule = staying_rule(tensor, [masters, *moved])
        elif isinstance(mean, IntegerMean):
            rule = integer_rule(tensor, masters, partial(mean.joined, shares))
        else:
            mean_of: Mean = partial(mean.joined, shares)
            if older is not None and anchor is not None:
                mean_of = drawn(mean_of, tensor, masters, older, anchor.share)
            rule = float_rule(tensor, masters, mean_of, moved, self._step)
        return rule(tile.start, tile.stop)
