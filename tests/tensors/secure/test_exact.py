"""Words that are added exactly: sums of members, against Python's integers."""

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.tensors.layout import Tensor
from atoll.tensors.secure.exact import WrongSum, decode_exact, encode_exact
from atoll.tensors.secure.masked_layout import (
    EXACT,
    MetricShape,
    exact_of,
    in_metric_order,
    layout_digest,
    masked_layout,
)
from atoll.tensors.secure.vector import Fill

LAYOUT = (Tensor("n", "I64", (3,)), Tensor("w", "F32", (4, 2)), Tensor("a", "F32", ()), Tensor("k", "U8", ()))
METRICS = (MetricShape("f1", 3), MetricShape("loss", 2))
PLACES = exact_of(LAYOUT, METRICS)
INT64 = st.integers(-(2**63), 2**63 - 1)


@st.composite
def members(draw):
    sums = st.floats(-(2.0**36), 2.0**36)
    statistics = {}
    if draw(st.booleans()):
        statistics["f1"] = tuple(draw(st.lists(sums, min_size=3, max_size=3)))
    if draw(st.booleans()):
        statistics["loss"] = tuple(draw(st.lists(sums, min_size=2, max_size=2)))
    return {
        "weight": draw(st.integers(1, 2**52)),
        "is_within": draw(st.booleans()),
        "fills": [Fill(draw(st.integers(0, 3)), draw(st.floats(0, 1))) for _ in range(2)],
        "integers": {
            "n": np.array(draw(st.lists(INT64, min_size=3, max_size=3)), np.int64),
            "k": np.array([draw(st.integers(-255, 255))], np.int64),
        },
        "statistics": statistics,
    }


@given(st.lists(members(), min_size=1, max_size=6), st.sampled_from([1, 10]))
@settings(max_examples=100, deadline=None)
def test_the_sum_of_words_has_the_sums_of_the_members_numbers(some, times):
    """Up to 60 members of the largest numbers."""
    total = np.zeros(PLACES.size, np.uint64)
    for each in some:
        for _ in range(times):
            total += encode_exact(PLACES, **each)
    found = decode_exact(total, PLACES, len(some) * times)
    assert found.weight == times * sum(each["weight"] for each in some)
    assert found.within == times * sum(each["is_within"] for each in some)
    assert found.cut == tuple(times * sum(each["fills"][k].cut > 0 for each in some) for k in range(2))
    assert found.small == tuple(
        times * sum(not each["fills"][k].cut and 0 < each["fills"][k].largest < 1 / 64 for each in some)
        for k in range(2)
    )
    for name in ("n", "k"):
        expected = [
            times * sum(each["weight"] * int(each["integers"][name][k]) for each in some)
            for k in range(len(some[0]["integers"][name]))
        ]
        assert [int(value) for value in found.integers[name]] == expected
    for name in ("f1", "loss"):
        having = [each["statistics"][name] for each in some if name in each["statistics"]]
        assert found.having.get(name, 0) == times * len(having)
        rounded = [[Fraction(round(math.ldexp(x, 20)), 2**20) for x in sums] for sums in having]
        expected_sums = tuple(float(times * sum(column)) for column in zip(*rounded, strict=True))
        assert found.statistics.get(name, ()) == expected_sums


def one(**changes):
    words = encode_exact(
        PLACES,
        weight=2**52,
        is_within=True,
        fills=[Fill(0, 0.5)] * 2,
        integers={"n": np.zeros(3, np.int64), "k": np.zeros(1, np.int64)},
        statistics={},
    )
    for name, value in changes.items():
        words[getattr(PLACES, name)] = value
    return words


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"canaries": [1, 1, 2, 1]}, "its canaries are 1, 2 instead of 1"),
        ({"members": 2}, "its canaries are 1, 2 instead of 1"),
        ({"weight": 2**52 + 1}, "its weight is 1; allowed of 1 member: up to 1"),
        ({"weight": 0}, "its weight is 0;"),
        ({"within": 2}, "it counts 2 of 1 member"),
        ({"fills": [0, 0, 3, 0]}, "it counts 3 of 1 member"),
    ],
)
def test_a_sum_that_its_members_cannot_have_is_refused(changes, words):
    with pytest.raises(WrongSum, match=words):
        decode_exact(one(**changes), PLACES, 1)


def test_a_metric_that_more_than_all_members_have_is_refused():
    words = one()
    words[PLACES.metrics[METRICS[0]].start] = 2
    with pytest.raises(WrongSum, match="it counts 2 of 1 member"):
        decode_exact(words, PLACES, 1)


@pytest.mark.parametrize("bits", [32, 64])
def test_the_masked_layout_has_the_floats_by_name_and_one_tensor_for_the_rest(bits):
    layout = masked_layout(LAYOUT, bits, METRICS)
    assert [(t.name, t.dtype, t.shape) for t in layout] == [
        ("a", f"I{bits}", ()),
        ("w", f"I{bits}", (4, 2)),
        (EXACT, "I64", (4 + 3 + 2 * 2 + 2 * 4 + 4 + 3,)),
    ]
    assert PLACES.size == layout[-1].num_elements


def test_the_digest_of_the_terms_covers_tensors_and_metrics():
    first = layout_digest(LAYOUT, METRICS)
    assert layout_digest(LAYOUT[::-1], METRICS) == first
    others = [(LAYOUT[1:], METRICS), (LAYOUT, METRICS[1:]), ((*LAYOUT[1:], Tensor("n", "I32", (3,))), METRICS)]
    assert first not in [layout_digest(*other) for other in others]


def test_metrics_are_ordered_by_name_and_bounded():
    assert in_metric_order({"loss": 2, "f1": 3}) == METRICS
    with pytest.raises(ValueError, match="101 metrics of 101 sums"):
        in_metric_order({f"m{k}": 1 for k in range(101)})
    with pytest.raises(ValueError, match="2 metrics of 2 sums, allowed: 100 different"):
        in_metric_order([MetricShape("a", 1), MetricShape("a", 1)])
    with pytest.raises(ValueError, match="metric 'a' has 0 sums"):
        in_metric_order({"a": 0})
