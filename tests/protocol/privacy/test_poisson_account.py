"""The search of an account: the least noise within a budget, and the most steps."""

import pytest

from atoll.protocol.privacy import loss_distribution, subsampled
from atoll.protocol.privacy.poisson_account import PRECISION, PoissonAccount, most


@pytest.fixture
def without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loss_distribution, "is_installed", lambda: False)


@pytest.mark.parametrize("q", [0.001, 0.04, 1.0])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 8.0])
def test_the_least_noise_is_within_the_budget_and_close_to_it(
    without_the_library: None, q: float, epsilon: float
) -> None:
    account = PoissonAccount(q, 1e-5)
    z = account.least_noise(epsilon, 300)
    assert (1.0 - PRECISION) * epsilon <= account.epsilon_of(z, 300) <= epsilon


def test_without_the_library_epsilon_is_the_bound(without_the_library: None) -> None:
    assert PoissonAccount(0.04, 1e-5).epsilon_of(1.5, 2250) == subsampled.epsilon_bound(0.04, 1.5, 2250, 1e-5)


def test_no_noise_is_enough_for_a_budget_below_all() -> None:
    with pytest.raises(ValueError, match="no noise multiplier up to"):
        PoissonAccount(1.0, 1e-12).least_noise(1e-12, 10**6)


@pytest.mark.parametrize("limit", [0, 1, 7, 63, 64])
def test_most_finds_the_last_number_for_which_the_condition_holds(limit: int) -> None:
    assert most(lambda number: number <= limit, 65) == limit
    assert most(lambda number: number <= limit, 65, limit) == limit
