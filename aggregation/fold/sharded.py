"""The fold on several ranks: each has the updates of its own clients, and owns a part of the model.

    rank 0:  own updates --> sum of tile t of every rank's part --+                +--> tile t of its part: mean,
    rank 1:  own updates --> sum of tile t of every rank's part --+-- all-to-all --+    optimizer, its shard
    ...                                                                            +--> ...

Every rank sums what its updates say about all parts, tile by tile, hands each owner the owner's share, adds what comes
for its own part and finishes it as `fold` does. Sums lie on the same grid at every rank (`means.Total` is of all
updates), so they add without rounding: the shards, one after the other, have the bits that one rank makes. A rank
sends (N-1)/N of one accumulator of the model, 8 bytes for each float, whatever the number of clients; nobody holds one.

A rule needs every update of an element: there the ranks hand each other the updates' own values, (N-1)/N of them.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from atoll.aggregation.fold.device import Device
from atoll.aggregation.fold.exchange import NOTHING, Bytes, Exchange, swapped
from atoll.aggregation.fold.fedasync import drawn
from atoll.aggregation.fold.means import ExactMean, IntegerMean, Term, Total, Weighted
from atoll.aggregation.fold.sharded_rules import Gathered, mixing_of_ranks
from atoll.aggregation.fold.step import AGGREGATE, Slot, Step
from atoll.aggregation.fold.streaming import Folded, check_updates, opened, written
from atoll.aggregation.fold.tiles import Mean, Parts, float_rule, integer_rule, staying_rule
from atoll.aggregation.ordered_map import computed_ahead
from atoll.aggregation.tensors.layout import FLOATS, Layout, Piece, Tensor
from atoll.aggregation.tensors.ownership import owned_pieces
from atoll.aggregation.tensors.pieces import cut_layout, first_element, piece_bytes_of
from atoll.aggregation.tensors.safetensors_file import TensorFileWriter, read_metadata
from atoll.aggregation.updates.reader import UpdateReader, stored_shard

TILE_ELEMENTS = 1 << 18
"""Elements of every rank's part that are exchanged at once: 2 MiB to each."""


@dataclass(frozen=True, slots=True)
class Cohort:
    """What every rank knows of all updates of the round."""

    totals: Mapping[str, Total]
    """By tensor (`means.totals_of`); a tensor that no update carries has none."""
    places: tuple[tuple[int, ...], ...]
    """Of each rank's updates, in its own order: their places in the order of all client ids, 0 to K - 1."""
    omitted: Mapping[str, frozenset[int]] = field(default_factory=dict)
    """The places of the updates that leave a tensor out."""


def fold_shard(
    layout: Layout,
    base: Path,
    updates: Sequence[Weighted],
    out: Path,
    *,
    cohort: Cohort,
    exchange: Exchange,
    step: Step = Step(),  # noqa: B008 - a value
    tile_elements: int = TILE_ELEMENTS,
    threads: int = 1,
    between: Callable[[], None] | None = None,
    device: Device | None = None,
) -> Folded:
    """Write this rank's shard of the next version to `out`, atomically and durably, together with all other ranks.

    Args:
        layout: the whole model's tensors.
        base: this rank's shard of the global model: the pieces of `segments.owned_pieces`, floats as F32.
        updates: the accepted updates that lie here, perhaps none; for a rule in the order of their client ids.
        out: where the new shard appears, with the base's metadata.
        cohort: of all ranks, the same at each.
        exchange: with the other ranks, each of which folds the same round with the same arguments.
        step: the rule, the server optimizer, and where this rank's shards of the slots lie.
        tile_elements: the same at each rank.
        threads: how many tiles are computed at the same time; this thread exchanges and writes meanwhile.
        between: called before each tile is written; what it raises ends the fold, and `out` does not appear.
        device: where this rank sums its own float updates, as in `fold.fold`.

    Returns:
        The pieces of the shards.

    Raises:
        ExchangeBroken: another rank is gone or has failed.
        ValueError, TensorFileCorrupted: as `fold.fold`.
    """
    pieces = tuple(cut_layout(layout, piece_bytes_of(layout)))
    parts = [owned_pieces(pieces, rank, exchange.size) for rank in range(exchange.size)]
    check_updates(layout, updates, base)
    with ExitStack() as stack:
        own = parts[exchange.rank]
        masters = stack.enter_context(UpdateReader(stored_shard(base, own)))
        slots = [stack.enter_context(Slot(name, step, layout, own)) for name in step.slots]
        terms = opened(updates, stack)
        writer = stack.enter_context(TensorFileWriter(out, layout, metadata=read_metadata(base), pieces=own))
        older = None
        if step.anchor is not None:
            older = stack.enter_context(UpdateReader(stored_shard(step.anchor.version, own)))
        sums = _Sums(layout, cohort, step, terms, slots, masters, older, exchange, threads, device)
        tiles = [list(_tiles(layout, of_rank, sums.tile_elements(tile_elements))) for of_rank in parts]
        ready = stack.enter_context(closing(swapped(tiles, sums.share, exchange, threads=threads)))
        jobs = ((sums.moved(tile.tensor), partial(sums.finish, tile, shares)) for tile, shares in ready)
        finished = stack.enter_context(closing(computed_ahead(jobs, threads=threads)))
        return written(finished, writer, slots, between)


@dataclass(frozen=True, slots=True)
class _Tile:
    """Some elements of one tensor."""

    tensor: Tensor
    start: int
    stop: int


def _tiles(layout: Layout, pieces: Sequence[Piece], tile_elements: int) -> Iterator[_Tile]:
    tensors = {tensor.name: tensor for tensor in layout}
    for piece in pieces:
        begin = first_element(piece, tensors[piece.tensor])
        end = begin + piece.num_elements
        for start in range(begin, end, tile_elements):
            yield _Tile(tensors[piece.tensor], start, min(start + tile_elements, end))


class _Sums:
    """What this rank says about a tile, and what becomes of a tile when all ranks have said it."""

    def __init__(
        self,
        layout: Layout,
        cohort: Cohort,
        step: Step,
        terms: Sequence[Term],
        slots: list[Slot],
        masters: UpdateReader,
        older: UpdateReader | None,
        exchange: Exchange,
        threads: int,
        device: Device | None,
    ) -> None:
        self._cohort, self._step, self._terms, self._slots, self._masters = cohort, step, terms, slots, masters
        self._older, self._rule, self._device = older, step.rule, device
        self._centre = next((slot for slot in slots if slot.name == AGGREGATE), None)
        self._mixing = None
        if step.rule is not None:
            places = cohort.places, cohort.omitted
            self._mixing = mixing_of_ranks(step.rule, layout, terms, places, self._centre, exchange, threads=threads)
        self._means: dict[str, ExactMean | IntegerMean | Gathered | None] = {t.name: self._mean_of(t) for t in layout}

    def _mean_of(self, tensor: Tensor) -> ExactMean | IntegerMean | Gathered | None:
        total = self._cohort.totals.get(tensor.name)
        if total is None:
            return None
        carrying = [term for term in self._terms if term.carries(tensor.name)]
        if tensor.dtype not in FLOATS:
            return IntegerMean(tensor, total, carrying)
        if self._rule is None:
            return ExactMean(self._step, tensor, total, carrying, self._device)
        places = self._cohort.places, self._cohort.omitted
        return Gathered(self._rule, tensor, carrying, places, self._centre, self._mixing)

    def tile_elements(self, wanted: int) -> int:
        """So many that the values of all updates are few enough, where they are exchanged."""
        if self._rule is None:
            return wanted
        num_updates = sum(map(len, self._cohort.places))
        return min(wanted, 1 << max(0, ((1 << 22) // max(num_updates, 1)).bit_length() - 1))

    def moved(self, tensor: Tensor) -> list[Slot]:
        """The slots that move with a tensor."""
        return [slot for slot in self._slots if slot.carries(tensor.name)]

    def share(self, tile: _Tile) -> NDArray[Any]:
        """What this rank's updates say about a tile, for its owner."""
        mean = self._means[tile.tensor.name]
        return NOTHING if mean is None else mean.share(tile.start, tile.stop)

    def finish(self, tile: _Tile, shares: Sequence[Bytes]) -> Parts:
        """The tile's new values."""
        tensor, mean, moved = tile.tensor, self._means[tile.tensor.name], self.moved(tile.tensor)
        if mean is None:
            rule = staying_rule(tensor, [self._masters, *moved])
        elif isinstance(mean, IntegerMean):
            rule = integer_rule(tensor, self._masters, partial(mean.joined, shares))
        else:
            optimizer = self._step.optimizer if self._step.is_trained(tensor) else None
            mean_of: Mean = partial(mean.joined, shares)
            if self._older is not None and self._step.anchor is not None:
                mean_of = drawn(mean_of, tensor, self._masters, self._older, self._step.anchor.share)
            rule = float_rule(tensor, self._masters, mean_of, moved, optimizer)
        return rule(tile.start, tile.stop)
