import math
import random
import re
from fractions import Fraction

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from atoll.aggregation.fold.grid import WEIGHT_BITS
from atoll.aggregation.fold.weights import (
    Normalized,
    Share,
    hinge_discount,
    integer_weights,
    is_integer_weight,
    normalized,
    num_sites_for,
    staleness_discount,
    weight_cap,
)
from atoll.tensors.updates.weight import WEIGHT_MAX, WEIGHT_MIN, as_weight

Client = tuple[int, float, float]
steps = st.floats(1, 1e9)


claims = st.integers(1, WEIGHT_MAX) | st.floats(WEIGHT_MIN, float(WEIGHT_MAX)) | st.sampled_from([0.1, 0.2, 0.8, 3.0])
shares = st.lists(
    st.builds(
        Share,
        num_examples=claims,
        scale=st.floats(1e-39, 1, exclude_min=True) | st.sampled_from([1.0, 0.5]),
    ),
    min_size=1,
    max_size=12,
)


@given(counts=st.lists(st.integers(1, 10**15), min_size=1))
def test_weights_are_num_examples_when_nothing_is_scaled(counts):
    assert integer_weights([Share(n) for n in counts]) == tuple(counts)


@given(shares=shares, seed=st.randoms(use_true_random=False))
def test_weights_follow_their_shares_in_any_order(shares, seed):
    order = list(range(len(shares)))
    seed.shuffle(order)
    weights = integer_weights(shares)
    assert integer_weights([shares[i] for i in order]) == tuple(weights[i] for i in order)


@given(shares=shares)
def test_weights_have_the_ratios_of_the_float64_products_exactly_and_fit_the_grid(shares):
    exact = [Fraction(float(share.num_examples) * share.scale) for share in shares]
    weights = integer_weights(shares)
    assert {weight / x for weight, x in zip(weights, exact, strict=True)} == {weights[0] / exact[0]}
    assert all(is_integer_weight(weight) and float(weight) == weight for weight in weights)
    assert sum(weights).bit_length() < WEIGHT_BITS - 20  # a million of them


@given(claims=st.lists(claims, min_size=1, max_size=6), power=st.integers(-20, 20))
def test_a_power_of_two_in_all_weights_changes_no_ratio(claims, power):
    scaled = [claim * 2.0**power for claim in claims]
    assume(all(WEIGHT_MIN <= claim <= WEIGHT_MAX for claim in scaled))
    one, other = integer_weights([Share(n) for n in claims]), integer_weights([Share(n) for n in scaled])
    assert len({Fraction(a, b) for a, b in zip(one, other, strict=True)}) == 1


def test_weights_of_fractions_and_discounts():
    assert integer_weights([Share(0.75), Share(0.25)]) == (3, 1)
    assert integer_weights([Share(20), Share(10, 0.5)]) == (20, 5)
    assert integer_weights([Share(10, 0.1), Share(20, 0.1)]) == (1, 2)
    large, small = integer_weights([Share(0.8), Share(0.2)])
    assert large == 4 * small


@pytest.mark.parametrize("weight", [0, -1, (1 << 53) + 1, 3 << 52 | 1])
def test_weight_that_float64_does_not_hold(weight):
    assert not is_integer_weight(weight)


def test_number_as_weight():
    assert [type(as_weight(number)) for number in (3.0, 0.5, 1 << 53)] == [int, float, int]
    for number in (0.0, -1.0, 1e-31, 1e16, math.inf, math.nan):
        with pytest.raises(ValueError, match=r"in 1e-30\.\.9007199254740992, got"):
            as_weight(number)


@pytest.mark.parametrize("num_examples", [0, -3, 1e-31, math.nan, 1e16])
def test_share_refuses_num_examples_out_of_range(num_examples):
    with pytest.raises(ValueError, match=f"num_examples {re.escape(str(num_examples))} is not in 1e-30"):
        Share(num_examples)


@pytest.mark.parametrize("scale", [0.0, -0.5, 1.5, float("nan"), float("inf")])
def test_share_refuses_scales_outside_zero_to_one(scale):
    with pytest.raises(ValueError, match=f"scale {scale} is not in"):
        Share(1, scale)


def test_weights_refuse_an_empty_round():
    with pytest.raises(ValueError, match="no shares"):
        integer_weights([])


@given(
    st.lists(st.one_of(st.integers(1, 10**15).map(float), st.floats(1e-9, 1e9)), min_size=1, max_size=12),
    st.floats(0.05, 1.0),
    st.randoms(use_true_random=False),
)
def test_a_cap_on_shares_holds_for_each_and_changes_no_other_in_any_order(weights, share, rng):
    cap = weight_cap(weights, share)
    shuffled = list(weights)
    rng.shuffle(shuffled)
    assert weight_cap(shuffled, share) == cap
    capped = [Fraction(weight if cap is None else min(weight, cap)) for weight in weights]
    if len(weights) * Fraction(repr(share)) < 1:
        assert len(set(capped)) == 1, "fewer sites than 1 / share: all count alike"
        return
    assert max(capped) <= Fraction(repr(share)) * sum(capped)
    if cap is not None:  # the largest cap: one that is larger by rounding alone lets a site exceed its share
        above = [min(Fraction(weight), Fraction(cap) * (1 + Fraction(1, 2**40))) for weight in weights]
        assert max(above) > Fraction(repr(share)) * sum(above)


def test_a_cap_on_shares_by_hand():
    """1000 of 1060 examples: with at most half of the total it counts as the 60 others."""
    assert weight_cap([1000, 40, 20], 0.5) == 60
    assert weight_cap([1000, 1000, 10], 0.4) == 20  # two at c: c = 0.4 * 10 / (1 - 0.8)
    assert weight_cap([30, 40, 30], 0.4) is None
    assert weight_cap([5, 3], 0.25) == 3, "two cannot have a quarter each"
    assert [num_sites_for(share) for share in (1.0, 0.5, 0.4, 1 / 3, 0.2)] == [1, 2, 3, 3, 5]


def test_staleness_discount_is_the_polynomial_of_xie_2019():
    assert staleness_discount(0, exponent=0.5) == 1.0
    assert staleness_discount(3, exponent=0.5) == 0.5
    assert staleness_discount(4, exponent=2.0) == pytest.approx(1 / 25)
    assert staleness_discount(7, exponent=0.0) == 1.0


@pytest.mark.parametrize(("staleness", "exponent"), [(-1, 0.5), (1, -0.5), (1, float("nan"))])
def test_staleness_discount_refuses_what_would_count_more_than_a_fresh_update(staleness, exponent):
    with pytest.raises(ValueError, match="is not at least 0"):
        staleness_discount(staleness, exponent=exponent)


def test_equal_steps_are_averaged_as_by_fedavg_to_the_bit() -> None:
    assert normalized((3, 7, 11), (13.1441,) * 3, (13.1441,) * 3) == Normalized((1.0, 1.0, 1.0), 1.0)


@given(st.lists(st.tuples(st.integers(1, 2**40), steps, steps), min_size=1, max_size=8), st.randoms())
def test_normalized_mean_is_the_papers_whatever_the_order(clients: list[Client], rng: random.Random) -> None:
    """scale f_k p_k = tau_eff p_k / a_k (Wang et al. 2020, equation 8), here in exact rationals."""
    weights, norms, effective = zip(*clients, strict=True)
    found = normalized(weights, norms, effective)
    tau = sum(Fraction(w) * Fraction(e) for w, _, e in clients) / sum(weights)
    for factor, norm in zip(found.factors, norms, strict=True):
        assert 0 < factor <= 1
        assert found.scale * factor == pytest.approx(float(tau / Fraction(norm)), rel=1e-14)
    order = rng.sample(range(len(clients)), len(clients))
    again = normalized(*([column[k] for k in order] for column in (weights, norms, effective)))
    assert again == Normalized(tuple(found.factors[k] for k in order), found.scale)


@pytest.mark.parametrize("number", [0.999, 1.1e9, math.inf, math.nan])
def test_normalizer_out_of_range_is_named(number: float) -> None:
    with pytest.raises(ValueError, match=rf"{number}.*not in \[1, 1e\+09\]"):
        normalized((1, 1), (1.0, number), (1.0, 1.0))
    with pytest.raises(ValueError, match=rf"{number}.*not in \[1, 1e\+09\]"):
        normalized((1, 1), (1.0, 1.0), (1.0, number))


@pytest.mark.parametrize(("staleness", "golden"), [(0, 1), (1, 0.70711), (3, 0.5), (8, 0.33333)])
def test_polynomial_discount_with_its_golden_numbers(staleness, golden):
    assert staleness_discount(staleness, exponent=0.5) == pytest.approx(golden, abs=5e-6)


@pytest.mark.parametrize(("staleness", "golden"), [(0, 1), (4, 1), (5, 0.090909), (8, 0.024390)])
def test_hinge_discount_with_its_golden_numbers(staleness, golden):
    assert hinge_discount(staleness, slope=10.0, delay=4) == pytest.approx(golden, abs=5e-7)


@given(staleness=st.integers(0, 10**6), slope=st.floats(1e-6, 1e6), delay=st.integers(0, 1000))
def test_hinge_discount_is_a_scale_that_does_not_grow(staleness, slope, delay):
    scale = hinge_discount(staleness, slope=slope, delay=delay)
    assert 0 < hinge_discount(staleness + 1, slope=slope, delay=delay) <= scale <= 1


@pytest.mark.parametrize(
    ("staleness", "slope", "delay"), [(-1, 1.0, 4), (1, 1.0, -1), (1, 0.0, 4), (1, float("nan"), 4)]
)
def test_hinge_discount_refuses_what_is_none(staleness, slope, delay):
    with pytest.raises(ValueError, match=r"at least 0|not positive"):
        hinge_discount(staleness, slope=slope, delay=delay)
