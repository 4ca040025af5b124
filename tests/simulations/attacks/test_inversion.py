"""Inversion of one update: a plain one shows its image, a masked vector less than the mean image."""

import numpy as np
import pytest

from atoll.simulations.attacks.inversion import distance, inverted
from benchmarks.secure_disclosure import measured


def test_the_gradient_of_a_linear_layer_is_a_multiple_of_its_input():
    x, errors = np.array([0.25, 0.5, 1.0]), np.array([2.0, 0.0, -3.0])
    guesses = inverted(np.outer(errors, x), errors, 0.0, 1.0)
    assert guesses.tolist() == [x.tolist()] * 2  # the second unit was not active
    assert distance(guesses, x[None] + 0.5) == 0.25
    assert inverted(np.array([[9.0]]), np.array([1.0]), 0.0, 1.0).tolist() == [[1.0]]
    assert distance(guesses[:0], x[None]) == float("inf")


@pytest.mark.slow
@pytest.mark.parametrize("bits", [32, 64])
def test_a_masked_vector_shows_no_more_than_the_mean_image_and_a_plain_update_all(bits):
    found = [measured(seed, 1, bits) for seed in range(5)]
    assert all(each.plain < 1e-6 for each in found)
    assert all(each.masked >= each.mean > 0.01 for each in found)
