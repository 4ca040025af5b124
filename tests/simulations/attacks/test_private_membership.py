"""Inference of membership from a released model: it finds the rows of a plain training, and not those of a private one.

The attack knows the first and the last version: a row of the training is one whose loss has fallen more. For a Gaussian
mechanism with mu no attack has a larger area under its ROC curve than Phi(mu / sqrt(2)) (Dong, Roth, Su 2019).
"""

import math
import statistics

import numpy as np
import pytest
import torch
from torch import nn

from atoll.simulations.attacks.membership import auc
from tests.operations import audited
from tests.simulations.federation.simulating import model, simulate

TASK = "tests/operations/audited.py:task"
BOTH = ("rounds=2", "round.cohort_size=2", "local.epochs=5", "local.max_steps=5", "local.lr=0.5")
PRIVATE = (
    'privacy.unit="example"',
    "privacy.epsilon=1.0",
    "privacy.delta=1e-5",
    "privacy.clip_norm=1.0",
    "privacy.sample_rate=1.0",
)
DEVIATION = math.sqrt(1 / 800 + 1 / 800) / math.sqrt(12)
"""Standard deviation of the area of 800 members and 800 others, of which nothing is known."""


def area(folder, *settings):
    """Return the area under the ROC curve of how far the loss of a row has fallen, and the result of the run."""
    result, _ = simulate(folder, *BOTH, *settings, task=TASK)
    versions = [torch.from_numpy(model(folder, version)["weight"]) for version in (0, 2)]
    members, others = (np.concatenate([fallen(*versions, site) for site in sites]) for sites in ("ns", "xy"))
    return auc(members, others), result


def fallen(first, last, site):
    """Return by how much the loss of each row of a site has fallen."""
    inputs, labels = audited.load(site, "train").tensors
    before, after = (nn.functional.cross_entropy(inputs @ of.T, labels, reduction="none") for of in (first, last))
    return (before - after).numpy()


@pytest.mark.slow
def test_a_private_model_tells_no_member_and_a_plain_one_does(tmp_path):
    plain, _ = area(tmp_path / "plain", "local.batch_size=400")
    assert plain > 0.85
    found, result = area(tmp_path / "private", *PRIVATE)
    account = result["privacy"]
    assert account["uses"] == 10
    mu = math.sqrt(10) / account["noise_multiplier"]
    most = statistics.NormalDist().cdf(mu / math.sqrt(2))
    assert most < 0.6
    assert abs(found - 0.5) <= (most - 0.5) + 4 * DEVIATION
