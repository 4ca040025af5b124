"""Inference of membership from one update: a plain one tells the examples, a masked vector nothing."""

import statistics

import numpy as np
import pytest

from atoll.simulations.attacks.membership import auc, scores
from benchmarks.secure_disclosure import told


def test_the_score_is_the_cosine_with_the_step_that_an_example_wants():
    gradients = np.array([[3.0, 4.0], [-3.0, -4.0], [4.0, -3.0], [0.0, 0.0]])
    assert scores(np.array([6.0, 8.0]), gradients).tolist() == [-1.0, 1.0, 0.0, 0.0]


def test_the_area_counts_pairs():
    assert auc(np.array([2.0, 3.0]), np.array([1.0, 0.0])) == 1.0
    assert auc(np.array([1.0]), np.array([1.0])) == 0.5
    assert auc(np.array([0.0, 2.0]), np.array([1.0, 3.0])) == 0.25


@pytest.mark.slow
def test_a_masked_vector_tells_no_member_and_a_plain_update_does():
    areas = [told(seed) for seed in range(10)]
    plain, hidden = (statistics.mean(each) for each in zip(*areas, strict=True))
    assert plain > 0.75
    assert abs(hidden - 0.5) < 0.2  # the masks are fresh: six standard deviations, sqrt(33 / (12 16^2) / 10) = 0.033
