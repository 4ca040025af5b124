"""The account of several kinds of steps, beside the accounts of single kinds and dp-accounting."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from atoll.protocol.privacy import gaussian, loss_distribution, subsampled
from atoll.protocol.privacy.composition import (
    KINDS_MAX,
    Steps,
    epsilon_bound,
    epsilon_of,
    is_within,
    kinds_of,
    uses_within,
)
from atoll.protocol.privacy.guarantee import EXACT, PLD, RDP

z, q = st.floats(0.5, 20.0), st.floats(0.001, 1.0)
parts = st.lists(st.builds(Steps, z, q, st.integers(1, 1000)), min_size=1, max_size=4)


def test_kinds_without_sampling_have_the_exact_epsilon_of_the_reference() -> None:
    assert epsilon_of({(4.0, 1.0): 50}, 1e-6) == pytest.approx((9.482192, EXACT), abs=1e-6)
    mixed = kinds_of([Steps(4.0, 1.0, 25), Steps(2.0, 1.0, 3), Steps(4.0, 1.0, 25)])
    assert mixed == {(4.0, 1.0): 50, (2.0, 1.0): 3}
    mu = math.sqrt(50 / 16 + 3 / 4)
    assert epsilon_of(mixed, 1e-6)[0] == gaussian.epsilon_of(mu, 1e-6)


@pytest.mark.parametrize(
    ("rate", "noise", "steps", "rdp", "pld"),
    [(0.01, 4.0, 10_000, 1.03549, 0.946999), (0.04, 1.5, 2250, 7.329335, 6.768787)],
)
def test_one_sampled_kind_has_the_epsilons_of_the_reference(
    rate: float, noise: float, steps: int, rdp: float, pld: float
) -> None:
    assert epsilon_bound({(noise, rate): steps}, 1e-5) == pytest.approx(rdp, abs=1e-3)
    if loss_distribution.is_installed():
        found, accountant = epsilon_of({(noise, rate): steps}, 1e-5)
        assert found == pytest.approx(pld, abs=1e-3)
        assert accountant == PLD


@given(parts=parts)
def test_the_bound_of_all_is_at_least_that_of_each_kind_and_at_most_their_sum_at_parts_of_delta(
    parts: list[Steps],
) -> None:
    kinds = kinds_of(parts)
    whole = epsilon_bound(kinds, 1e-5)
    for kind, steps in kinds.items():
        if kind[1] < 1.0:
            single = subsampled.epsilon_bound(kind[1], kind[0], steps, 1e-5)
            assert whole >= single - 1e-9
    assert epsilon_bound(kinds_of([*parts, parts[0]]), 1e-5) >= whole


def test_mixed_kinds_compose_below_the_sum_of_their_epsilons_and_above_each() -> None:
    kinds = {(1.5, 0.04): 500, (6.0, 1.0): 5}
    (whole, accountant), bound = epsilon_of(kinds, 1e-5), epsilon_bound(kinds, 1e-5)
    each = [epsilon_of({kind: steps}, 1e-5)[0] for kind, steps in kinds.items()]
    halves = [epsilon_of({kind: steps}, 5e-6)[0] for kind, steps in kinds.items()]
    assert max(each) < whole < sum(halves)
    assert whole <= bound
    assert accountant == (PLD if loss_distribution.is_installed() else RDP)


def test_what_the_bound_decides_asks_no_tight_account(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_distribution, "epsilon_of_kinds", lambda *_: pytest.fail("asked"))
    kinds = {(1.5, 0.041): 500}
    assert is_within(kinds, epsilon_bound(kinds, 1e-5), 1e-5)
    assert epsilon_of({(0.5, 0.9): 5000}, 1e-5)[0] > loss_distribution.BOUND_MAX
    assert epsilon_of({(0.04, 0.001): 1}, 1e-5)[1] == RDP
    many = {(5.0 + at, 0.041): 500 for at in range(KINDS_MAX + 1)}
    assert epsilon_of(many, 1e-5)[1] == RDP


def test_without_the_extra_the_bound_is_all_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_distribution, "is_installed", lambda: False)
    assert epsilon_of({(4.0, 0.01): 10_000}, 1e-5) == (epsilon_bound({(4.0, 0.01): 10_000}, 1e-5), RDP)


@settings(max_examples=20, deadline=None)
@given(noise=st.floats(0.5, 20.0), spent=st.integers(0, 30), most=st.integers(1, 50))
def test_the_uses_that_are_left_fit_and_one_more_does_not(noise: float, spent: int, most: int) -> None:
    kinds = {(noise, 1.0): spent} if spent else {}
    left = uses_within(kinds, [Steps(noise, 1.0, 1)], 8.0, 1e-5, most)
    assert left == min(most, gaussian.uses_within(8.0, 1e-5, noise, spent=math.sqrt(spent) / noise))
