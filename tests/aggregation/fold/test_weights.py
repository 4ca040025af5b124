import math
import random
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from atoll.aggregation.fold.weights import (
    FIXED_POINT_ONE,
    Normalized,
    Share,
    hinge_discount,
    integer_weights,
    normalized,
    staleness_discount,
)

Client = tuple[int, float, float]
steps = st.floats(1, 1e9)


shares = st.lists(
    st.builds(
        Share,
        num_examples=st.integers(1, 10**12),
        scale=st.floats(0, 1, exclude_min=True) | st.sampled_from([1.0, 0.5]),
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


@given(shares=shares.filter(lambda shares: any(share.scale < 1 for share in shares)))
def test_weights_are_the_shares_to_half_a_unit_of_two_to_the_thirty(shares):
    exact = [share.num_examples * Fraction(share.scale) for share in shares]
    for weight, x in zip(integer_weights(shares), exact, strict=True):
        error = abs(weight - FIXED_POINT_ONE * x / max(exact))
        assert 1 <= weight <= FIXED_POINT_ONE
        assert error <= Fraction(1, 2) or weight == 1


def test_weights_round_half_to_even_and_never_to_zero():
    tie = [Share(1 << 31, 0.5), Share(3, 0.5), Share(5, 0.5), Share(1, 2.0**-60)]
    assert integer_weights(tie) == (1 << 30, 2, 2, 1)


def test_weights_scaled_down_alike_count_alike():
    assert integer_weights([Share(10, 0.1), Share(20, 0.1)]) == (1 << 29, 1 << 30)


@pytest.mark.parametrize("num_examples", [0, -3])
def test_share_refuses_num_examples_below_one(num_examples):
    with pytest.raises(ValueError, match=f"num_examples {num_examples} is not at least 1"):
        Share(num_examples)


@pytest.mark.parametrize("scale", [0.0, -0.5, 1.5, float("nan"), float("inf")])
def test_share_refuses_scales_outside_zero_to_one(scale):
    with pytest.raises(ValueError, match=f"scale {scale} is not in"):
        Share(1, scale)


def test_weights_refuse_an_empty_round():
    with pytest.raises(ValueError, match="no shares"):
        integer_weights([])


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
