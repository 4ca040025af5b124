"""The ownership of a model's pieces by rank: 64 segments, each a run of pieces, a function of the layout alone.

Aggregation ranks own whole segments, and sums that are not exact are taken segment by segment: so their bits depend
neither on the number of ranks nor on the rank that adds.
"""

from collections.abc import Iterable, Sequence

from atoll.ground.printable import count_of
from atoll.tensors.layout import Layout, Piece
from atoll.tensors.pieces import cut_layout, piece_bytes_of

SEGMENTS = 64
"""The number of segments, and the largest number of ranks."""


def segments_of(layout: Layout) -> tuple[tuple[Piece, ...], ...]:
    """Return the pieces of each segment, without digests, in canonical order; of a small model most are empty."""
    return _segments(tuple(cut_layout(layout, piece_bytes_of(layout))))


def _segments(pieces: Sequence[Piece]) -> tuple[tuple[Piece, ...], ...]:
    """Put each piece into segment floor(64 b / B): b is its first byte, B the number of bytes of all pieces."""
    total, begin = sum(piece.num_bytes for piece in pieces), 0
    segments: list[list[Piece]] = [[] for _ in range(SEGMENTS)]
    for piece in pieces:
        segments[min(begin * SEGMENTS // max(total, 1), SEGMENTS - 1)].append(piece)
        begin += piece.num_bytes
    return tuple(map(tuple, segments))


def owned_segments(rank: int, size: int) -> range:
    """Return the segments of one of `size` ranks.

    Raises:
        ValueError: the number of ranks or the rank is out of its range.
    """
    if not 1 <= size <= SEGMENTS:
        raise ValueError(f"{count_of(size, 'aggregation rank')}; allowed: 1 to {SEGMENTS}")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in 0..{size - 1}")
    return range(rank * SEGMENTS // size, (rank + 1) * SEGMENTS // size)


def owned_pieces(pieces: Iterable[Piece], rank: int, size: int) -> tuple[Piece, ...]:
    """Return the pieces of a model that one of `size` ranks owns: a run of the model's bytes, possibly empty.

    Args:
        pieces: the whole model's, in canonical order, with or without digests.
        rank: the number of the rank, in 0..size - 1.
        size: the number of ranks.

    Raises:
        ValueError: as `owned_segments`.
    """
    segments = _segments(tuple(pieces))
    return tuple(piece for index in owned_segments(rank, size) for piece in segments[index])
