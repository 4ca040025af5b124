"""Samples of the discrete Gaussian: their distribution against exact probabilities, and every decision in decimals."""

import math
import random

import numpy as np
import pytest
import torch

from atoll.ground.noise.key import key_of
from atoll.tensors.noise.discrete_gaussian import DEVIATION_MAX, DiscreteGaussian

DRAWS = 1_000_000
KEY = bytes(range(32))


def drawn(deviation: float, purpose: object, count: int = DRAWS) -> np.ndarray:
    sampler = DiscreteGaussian(deviation)
    blocks = [sampler.sample(key_of(KEY, str(purpose), block), 1 << 14) for block in range(-(-count // (1 << 14)))]
    return np.concatenate(blocks)[:count]


def exact(deviation: float) -> dict[int, float]:
    weights = {
        x: math.exp(-x * x / (2 * deviation**2))
        for x in range(-math.ceil(40 * deviation), math.ceil(40 * deviation) + 1)
    }
    total = math.fsum(weights.values())
    return {x: weight / total for x, weight in weights.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("deviation", "variance"),
    [(0.5, 0.2150), (1.0, 1.0000), (2.0**19, 2.0**38), (1.37 * 2.0**30, (1.37 * 2.0**30) ** 2), (2.0**40, 2.0**80)],
)
def test_variance_and_mean_of_a_million_draws(deviation: float, variance: float) -> None:
    samples = drawn(deviation, "variance").astype(np.float64)
    assert samples.var() == pytest.approx(variance, rel=0.01)
    assert abs(samples.mean()) < 4.5 * math.sqrt(variance / DRAWS)
    if deviation <= 1:
        known = sum(x * x * p for x, p in exact(deviation).items())
        assert known == pytest.approx(variance, abs=1e-4)


@pytest.mark.slow
def test_chi_square_of_twenty_keys() -> None:
    """Each key's counts over cells of at least 25 expected draws; the p-value by Wilson and Hilferty."""
    deviation, count = 2.3, 60_000
    probabilities = exact(deviation)
    inner = [x for x, p in probabilities.items() if p * count >= 25]
    expected = np.array([probabilities[x] for x in inner] + [1 - math.fsum(probabilities[x] for x in inner)]) * count
    for key in range(20):
        samples = drawn(deviation, f"chi {key}", count)
        seen = np.array([np.count_nonzero(samples == x) for x in inner])
        seen = np.append(seen, count - seen.sum())
        statistic, freedom = float(((seen - expected) ** 2 / expected).sum()), len(expected) - 1
        z = ((statistic / freedom) ** (1 / 3) - (1 - 2 / (9 * freedom))) / math.sqrt(2 / (9 * freedom))
        assert math.erfc(z / math.sqrt(2)) / 2 > 1e-4, (key, statistic, freedom)


def test_large_deviations_have_the_quantiles_of_the_normal_distribution() -> None:
    samples = drawn(2.0**30, "quantiles", 100_000) / 2.0**30
    for z, below in ((-2.0, 0.02275), (-1.0, 0.15866), (0.0, 0.5), (1.0, 0.84134), (2.0, 0.97725)):
        assert np.mean(samples < z) == pytest.approx(below, abs=5 * math.sqrt(below * (1 - below) / 100_000))


@pytest.mark.parametrize("deviation", [0.3, 1.0, 2.7, 2.0**19, 1.37 * 2.0**30, DEVIATION_MAX])
def test_decisions_in_decimals_are_those_of_float64(deviation: float) -> None:
    key = key_of(KEY, "decimals", str(deviation))
    in_decimals = DiscreteGaussian(deviation, decides_in_decimals=True).sample(key, 400)
    assert np.array_equal(DiscreteGaussian(deviation).sample(key, 400), in_decimals)


def test_the_samples_follow_from_the_key_alone() -> None:
    sampler, first = DiscreteGaussian(7.5), []
    for seed in (1, 2):
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        first.append(sampler.sample(KEY, 1000))
    assert np.array_equal(*first)
    other = sampler.sample(key_of(KEY, "other"), 1000)
    assert abs(np.corrcoef(first[0], other)[0, 1]) < 0.15
    assert len(sampler.sample(KEY, 0)) == 0


def test_other_deviations_are_refused() -> None:
    for wrong in (0.0, -1.0, math.nan, math.inf, 2.0**42):
        with pytest.raises(ValueError, match="is not in"):
            DiscreteGaussian(wrong)
