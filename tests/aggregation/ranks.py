"""Aggregation ranks as threads of one process, and what they make together."""

import threading
from collections.abc import Callable, Container, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from atoll.aggregation.fold.exchange import Bytes, ExchangeBroken
from atoll.aggregation.fold.means import Weighted, totals_of
from atoll.aggregation.fold.sharded import Cohort, fold_shard
from atoll.aggregation.fold.step import Step
from atoll.aggregation.fold.streaming import Folded
from atoll.tensors import safetensors_file
from atoll.tensors.layout import Layout, Piece
from atoll.tensors.ownership import owned_pieces
from atoll.tensors.pieces import cut_layout, first_element, piece_bytes_of
from atoll.tensors.updates.reader import UpdateReader, stored_model
from tests.waiting import BOUND_S


class Threads:
    """The exchange of one rank among threads; counts what it sends to others."""

    def __init__(self, rank: int, table: list[Sequence[Bytes]], barrier: threading.Barrier) -> None:
        self.rank, self.size = rank, len(table)
        self._table, self._barrier = table, barrier
        self.sent_bytes = 0

    def swap(self, parts: Sequence[Bytes]) -> list[Bytes]:
        """Swap through a barrier of threads; see `Exchange.swap`."""
        assert len(parts) == self.size
        self.sent_bytes += sum(part.nbytes for rank, part in enumerate(parts) if rank != self.rank)
        try:
            self._table[self.rank] = parts
            self._barrier.wait(BOUND_S)
            received = [of_rank[self.rank].copy() for of_rank in self._table]
            self._barrier.wait(BOUND_S)
        except threading.BrokenBarrierError as error:
            raise ExchangeBroken("a rank is gone") from error
        return received

    def leave(self) -> None:
        """Let the others know that this rank is gone."""
        self._barrier.abort()


def on_ranks(size: int, work: Callable[[Threads], Any]) -> list[Any]:
    """Return the results of all ranks' work, or raise the first failure that is not another rank's."""
    table: list[Sequence[Bytes]] = [[] for _ in range(size)]
    barrier = threading.Barrier(size)

    def guarded(rank: int) -> Any:
        exchange = Threads(rank, table, barrier)
        try:
            return work(exchange)
        except Exception as error:
            exchange.leave()
            return error

    with ThreadPoolExecutor(size) as pool:
        results = list(pool.map(guarded, range(size)))
    failures = [result for result in results if isinstance(result, Exception)]
    for failure in sorted(failures, key=lambda error: isinstance(error, ExchangeBroken)):
        raise failure
    return results


def write_shards(source: Path, layout: Layout, size: int, name: Callable[[int], Path]) -> None:
    """Cut a whole file into the shards of `size` ranks."""
    with UpdateReader(stored_model(source)) as reader:
        for rank in range(size):
            pieces = [
                p
                for p in owned_pieces(cut_layout(layout, piece_bytes_of(layout)), rank, size)
                if reader.carries(p.tensor)
            ]
            tensors = {tensor.name: tensor for tensor in layout}
            with safetensors_file.TensorFileWriter(
                name(rank), layout, metadata=safetensors_file.read_metadata(source), pieces=pieces
            ) as writer:
                for piece in pieces:
                    writer.append(_values(reader, piece, tensors[piece.tensor]))
                writer.finish(durable=False)


def _values(reader: UpdateReader, piece: Piece, tensor: Any) -> Any:
    begin = first_element(piece, tensor)
    block = reader.read(tensor, begin, begin + piece.num_elements)
    return block.astype(safetensors_file.NUMPY_DTYPES[piece.dtype])


def cohort_of(
    updates: Sequence[Weighted], ranks: Sequence[int], layout: Layout, size: int, trained: Container[str]
) -> Cohort:
    """Return the knowledge of all ranks, when update k lies at rank ranks[k]."""
    places = tuple(tuple(k for k, rank in enumerate(ranks) if rank == r) for r in range(size))
    carried = [{piece.tensor for piece in item.update.pieces} for item in updates]
    omitted = {
        t.name: frozenset(k for k, names in enumerate(carried) if t.name not in names)
        for t in layout
        if any(t.name not in names for names in carried)
    }
    return Cohort(totals_of(layout, ((item, item.carried) for item in updates), trained), places, omitted)


def fold_on_ranks(
    layout: Layout,
    base: Callable[[int], Path],
    updates: Sequence[Weighted],
    ranks: Sequence[int],
    size: int,
    *,
    out: Callable[[int], Path],
    step: Callable[[int], Step],
    **options: Any,
) -> list[Folded]:
    """Fold with update k at rank ranks[k]."""
    cohort = cohort_of(updates, ranks, layout, size, step(0).trained)

    def work(exchange: Threads) -> Folded:
        rank = exchange.rank
        own = [updates[place] for place in cohort.places[rank]]
        return fold_shard(
            layout, base(rank), own, out(rank), cohort=cohort, exchange=exchange, step=step(rank), **options
        )

    return on_ranks(size, work)
