"""Which pieces of a model belong together: 64 runs of pieces, a function of its layout alone.

Aggregation ranks own whole segments, and sums that are not exact are taken segment by segment: so their bits depend
neither on the number of ranks nor on who adds.
"""

from collections.abc import Iterable, Sequence

from atoll.aggregation.tensors.layout import Layout, Piece
from atoll.aggregation.tensors.pieces import cut_layout, piece_bytes_of

SEGMENTS = 64
"""As many as there may be ranks."""


def segments_of(layout: Layout) -> tuple[tuple[Piece, ...], ...]:
    """The pieces of each segment, without digests, in canonical order; a small model leaves most segments empty."""
    return _segments(tuple(cut_layout(layout, piece_bytes_of(layout))))


def _segments(pieces: Sequence[Piece]) -> tuple[tuple[Piece, ...], ...]:
    """A piece belongs to segment floor(64 b / B): b is the byte where it begins, B the bytes of all."""
    total, begin = sum(piece.num_bytes for piece in pieces), 0
    segments: list[list[Piece]] = [[] for _ in range(SEGMENTS)]
    for piece in pieces:
        segments[min(begin * SEGMENTS // max(total, 1), SEGMENTS - 1)].append(piece)
        begin += piece.num_bytes
    return tuple(map(tuple, segments))


def owned_segments(rank: int, size: int) -> range:
    """The segments of one of `size` ranks.

    Raises:
        ValueError: there are more ranks than segments, or the rank is none of them.
    """
    if not 1 <= size <= SEGMENTS:
        raise ValueError(f"{size} aggregation ranks; allowed: 1 to {SEGMENTS}")
    if not 0 <= rank < size:
        raise ValueError(f"rank {rank} is not in 0..{size - 1}")
    return range(rank * SEGMENTS // size, (rank + 1) * SEGMENTS // size)


def owned_pieces(pieces: Iterable[Piece], rank: int, size: int) -> tuple[Piece, ...]:
    """Those of a model's pieces that one of `size` ranks owns: a run of the model's bytes, perhaps an empty one.

    Args:
        pieces: of the whole model, in canonical order, with or without digests.
        rank: which of them.
        size: how many ranks there are.
    """
    segments = _segments(tuple(pieces))
    return tuple(piece for index in owned_segments(rank, size) for piece in segments[index])
