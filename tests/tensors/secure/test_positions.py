"""Positions in the streams: each element has one word, whoever owns it."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from atoll.tensors.layout import ITEM_BYTES, Piece, Tensor
from atoll.tensors.secure.positions import ALIGNMENT, runs_between, starts_of


def test_tensors_begin_at_whole_blocks_and_do_not_overlap():
    layout = (Tensor("a", "I32", (5,)), Tensor("b", "I32", ()), Tensor("c", "I32", (0, 3)), Tensor("d", "I32", (8,)))
    assert starts_of(layout) == {"a": 0, "b": 8, "c": 12, "d": 12}


@st.composite
def boxes(draw):
    shape = tuple(draw(st.lists(st.integers(1, 6), max_size=3)))
    offsets, lengths = [], []
    for size in shape:
        begin = draw(st.integers(0, size - 1))
        offsets.append(begin)
        lengths.append(draw(st.integers(1, size - begin)))
    return shape, Piece("t", draw(st.sampled_from(["I32", "I64"])), tuple(offsets), tuple(lengths), "")


@given(boxes(), st.integers(0, 10), st.data())
def test_the_runs_of_a_box_are_the_positions_of_its_elements(given_box, block, data):
    shape, box = given_box
    start = block * ALIGNMENT
    places = start + np.arange(int(np.prod(shape, dtype=int))).reshape(shape)
    expected = places[tuple(slice(o, o + n) for o, n in zip(box.offsets, box.lengths, strict=True))].reshape(-1)
    first, last = sorted((data.draw(st.integers(0, box.num_elements)), data.draw(st.integers(0, box.num_elements))))
    rows = runs_between(box, shape, start, first, last).tolist()
    found = [place + each for place, count in rows for each in range(count)]
    assert found == expected[first:last].tolist()
    assert ITEM_BYTES[box.dtype] in (4, 8)


def test_an_empty_box_has_no_runs():
    assert not len(runs_between(Piece("t", "I32", (0, 0), (0, 3), ""), (0, 3), 8, 0, 0))
