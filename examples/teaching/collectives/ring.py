"""Collectives on a ring: each rank sends to its right neighbour only, and all links are busy all the time.

A tensor of M bytes is cut into n chunks, whose lengths differ by one element at most. With n = 4, the
chunks c0 to c3, and a + for a partial sum:

    reduce-scatter     rank 0         rank 1         rank 2         rank 3
    step 0             sends c3 ->    sends c0 ->    sends c1 ->    sends c2 ->  (to rank 0)
                       c2+ here       c3+ here       c0+ here       c1+ here     2 terms each
    step 1             sends c2+ ->   sends c3+ ->   sends c0+ ->   sends c1+ -> 3 terms
    step 2             sends c1+ ->   sends c2+ ->   sends c3+ ->   sends c0+ -> 4 terms: done
    now rank r has     c0             c1             c2             c3

    all-gather         each rank passes on, n - 1 times, the chunk that it has received last

Each half sends (n-1)/n M bytes from each rank, so the all-reduce 2 (n-1)/n M: less than 2 M for any number of ranks.

Source: Patarasuk and Yuan, "Bandwidth Optimal All-reduce Algorithms for Clusters of Workstations", JPDC 2009.
"""

import torch

from examples.teaching.collectives.wire import Wire


def all_reduce(wire: Wire, tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum over the ranks, on every rank: reduce-scatter, then all-gather. 2 (n-1)/n M bytes from each."""
    chunks = chunks_of(tensor, wire.size)
    _reduce_scatter(wire, chunks)
    _all_gather(wire, chunks)
    return torch.cat(chunks).view_as(tensor)


def reduce_scatter(wire: Wire, tensor: torch.Tensor) -> torch.Tensor:
    """Return, on rank r, chunk r of the flat sum over the ranks. (n-1)/n M bytes from each."""
    chunks = chunks_of(tensor, wire.size)
    _reduce_scatter(wire, chunks)
    return chunks[wire.rank]


def all_gather(wire: Wire, chunk: torch.Tensor) -> torch.Tensor:
    """Return (n, ...) every rank's tensor, of one shape on all, on every rank. Each rank sends (n-1) of them."""
    chunks = [
        chunk.clone().view(-1) if rank == wire.rank else chunk.new_empty(chunk.numel()) for rank in range(wire.size)
    ]
    _all_gather(wire, chunks)
    return torch.stack(chunks).view(wire.size, *chunk.shape)


def broadcast(wire: Wire, tensor: torch.Tensor, root: int, num_pieces: int = 8) -> torch.Tensor:
    """Return the root's tensor on every rank; the others need to know its shape and dtype.

    A pipeline: piece after piece goes from neighbour to neighbour: while the last rank receives the first
    piece, the root sends a later one.

        root -> root + 1 -> ... -> root - 1         M bytes from each rank but the last, which sends nothing
    """
    pieces = chunks_of(tensor, num_pieces)
    right, left = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
    sends = []
    for piece in pieces:
        if wire.rank != root:
            wire.receive(piece, left)()
        if right != root:
            sends.append(wire.send(piece, right))
    for wait in sends:
        wait()
    return torch.cat(pieces).view_as(tensor)


def chunks_of(tensor: torch.Tensor, num_chunks: int) -> list[torch.Tensor]:
    """Return the flat tensor in `num_chunks` parts, copied; some are empty if there are fewer elements."""
    return list(tensor.detach().clone().view(-1).tensor_split(num_chunks))


def _reduce_scatter(wire: Wire, chunks: list[torch.Tensor]) -> None:
    right, left = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
    for step in range(wire.size - 1):
        leaving, arriving = (wire.rank - step - 1) % wire.size, (wire.rank - step - 2) % wire.size
        received = torch.empty_like(chunks[arriving])
        wire.exchange(chunks[leaving], right, received, left)
        chunks[arriving] += received


def _all_gather(wire: Wire, chunks: list[torch.Tensor]) -> None:
    right, left = (wire.rank + 1) % wire.size, (wire.rank - 1) % wire.size
    for step in range(wire.size - 1):
        leaving, arriving = (wire.rank - step) % wire.size, (wire.rank - step - 1) % wire.size
        wire.exchange(chunks[leaving], right, chunks[arriving], left)
