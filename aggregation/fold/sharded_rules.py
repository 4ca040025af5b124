"""Robust rules over updates at several ranks: the owner of an element gathers every update's value of it.

The parts of one update may lie at several ranks. Each sends the values that it has of the tile, with zeros elsewhere;
at most one rank has bits other than zero for an element, so that their bitwise or is the update's value.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from itertools import chain, compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from atoll.aggregation.fold.exchange import Bytes, Exchange, from_all, swapped
from atoll.aggregation.fold.means import Term
from atoll.aggregation.ordered_map import computed_ahead
from atoll.aggregation.rules.combine import combine
from atoll.aggregation.rules.gram import Tile, float_tiles, products
from atoll.aggregation.rules.rule import GeometricRule, Rule, check_count, takes_centre
from atoll.ground.printable import count_of
from atoll.plugins.place import NOWHERE, Place
from atoll.tensors.layout import FLOATS, Layout, Tensor
from atoll.tensors.ownership import owned_segments, segments_of
from atoll.tensors.updates.sources import Scaled, Source

Places = tuple[Sequence[Sequence[int]], Mapping[str, frozenset[int]]]
"""The places of each rank's updates in the order of all client ids, and of the updates that leave a tensor out
(`sharded.Cohort`)."""

Array = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Gathered:
    """The result of a rule for one float tensor, from the values of all ranks."""

    rule: Rule
    tensor: Tensor
    terms: Sequence[Term]
    places: Places
    centre: Source | None
    mixing: Array | None
    place: Place = NOWHERE

    def share(self, start: int, stop: int) -> NDArray[np.float32]:
        """Return the values of elements start..stop of this rank's updates; see `rows_of`."""
        return rows_of(self.terms, self.tensor, start, stop)

    def joined(self, parts: Sequence[Bytes], start: int, stop: int) -> Array:
        """Apply the rule to elements start..stop, from the blocks of all ranks."""
        blocks = in_places(parts, self.places, self.tensor, stop - start)
        sources: list[Source] = [_Block(block, start) for block in blocks]
        if self.centre is not None:
            sources.append(self.centre)
        return combine(self.tensor, start, stop, sources, self.rule, self.mixing, place=self.place)


def rows_of(terms: Sequence[Term], tensor: Tensor, start: int, stop: int) -> NDArray[np.float32]:
    """Return the values of k updates in their form on the wire, in one dimension.

    First come k flags, 1 for an update with values here in these n elements; then n values of each flagged update.
    """
    here = [term.reader.meets(tensor, start, stop) for term in terms]
    shares = np.empty(len(terms) + sum(here) * (stop - start), np.float32)
    shares[: len(terms)] = here
    rows = shares[len(terms) :].reshape(sum(here), stop - start)
    for row, term in zip(rows, compress(terms, here), strict=True):
        Scaled(term, term.item.factor).read(tensor, start, stop, row)
    return shares


def in_places(parts: Sequence[Bytes], places: Places, tensor: Tensor, num_elements: int) -> list[NDArray[np.float32]]:
    """Return the blocks of all updates that carry the tensor, in the order of their client ids."""
    of_ranks, omitted = places
    found: dict[int, NDArray[np.float32]] = {}
    for part, of_rank in zip(parts, of_ranks, strict=True):
        shares = part.view(np.float32)
        here = shares[: len(of_rank)].astype(bool).tolist()
        rows = shares[len(of_rank) :].reshape(sum(here), num_elements)
        for place, row in zip(compress(of_rank, here), rows, strict=True):
            found[place] = _either(found[place], row) if place in found else row
    carrying = set(chain(*of_ranks)) - omitted.get(tensor.name, frozenset())
    return [found[place] if place in found else np.zeros(num_elements, np.float32) for place in sorted(carrying)]


def _either(one: NDArray[np.float32], other: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the merged values of two parts of an update; where one is not zero, the other has no bit set."""
    return np.bitwise_or(one.view(np.uint32), other.view(np.uint32)).view(np.float32)


def num_updates_in(of_ranks: Iterable[Iterable[int]]) -> int:
    """Return the number of updates, from each rank's places: an update in parts is at several ranks."""
    return len(set(chain(*of_ranks)))


@dataclass(frozen=True, slots=True)
class _Block:
    """The values of some elements of one update, as a source."""

    values: NDArray[np.float32]
    begin: int

    def carries(self, tensor: str) -> bool:
        return True

    def read(self, tensor: Tensor, start: int, stop: int, out: NDArray[Any] | None = None) -> NDArray[Any]:
        block = np.empty(stop - start, np.float32) if out is None else out
        block[:] = self.values[start - self.begin : stop - self.begin]
        return block


def mixing_of_ranks(
    rule: Rule,
    layout: Layout,
    terms: Sequence[Term],
    places: Places,
    centre: Source | None,
    exchange: Exchange,
    *,
    threads: int,
    place: Place = NOWHERE,
) -> Array | None:
    """Return the mixing matrix of the updates of all ranks (`combine.mixing_for`), the same at each rank.

    Raises:
        ValueError: as `combine.mixing_for`.
        ExchangeBroken: another rank is gone.
    """
    num_updates = num_updates_in(places[0])
    check_count(rule, num_updates)
    if not isinstance(rule, GeometricRule):
        return None
    with_centre = centre if takes_centre(rule) else None
    gram = gram_of_ranks(layout, terms, places, exchange, threads=threads, centre=with_centre)
    mixing = rule.mixing(gram, place) if exchange.rank == 0 else np.zeros((0, len(gram)))
    return from_all(exchange, mixing)[0].view(np.float64).reshape(-1, len(gram))


def gram_of_ranks(
    layout: Layout,
    terms: Sequence[Term],
    places: Places,
    exchange: Exchange,
    *,
    threads: int,
    centre: Source | None = None,
) -> Array:
    """Return the Gram matrix of `gram.gram_matrix`; each rank computes the segments that it owns.

    Raises:
        ValueError: an update leaves out a float tensor.
        ExchangeBroken: another rank is gone.
    """
    num_updates = num_updates_in(places[0])
    for tensor in layout:
        if tensor.dtype in FLOATS and (left_out := places[1].get(tensor.name)):
            what = f"{len(left_out)} of {count_of(num_updates, 'update')} leave out tensor {tensor.name!r}"
            raise ValueError(f"{what}, this rule needs all of them")
    num_sources = num_updates + (centre is not None)
    owned, size = owned_segments(exchange.rank, exchange.size), exchange.size
    tiles = [list(_tiles_of(layout, owned_segments(rank, size), num_sources)) for rank in range(size)]

    def multiply(tile: Tile, shares: Sequence[Bytes]) -> Array:
        tensor, start, stop = tile
        blocks = in_places(shares, places, tensor, stop - start)
        return products(blocks if centre is None else [*blocks, centre.read(tensor, start, stop)])

    sums = np.zeros((len(owned), num_sources, num_sources))
    with closing(swapped(tiles, lambda item: rows_of(terms, *item[1]), exchange, threads=threads)) as ready:
        jobs = ((index, partial(multiply, tile, shares)) for (index, tile), shares in ready)
        with closing(computed_ahead(jobs, threads=threads)) as finished:
            for index, found in finished:
                sums[index - owned.start] += found
    gram = np.zeros((num_sources, num_sources))
    for part in from_all(exchange, sums):
        for of_segment in part.view(np.float64).reshape(-1, num_sources, num_sources):
            gram += of_segment
    return gram


def _tiles_of(layout: Layout, segments: range, num_sources: int) -> Iterator[tuple[int, Tile]]:
    """Yield the tiles of some segments, each with the number of its segment."""
    of_layout = segments_of(layout)
    for index in segments:
        yield from ((index, tile) for tile in float_tiles(layout, of_layout[index], num_sources))
