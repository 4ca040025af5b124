"""Rules on whole updates, against twins that never see a Gram matrix, and against byzfl (see `test_robust`)."""

import math
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.aggregation.rules.coordinate import Median, TrimmedMean
from atoll.aggregation.rules.geometric import (
    CenteredClipping,
    GeometricMedian,
    MultiKrum,
    NearestNeighbourMixing,
    squared_distances,
)
from atoll.aggregation.rules.rule import GeometricRule, check_count, takes_centre
from tests.aggregation.reference_rules import (
    applied,
    centred_clipping_twin,
    multi_krum_twin,
    nearest_neighbour_twin,
    trimmed_mean_twin,
    weiszfeld_twin,
)
from tests.aggregation.rules.test_coordinate import VECTORS

RULES = [
    MultiKrum(2),
    MultiKrum(0.2, num_selected=1),
    GeometricMedian(),
    GeometricMedian(num_steps=3, smoothing=0.0),
    NearestNeighbourMixing(2, Median()),
    NearestNeighbourMixing(2, TrimmedMean(2)),
    NearestNeighbourMixing(0.2, GeometricMedian()),
    NearestNeighbourMixing(1, MultiKrum(1)),
]
CASES = pytest.mark.parametrize("case", VECTORS, ids=lambda case: f"f={case['malicious']}")
seeds = st.integers(0, 1 << 30)


def cohort(seed, num_updates=11, n=40, spread=1.0):
    """Updates around a common direction: (K, n) float32."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(n) + spread * rng.standard_normal((num_updates, n))).astype(np.float32)


def close(ours, twin):
    np.testing.assert_allclose(ours, twin, rtol=1e-6, atol=1e-6 * np.abs(twin).max())


@given(seed=seeds)
def test_squared_distances_are_those_of_the_vectors(seed):
    updates = cohort(seed).astype(np.float64)
    squares = squared_distances(updates @ updates.T)
    twin = [[math.dist(u, v) ** 2 for v in updates] for u in updates]
    np.testing.assert_allclose(squares, twin, rtol=1e-12, atol=1e-12)
    assert np.array_equal(squares, squares.T)
    assert not squares.diagonal().any()


@given(seed=seeds, f=st.integers(0, 4), m=st.integers(1, 7) | st.none())
def test_multi_krum_is_the_mean_of_those_with_the_least_scores(seed, f, m):
    updates = cohort(seed)
    close(applied(MultiKrum(f, m), updates), multi_krum_twin(updates, f, m or len(updates) - f))


@given(seed=seeds, num_steps=st.integers(1, 8), smoothing=st.sampled_from([0.0, 1e-6, 0.5]))
def test_geometric_median_takes_weiszfelds_steps(seed, num_steps, smoothing):
    updates = cohort(seed)
    least = smoothing * float(np.median([math.hypot(*update) for update in updates]))
    close(applied(GeometricMedian(num_steps, smoothing), updates), weiszfeld_twin(updates, num_steps, least or 1e-300))


def test_geometric_median_of_many_steps_has_the_least_sum_of_distances():
    updates = cohort(1)
    median = applied(GeometricMedian(num_steps=200), updates)
    total = sum(math.dist(update, median) for update in updates)
    rng = np.random.default_rng(2)
    for length in (1e-3, 1e-2, 1.0):
        for _ in range(20):
            near = median + length * rng.standard_normal(len(median))
            assert sum(math.dist(update, near) for update in updates) > total


@given(seed=seeds, radius=st.floats(0.1, 100), num_steps=st.integers(1, 4))
def test_centred_clipping_is_that_of_the_vectors(seed, radius, num_steps):
    updates, centre = cohort(seed), cohort(seed + 1, num_updates=1)[0]
    rule = CenteredClipping(radius, num_steps)
    assert takes_centre(rule)
    close(applied(rule, updates, centre), centred_clipping_twin(updates, centre, radius, num_steps))


@given(seed=seeds, f=st.integers(0, 5))
def test_nearest_neighbour_mixing_hands_means_of_neighbours_to_its_rule(seed, f):
    updates = cohort(seed)
    mixed = nearest_neighbour_twin(updates, f)
    close(applied(NearestNeighbourMixing(f, TrimmedMean(f)), updates), trimmed_mean_twin(mixed, f))
    close(applied(NearestNeighbourMixing(f, GeometricMedian(3)), updates), weiszfeld_twin(mixed, 3, 1e-300))


@given(seed=seeds)
def test_nearest_neighbour_mixing_leaves_the_centre_of_its_rule_alone(seed):
    updates, centre = cohort(seed), cohort(seed + 1, num_updates=1)[0]
    rule = NearestNeighbourMixing(3, CenteredClipping(2.0))
    assert takes_centre(rule)
    close(applied(rule, updates, centre), centred_clipping_twin(nearest_neighbour_twin(updates, 3), centre, 2.0, 1))


@CASES
@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("multi_krum", MultiKrum),
        ("geometric_median", lambda f: GeometricMedian(3, 1e-9)),
        ("mixed_median", lambda f: NearestNeighbourMixing(f, Median())),
        ("mixed_trimmed_mean", lambda f: NearestNeighbourMixing(f, TrimmedMean(f))),
        ("mixed_geometric_median", lambda f: NearestNeighbourMixing(f, GeometricMedian(3, 1e-9))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_geometric_rules_are_those_of_byzfl(case, name, rule):
    close(applied(rule(case["malicious"]), np.array(case["updates"], np.float32)), np.array(case[name]))


@CASES
def test_nearest_neighbour_mixing_is_that_of_byzfl(case):
    updates = np.array(case["updates"])
    mixing = NearestNeighbourMixing(case["malicious"], Median()).mixing(updates @ updates.T)
    np.testing.assert_allclose(mixing @ updates, case["nearest_neighbour_mixing"], rtol=1e-12, atol=1e-12)


@CASES
def test_centred_clipping_goes_on_from_the_last_aggregate_as_byzfl_does(case):
    updates, rule = np.array(case["updates"], np.float32), CenteredClipping(case["radius"], num_steps=2)
    first = applied(rule, updates, np.zeros_like(updates[0]))
    close(first, np.array(case["centred_clipping"][0]))
    second = applied(rule, updates / 2, first.astype(np.float32))
    close(second, np.array(case["centred_clipping"][1]))


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(seed=seeds)
def test_geometric_rules_do_not_depend_on_the_order_of_the_updates(rule, seed):
    updates = cohort(seed)
    order = np.random.default_rng(seed).permutation(len(updates))
    close(applied(rule, updates[order]), applied(rule, updates))


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(row=st.lists(st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=1), count=st.integers(7, 60))
def test_geometric_rules_return_equal_updates_bit_for_bit(rule, row, count):
    updates = np.array([row] * count, np.float32)
    assert np.array_equal(applied(rule, updates), updates[0])


@pytest.mark.parametrize("rule", RULES, ids=repr)
@given(seed=seeds, scale=st.sampled_from([-2, 2.0**-80, 2.0**60]))
def test_geometric_rules_follow_the_scale(rule, seed, scale):
    updates = cohort(seed)
    close(applied(rule, np.float32(scale) * updates) / scale, applied(rule, updates))


@pytest.mark.parametrize("rule", [*RULES[:2], GeometricMedian(num_steps=300), *RULES[4:6]], ids=repr)
@settings(max_examples=20)
@given(seed=seeds, shift=st.integers(-3, 3))
def test_geometric_rules_follow_a_translation(rule, seed, shift):
    updates = cohort(seed)
    moved = applied(rule, updates + np.float32(shift)) - shift
    np.testing.assert_allclose(moved, applied(rule, updates), atol=1e-4)


@given(seed=seeds, shift=st.integers(-3, 3))
def test_centred_clipping_follows_a_translation_with_its_centre(seed, shift):
    updates, centre = cohort(seed), cohort(seed + 1, num_updates=1)[0]
    rule = CenteredClipping(1.5, 2)
    moved = applied(rule, updates + np.float32(shift), centre + np.float32(shift)) - shift
    np.testing.assert_allclose(moved, applied(rule, updates, centre), atol=1e-5)


bad_rows = st.tuples(seeds, st.sampled_from([0.0, 1.0, 1e3, 1e10, 3e37]))


@pytest.mark.parametrize(
    ("rule", "num_honest", "num_bad"),
    [
        (MultiKrum(2), 5, 2),
        (MultiKrum(0.4), 11, 7),
        (NearestNeighbourMixing(3, TrimmedMean(3)), 4, 3),
        (NearestNeighbourMixing(3, Median()), 4, 3),
        (NearestNeighbourMixing(2, MultiKrum(2)), 5, 2),
    ],
    ids=str,
)
@settings(max_examples=60)
@given(seed=seeds, bad=bad_rows)
def test_rules_of_distances_move_boundedly_whatever_f_updates_are(rule, num_honest, num_bad, seed, bad):
    honest = cohort(seed, num_honest, spread=0.1)
    rows = np.vstack([honest, np.float32(bad[1]) * cohort(bad[0], num_bad)])
    rows = rows[np.random.default_rng(seed).permutation(len(rows))]
    centre = honest.mean(axis=0)
    radius = max(math.dist(update, centre) for update in honest)
    assert math.dist(applied(rule, rows), centre) <= 8 * radius


@settings(max_examples=60)
@given(seed=seeds, bad=bad_rows, num_bad=st.integers(0, 4), num_steps=st.integers(1, 8))
def test_geometric_median_moves_boundedly_whatever_a_minority_is(seed, bad, num_bad, num_steps):
    honest = cohort(seed, 5)
    result = applied(GeometricMedian(num_steps), np.vstack([honest, np.float32(bad[1]) * cohort(bad[0], num_bad)]))
    longest = max(math.hypot(*update) for update in honest)
    assert math.hypot(*result) <= 1.1 * longest * (5 + num_bad) / (5 - num_bad)


@given(seed=seeds, bad=bad_rows, num_steps=st.integers(1, 3))
def test_centred_clipping_never_moves_further_than_its_radius_in_a_step(seed, bad, num_steps):
    centre = cohort(seed, 1)[0]
    result = applied(CenteredClipping(0.5, num_steps), np.float32(bad[1]) * cohort(bad[0]), centre)
    assert math.dist(result, centre) <= 0.5 * num_steps * (1 + 1e-4)


def test_geometric_median_of_a_majority_of_zeros_is_zero():
    updates = np.zeros((5, 3), np.float32)
    updates[3:] = 7
    assert applied(GeometricMedian(), updates).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("rule", "count", "least", "name"),
    [
        (MultiKrum(2), 6, 7, "multi-Krum with f=2"),
        (MultiKrum(0.4), 5, 7, "multi-Krum with f=2"),
        (NearestNeighbourMixing(3, Median()), 6, 7, "mixing with f=3"),
        (NearestNeighbourMixing(1, TrimmedMean(3)), 6, 7, "a trimmed mean with f=3"),
        (NearestNeighbourMixing(0, MultiKrum(1)), 4, 5, "multi-Krum with f=1"),
    ],
    ids=str,
)
def test_geometric_rules_name_how_many_updates_they_need(rule, count, least, name):
    fault = f"^{count} updates are too few: {name} needs at least {least}$"
    with pytest.raises(ValueError, match=fault):
        check_count(rule, count)
    with pytest.raises(ValueError, match=fault):
        applied(rule, cohort(0, count))


@pytest.mark.parametrize(
    ("make", "fault"),
    [
        (lambda: MultiKrum(-1), "malicious -1 is not at least 0"),
        (lambda: MultiKrum(0.5), "malicious 0.5 is a share, and not in [0, 0.5)"),
        (lambda: MultiKrum(1, 0), "num_selected 0 is not at least 1"),
        (lambda: check_count(MultiKrum(2, 6), 7), "num_selected 6 is not in 1..5"),
        (lambda: NearestNeighbourMixing(-2, Median()), "malicious -2 is not at least 0"),
        (lambda: GeometricMedian(0), "num_steps 0 is not at least 1"),
        (lambda: GeometricMedian(smoothing=-1.0), "smoothing -1.0 is not in [0, 1)"),
        (lambda: CenteredClipping(0.0), "radius 0.0 is not above 0"),
        (lambda: CenteredClipping(math.nan), "radius nan is not above 0"),
        (lambda: CenteredClipping(1.0, 0), "num_steps 0 is not at least 1"),
    ],
)
def test_rules_refuse_settings_that_cannot_be(make, fault):
    with pytest.raises(ValueError, match=re.escape(fault)):
        make()


def test_only_rules_that_mix_look_at_geometry():
    assert not any(isinstance(rule, GeometricRule) for rule in (Median(), TrimmedMean(1)))
    assert all(isinstance(rule, GeometricRule) for rule in (*RULES, CenteredClipping(1.0)))
    assert not any(takes_centre(rule) for rule in (Median(), *RULES))
