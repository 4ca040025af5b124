"""Noise by element: the same for any cut of a tensor and any boxes, other noise for another key, tensor or block."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.tensors.layout import Piece
from atoll.tensors.noise.grid_noise import BLOCK, GridNoise
from atoll.tensors.secure.positions import runs_between

KEY = bytes(range(32))
SIZE = 3 * BLOCK + 17
NOISE = GridNoise(1234.5, KEY)


def test_noise_is_the_same_however_it_is_cut() -> None:
    whole = NOISE.between("w", SIZE, 0, SIZE)
    assert len(whole) == SIZE
    assert whole.std() == pytest.approx(1234.5, rel=0.02)
    for start, stop in ((0, 1), (5, BLOCK), (BLOCK - 1, BLOCK + 1), (BLOCK, 2 * BLOCK), (2 * BLOCK + 9, SIZE), (7, 7)):
        assert np.array_equal(NOISE.between("w", SIZE, start, stop), whole[start:stop])
        assert np.array_equal(NOISE.at("w", SIZE, np.array([[start, stop - start]])), whole[start:stop])
    assert not np.array_equal(NOISE.between("v", SIZE, 0, 50), whole[:50])
    assert not np.array_equal(GridNoise(1234.5, bytes(32)).between("w", SIZE, 0, 50), whole[:50])
    assert not np.array_equal(whole[:BLOCK], whole[BLOCK : 2 * BLOCK])
    assert KEY.hex() not in repr(NOISE)
    assert str(KEY) not in repr(NOISE)


@given(st.integers(1, 200), st.integers(1, 300), st.data())
@settings(max_examples=20, deadline=None)
def test_a_box_has_the_noise_of_its_elements(rows: int, columns: int, data: st.DataObject) -> None:
    whole = NOISE.between("w", rows * columns, 0, rows * columns).reshape(rows, columns)
    top, left = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, columns - 1))
    height, width = data.draw(st.integers(1, rows - top)), data.draw(st.integers(1, columns - left))
    box = Piece("w", "I32", (top, left), (height, width), "")
    runs = runs_between(box, (rows, columns), 0, 0, height * width)
    expected = whole[top : top + height, left : left + width]
    assert np.array_equal(NOISE.at("w", rows * columns, runs).reshape(height, width), expected)
