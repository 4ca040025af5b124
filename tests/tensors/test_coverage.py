import time

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from atoll.tensors.coverage import BOXES_MAX, check_cover
from atoll.tensors.layout import Piece, Tensor
from tests.aggregation.models import random_cuts

LAYOUT = (Tensor("w", "BF16", (4, 6)), Tensor("n", "I64", ()), Tensor("none", "F32", (0, 3)))
SOUND = (
    Piece("n", "I64", (), (), ""),
    Piece("none", "F32", (0, 0), (0, 3), ""),
    Piece("w", "BF16", (0, 0), (4, 6), ""),
)


def boxes(*cuts, dtype="BF16"):
    return [*SOUND[:2], *(Piece("w", dtype, offsets, lengths, "") for offsets, lengths in cuts)]


@settings(max_examples=300, deadline=None)
@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=3).map(tuple),
    depth=st.integers(0, 8),
    seed=st.integers(0, 1 << 20),
    edits=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 2), st.integers(-1, 1), st.booleans()), max_size=2),
    dropped=st.booleans(),
)
@example(shape=(2, 2), depth=3, seed=1, edits=[], dropped=False)
def test_cover_agrees_with_counting_every_element(shape, depth, seed, edits, dropped):
    cuts = random_cuts(np.random.default_rng(seed), shape, depth=depth)
    for at, axis, change, is_offset in edits:
        offsets, lengths = (list(part) for part in cuts[at % len(cuts)])
        (offsets if is_offset else lengths)[axis % len(shape)] += change
        cuts[at % len(cuts)] = (tuple(offsets), tuple(lengths))
    cuts = cuts[: len(cuts) - dropped]
    counts = np.zeros(shape, int)
    is_inside = True
    for offsets, lengths in cuts:
        is_inside &= all(o >= 0 and n >= 1 and o + n <= s for o, n, s in zip(offsets, lengths, shape, strict=True))
        if is_inside:
            counts[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))] += 1
    faults = check_cover((Tensor("w", "F32", shape),), [Piece("w", "F32", o, n, "") for o, n in cuts])
    assert (not faults) == (is_inside and bool((counts == 1).all()))
    assert all("'w'" in fault for fault in faults)


def test_cover_accepts_whole_tensors_boxes_and_float32():
    assert check_cover(LAYOUT, SOUND) == []
    assert check_cover(LAYOUT, boxes(((0, 0), (4, 2)), ((0, 2), (3, 4)), ((3, 2), (1, 4)), dtype="F32")) == []


@pytest.mark.parametrize(
    ("pieces", "fault"),
    [
        ([*SOUND, Piece("x", "F32", (), (), "")], "tensor 'x' is not one of the model's 3"),
        (SOUND[:2], "tensor 'w' is missing: 24 elements"),
        (boxes(((0, 0), (4, 6)), dtype="F16"), "tensor 'w' has dtype 'F16', allowed: BF16, F32"),
        (boxes(((0, 0), (4, 6)), dtype="Q4"), "tensor 'w' has dtype 'Q4', allowed: BF16, F32"),
        ([*SOUND[1:], Piece("n", "I32", (), (), "")], "tensor 'n' has dtype 'I32', allowed: I64"),
        (
            [*boxes(((0, 0), (2, 6))), Piece("w", "F32", (2, 0), (2, 6), "")],
            "tensor 'w' has boxes of dtypes BF16, F32, allowed is one of them",
        ),
        (boxes(((0,), (24,))), "box at (0,) of lengths (24,) of tensor 'w' has 1 and 1 axes, allowed are 2"),
        (boxes(((0, 0), (4,))), "box at (0, 0) of lengths (4,) of tensor 'w' has 2 and 1 axes, allowed are 2"),
        (boxes(((0, 0), (4, 0))), "box at (0, 0) of lengths (4, 0) of tensor 'w' has a length below 1"),
        (boxes(((0, -1), (4, 6))), "box at (0, -1) of lengths (4, 6) of tensor 'w' is not inside the shape (4, 6)"),
        (
            boxes(((1, 0), (1 << 70, 6))),
            f"box at (1, 0) of lengths ({1 << 70}, 6) of tensor 'w' is not inside the shape (4, 6)",
        ),
        (
            boxes(((0, 0), (3, 6)), ((2, 0), (2, 6))),
            "tensor 'w' has 1 overlapping pair of boxes, the first at (0, 0) and (2, 0)",
        ),
        (boxes(((0, 0), (3, 6)), ((3, 0), (1, 5))), "tensor 'w' lacks 1 of 24 elements"),
        ([*SOUND, SOUND[0]], "tensor 'n' has 1 overlapping pair of boxes, the first at () and ()"),
        ([*SOUND, SOUND[1]], "tensor 'none' is empty and has 2 boxes, not 1"),
        ([*SOUND[::2], Piece("none", "F32", (0, 1), (0, 2), "")], "has a length below 1"),
    ],
)
def test_cover_names_the_tensor_the_value_and_what_is_allowed(pieces, fault):
    faults = check_cover(LAYOUT, pieces)
    assert len(faults) == 1
    assert fault in faults[0]


def test_cover_reports_all_faults_at_once():
    pieces = [Piece("x", "F32", (), (), ""), Piece("n", "I32", (), (), ""), *boxes(((0, 0), (5, 6)), dtype="I8")[2:]]
    faults = check_cover(LAYOUT, pieces)
    assert len(faults) == 5
    for part in ("'x' is not one", "'none' is missing", "'I32'", "'I8'", "not inside"):
        assert any(part in fault for fault in faults)


def test_cover_lets_whole_tensors_be_left_out_only_when_told():
    assert check_cover(LAYOUT, SOUND[2:], may_omit=True) == []
    assert len(check_cover(LAYOUT, SOUND[2:])) == 2
    assert check_cover(LAYOUT, boxes(((0, 0), (4, 5))), may_omit=True) == ["tensor 'w' lacks 4 of 24 elements"]


def test_cover_stays_fast_for_hostile_boxes():
    layout = (Tensor("w", "F32", (1, 1 << 20, 1, 1)),)
    comb = [Piece("w", "F32", (0, i, 0, 0), (1, 1, 1, 1), "") for i in range(BOXES_MAX)]
    same = [comb[0]] * BOXES_MAX
    started = time.process_time()
    assert check_cover(layout, comb) == [f"tensor 'w' lacks {(1 << 20) - BOXES_MAX} of {1 << 20} elements"]
    num_pairs = BOXES_MAX * (BOXES_MAX - 1) // 2
    assert f"{num_pairs} overlapping pairs" in check_cover(layout, same)[0]
    assert check_cover(layout, same * 50) == [f"tensor 'w' has {50 * BOXES_MAX} boxes, allowed are {BOXES_MAX}"]
    assert time.process_time() - started < 5
