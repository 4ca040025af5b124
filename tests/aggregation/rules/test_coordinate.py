"""Coordinate-wise rules and the norm bound, against twins, and against byzfl 0.0.11 (`byzfl_vectors.json`).

The vectors were written once, by byzfl's own classes on float64 arrays, loaded behind an empty `byzfl` package because
its `__init__` wants torchvision: for (n, d, f) in (7, 5, 1), (9, 6, 2), (12, 4, 3), (11, 7, 4), normal updates of
which the last f are `8 normal + 5`, all rounded to multiples of 1/256;

    median                   Median()              trimmed_mean             TrMean(f)
    multi_krum               MultiKrum(f), which scores by n - f - 1 neighbours: on these updates it selects the same
    geometric_median         GeometricMedian(nu=1e-9, T=3)
    centred_clipping         two calls of one CenteredClipping(L=2, tau=3.0): of the updates, then of half of them
    nearest_neighbour_mixing NNM(f), and mixed_*   the rule after it
    clipped                  Clipping(c=3.0)
"""

import json
import math
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.aggregation.rules.coordinate import Median, TrimmedMean, clip_factors
from atoll.aggregation.rules.rule import check_count, num_malicious, takes_centre
from tests.aggregation.reference_rules import applied, median_twin, trimmed_mean_twin

VECTORS = json.loads(Path(__file__).with_name("byzfl_vectors.json").read_text())

RULES = [Median(), TrimmedMean(0), TrimmedMean(0.2), TrimmedMean(0.45)]


wide = st.floats(-(2.0**100), 2.0**100, width=32)


def cohorts_of(num_updates, values=wide):
    """(K, n) float32."""
    rows = st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(values, min_size=n, max_size=n), **num_updates))
    return rows.map(lambda rows: np.array(rows, np.float32))


cohorts = cohorts_of({"min_size": 1, "max_size": 12})
small = cohorts_of({"min_size": 1, "max_size": 12}, st.integers(-999, 999))


@given(updates=cohorts)
def test_median_is_the_median_of_each_element(updates):
    assert np.array_equal(applied(Median(), updates), median_twin(updates))


@given(updates=cohorts, share=st.floats(0, 0.5, exclude_max=True))
def test_trimmed_mean_is_the_mean_between_the_ends(updates, share):
    f = num_malicious(share, len(updates))
    assert 0 <= Fraction(str(share)) * len(updates) - f < 1  # exactly: in floats 0.3333333333333333 of 3 is 1
    mean = trimmed_mean_twin(updates, f)
    for rule in (TrimmedMean(share), TrimmedMean(f)):
        error = np.abs(applied(rule, updates) - mean)
        assert np.all(error <= 1e-14 * len(updates) * np.abs(updates).max())


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: f"f={case['malicious']}")
def test_coordinate_rules_are_those_of_byzfl(case):
    updates, f = np.array(case["updates"], np.float32), case["malicious"]
    assert applied(Median(), updates).tolist() == case["median"]
    np.testing.assert_allclose(applied(TrimmedMean(f), updates), case["trimmed_mean"], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(updates=cohorts, seed=st.randoms(use_true_random=False))
def test_coordinate_rules_do_not_depend_on_the_order_of_the_updates(rule, updates, seed):
    order = list(range(len(updates)))
    seed.shuffle(order)
    assert np.array_equal(applied(rule, updates), applied(rule, updates[order]))


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(row=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1), count=st.integers(1, 300))
def test_coordinate_rules_return_equal_updates_bit_for_bit(rule, row, count):
    updates = np.array([row] * count, np.float32)
    assert np.array_equal(applied(rule, updates), updates[0])


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(updates=small, scale=st.sampled_from([-2, 0.25, 8]), shift=st.integers(-99, 99))
def test_coordinate_rules_follow_scale_and_translation(rule, updates, scale, shift):
    moved = applied(rule, (scale * updates + shift).astype(np.float32))
    np.testing.assert_allclose(moved, scale * applied(rule, updates) + shift, rtol=1e-12, atol=1e-10)


@pytest.mark.parametrize(
    ("rule", "num_honest", "num_bad"),
    [(Median(), 5, 4), (TrimmedMean(3), 4, 3), (TrimmedMean(0.2), 8, 2), (TrimmedMean(0.45), 11, 9)],
)
@given(data=st.data())
def test_coordinate_rules_stay_within_the_honest_values_whatever_f_updates_are(rule, num_honest, num_bad, data):
    honest = data.draw(cohorts_of({"min_size": num_honest, "max_size": num_honest}))
    bad = data.draw(st.lists(st.sampled_from([-3e38, 3e38, 0.0, 1e-45]), min_size=num_bad, max_size=num_bad))
    result = applied(rule, np.vstack([honest] + [np.full_like(honest[:1], value) for value in bad]))
    slack = 1e-14 * np.abs(honest).max()
    assert np.all(honest.min(axis=0) - slack <= result)
    assert np.all(result <= honest.max(axis=0) + slack)


def test_rules_do_with_rows_in_any_memory_order():
    updates = np.random.default_rng(0).standard_normal((7, 9)).astype(np.float32)
    for rule in RULES:
        assert np.array_equal(rule.reduce(np.asfortranarray(updates)), applied(rule, updates))


@pytest.mark.parametrize(("malicious", "count", "least"), [(1, 2, 3), (3, 6, 7), (20, 1, 41)])
def test_trimmed_mean_names_how_many_updates_it_needs(malicious, count, least):
    few = f"{count} update is" if count == 1 else f"{count} updates are"
    fault = f"^{few} too few: a trimmed mean with f={malicious} needs at least {least}$"
    with pytest.raises(ValueError, match=fault):
        check_count(TrimmedMean(malicious), count)
    with pytest.raises(ValueError, match=fault):
        applied(TrimmedMean(malicious), np.zeros((count, 1), np.float32))
    check_count(TrimmedMean(malicious), least)


def test_rules_need_at_least_one_update():
    for rule in RULES:
        with pytest.raises(ValueError, match="0 updates are too few"):
            check_count(rule, 0)
        check_count(rule, 1)


@pytest.mark.parametrize("malicious", [-1, -0.1, 0.5, 1.0, math.nan])
def test_trimmed_mean_refuses_numbers_and_shares_that_cannot_be(malicious):
    with pytest.raises(ValueError, match=f"malicious {malicious} is"):
        TrimmedMean(malicious)


def test_a_share_is_rounded_down_but_not_below_what_it_says():
    assert [num_malicious(share, n) for share, n in ((0.2, 9), (0.2, 10), (0.29, 100), (0.1, 30), (0.0, 5))] == [
        1,
        2,
        29,
        3,
        0,
    ]
    assert num_malicious(3, 4) == 3


def test_a_users_rule_is_an_object_with_reduce():
    class Midrange:
        def reduce(self, rows):
            return (rows.min(axis=0) + rows.max(axis=0).astype(np.float64)) / 2

    check_count(Midrange(), 1)
    assert not takes_centre(Midrange())
    assert applied(Midrange(), np.array([[1, 0], [4, 0], [2, 5]], np.float32)).tolist() == [2.5, 2.5]


@given(norms=st.lists(st.floats(0, 1e30), min_size=1), bound=st.floats(1e-30, 1e30))
def test_clip_factors_shorten_what_is_beyond_the_bound_and_nothing_else(norms, bound):
    for norm, factor in zip(norms, clip_factors(norms, bound), strict=True):
        assert norm * factor == pytest.approx(min(norm, bound))
        assert (factor == 1.0) == (norm <= bound) or math.isclose(norm, bound)


def test_clip_factors_take_the_median_of_the_norms():
    assert clip_factors([1.0, 8.0, 2.0, 4.0], "median") == (1.0, 3 / 8, 1.0, 3 / 4)
    assert clip_factors([0.0, 0.0, 5.0], "median") == (1.0, 1.0, 0.0)
    assert clip_factors([0.0], "median") == (1.0,)


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: f"f={case['malicious']}")
def test_clip_factors_are_those_of_byzfl(case):
    updates = np.array(case["updates"])
    factors = clip_factors([math.hypot(*update) for update in case["updates"]], case["radius"])
    np.testing.assert_allclose(updates * np.array(factors)[:, np.newaxis], case["clipped"], rtol=1e-13)


@pytest.mark.parametrize(
    ("norms", "bound", "fault"),
    [
        ([], 1.0, "no norms"),
        ([1.0, -2.0], 1.0, "norm -2.0 of update 1"),
        ([math.inf], 1.0, "norm inf of update 0"),
        ([math.nan], "median", "norm nan of update 0"),
        ([1.0], 0.0, "bound 0.0 is not above 0"),
        ([1.0], math.nan, "bound nan is not above 0"),
    ],
)
def test_clip_factors_name_what_cannot_be(norms, bound, fault):
    with pytest.raises(ValueError, match=fault):
        clip_factors(norms, bound)
