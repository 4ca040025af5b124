"""Pieces of a model: bounded, in the order of the bytes, and nothing but a function of the layout."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.tensors.layout import ITEM_BYTES, Tensor, pieces_in_order
from atoll.tensors.pieces import (
    PIECE_BYTES_MIN,
    PIECES_WANTED,
    cut,
    cut_layout,
    first_element,
    num_cuts,
    piece_bytes_of,
)

shapes = st.lists(st.integers(0, 7), max_size=4).map(tuple)
tensors = st.builds(Tensor, st.just("w"), st.sampled_from(sorted(ITEM_BYTES)), shapes)


@given(tensor=tensors, piece_bytes=st.integers(8, 400))
def test_pieces_follow_each_other_and_cover_the_tensor(tensor: Tensor, piece_bytes: int) -> None:
    flat = np.arange(tensor.num_elements).reshape(tensor.shape)
    found = []
    for piece in cut(tensor, piece_bytes):
        box = flat[tuple(slice(o, o + n) for o, n in zip(piece.offsets, piece.lengths, strict=True))]
        assert box.size == piece.num_elements
        if box.size:
            assert first_element(piece, tensor) == box.reshape(-1)[0]
        found.append(box.reshape(-1))
    np.testing.assert_array_equal(np.concatenate(found), flat.reshape(-1))


@given(tensor=tensors, piece_bytes=st.integers(8, 400))
def test_no_piece_is_larger_than_allowed_and_few_are_small(tensor: Tensor, piece_bytes: int) -> None:
    pieces = list(cut(tensor, piece_bytes))
    assert num_cuts(tensor, piece_bytes) == len(pieces)
    assert all(piece.num_bytes <= piece_bytes for piece in pieces)
    if tensor.num_bytes <= piece_bytes:
        assert len(pieces) == 1
    else:  # every run of an axis ends with one piece that may be small; the others are more than half full
        full = [piece for piece in pieces if 2 * piece.num_bytes > piece_bytes]
        assert len(pieces) <= 2 * len(full) + math.prod(tensor.shape[:-1])


@given(layout=st.lists(tensors, max_size=4, unique_by=lambda t: t.name), piece_bytes=st.integers(8, 100))
def test_they_stand_in_canonical_order(layout: list[Tensor], piece_bytes: int) -> None:
    pieces = tuple(cut_layout(tuple(layout), piece_bytes))
    assert pieces_in_order(pieces) == pieces


@pytest.mark.parametrize(
    ("num_bytes", "piece_bytes"),
    [(0, 1 << 22), (100 << 20, 1 << 22), (16 << 30, 1 << 22), ((16 << 30) + 8, 1 << 23), (280 * 10**9, 1 << 27)],
)
def test_the_size_of_a_piece_grows_with_the_model(num_bytes: int, piece_bytes: int) -> None:
    layout = (Tensor("w", "F32", (num_bytes // 8, 2)),)
    assert piece_bytes_of(layout) == piece_bytes
    assert piece_bytes == PIECE_BYTES_MIN or num_bytes > PIECES_WANTED * piece_bytes / 2


def test_a_tensor_whose_rows_are_too_long_is_cut_within_them() -> None:
    pieces = [(p.offsets, p.lengths) for p in cut(Tensor("w", "F32", (2, 5, 3)), 24)]
    assert pieces == [
        ((0, 0, 0), (1, 2, 3)),
        ((0, 2, 0), (1, 2, 3)),
        ((0, 4, 0), (1, 1, 3)),
        ((1, 0, 0), (1, 2, 3)),
        ((1, 2, 0), (1, 2, 3)),
        ((1, 4, 0), (1, 1, 3)),
    ]
