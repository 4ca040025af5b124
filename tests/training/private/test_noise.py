"""The noise of a step and its Poisson sample: distributions, keys, positions; no public seed moves them."""

import math
import random

import numpy as np
import pytest
import torch

from atoll.training.private.noise import BLOCK, Box, add_noise, grid_of, normals
from atoll.training.private.sampler import PoissonSampler

KEY = bytes(range(32))


def test_the_noise_is_a_normal_distribution() -> None:
    found = np.sort(normals(KEY, "weight", 200_000))
    assert found.mean() == pytest.approx(0.0, abs=5 / math.sqrt(len(found)))
    assert found.var() == pytest.approx(1.0, abs=5 * math.sqrt(2 / len(found)))
    expected = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in found[::100]])
    places = (np.arange(len(found))[::100] + 0.5) / len(found)
    assert np.abs(expected - places).max() < 1.95 / math.sqrt(len(found))  # Kolmogorov, beyond 0.999


def test_noise_follows_from_key_step_name_and_position_alone() -> None:
    first = normals(KEY, "a", 2 * BLOCK)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    assert np.array_equal(normals(KEY, "a", 2 * BLOCK), first)
    assert np.array_equal(normals(KEY, "a", 3 * BLOCK)[: 2 * BLOCK], first)
    others = [normals(KEY, "b", BLOCK), normals(bytes(32), "a", BLOCK), first[BLOCK:]]
    for other in others:
        assert abs(np.corrcoef(first[:BLOCK], other)[0, 1]) < 5 / math.sqrt(BLOCK)


@pytest.mark.parametrize("std", [1e-3, 0.7, 12.0])
def test_sum_and_noise_are_rounded_to_a_grid_that_follows_from_the_noise(std: float) -> None:
    grid = grid_of(std)
    assert 2.0**-31 < grid / std <= 2.0**-30
    sums = {"w": torch.linspace(-1, 1, 1000, dtype=torch.float64).view(10, 100), "s": torch.tensor(math.pi).double()}
    noised = {name: value.clone() for name, value in sums.items()}
    add_noise(noised, KEY, 7, std)
    for name, value in noised.items():
        assert torch.equal((value / grid).round(), value / grid)
        assert value.shape == sums[name].shape
    deviation = float((noised["w"] - sums["w"]).std())
    assert deviation == pytest.approx(std, rel=0.15)
    again = {name: value.clone() for name, value in sums.items()}
    add_noise(again, KEY, 8, std)
    assert not torch.equal(again["w"], noised["w"])


@pytest.mark.parametrize("rate", [0.013, 0.5])
def test_each_example_takes_part_independently_with_the_rate(rate: float) -> None:
    sampler = PoissonSampler(KEY, 400, rate)
    taken = np.zeros((1500, 400), bool)
    for step in range(len(taken)):
        taken[step, sampler.indices(step)] = True
    sizes = taken.sum(1)
    assert sizes.mean() == pytest.approx(400 * rate, abs=5 * math.sqrt(400 * rate * (1 - rate) / 1500))
    assert sizes.var() == pytest.approx(400 * rate * (1 - rate), rel=0.2)
    assert taken.sum(0).std() == pytest.approx(math.sqrt(1500 * rate * (1 - rate)), rel=0.2)  # of each example
    pairs = (taken[:-1] & taken[1:]).mean()  # of two steps
    assert pairs == pytest.approx(rate * rate, abs=5 * rate / math.sqrt(400 * 1500))


def test_a_sample_follows_from_key_and_step_and_may_be_empty_or_whole() -> None:
    sampler = PoissonSampler(KEY, 1000, 0.1)
    assert np.array_equal(sampler.indices(3), PoissonSampler(KEY, 1000, 0.1).indices(3))
    assert not np.array_equal(sampler.indices(3), sampler.indices(4))
    assert not np.array_equal(sampler.indices(3), PoissonSampler(bytes(32), 1000, 0.1).indices(3))
    assert len(PoissonSampler(KEY, 10, 1e-9).indices(0)) == 0
    assert np.array_equal(PoissonSampler(KEY, 10, 1.0).indices(0), np.arange(10))


@pytest.mark.parametrize(
    ("shape", "slices"),
    [
        ((300, 500), (slice(100, 230), slice(0, 500))),
        ((300, 500), (slice(0, 300), slice(250, 500))),
        ((300, 500), (slice(150, 300), slice(1, 2))),
        ((BLOCK + 7,), (slice(BLOCK - 1, BLOCK + 7),)),
        ((), ()),
    ],
)
def test_a_part_of_a_tensor_has_the_noise_of_its_place(shape: tuple[int, ...], slices: tuple[slice, ...]) -> None:
    whole = {"w": torch.zeros(shape, dtype=torch.float64)}
    part = {"w": whole["w"][slices].clone()}
    add_noise(whole, bytes(32), 3, 0.7)
    add_noise(part, bytes(32), 3, 0.7, {"w": Box(shape, slices)})
    assert torch.equal(part["w"], whole["w"][slices])
    add_noise({"w": torch.zeros(0, 5, dtype=torch.float64)}, bytes(32), 3, 0.7, {})  # of no elements
