"""Algorithms in which the client takes part, as a user runs them: real processes, and the numbers of the reference."""

from pathlib import Path

import numpy as np
import pytest

from atoll.aggregation.tensorfile import read
from tests.federation.processes import federation

TASK = str(Path(__file__).with_name("quadratics.py")) + ":task"
BOTH = {"round__cohort_size": 2, "evaluation__server_every": 0, "aggregation__weighting": "uniform"}


def models(it, num_rounds):
    folder = it.state / "runs" / "trouble-1" / "versions"
    return [read(folder / f"{version:06d}.safetensors") for version in range(1, num_rounds + 1)]


def run(folder, num_rounds, **settings):
    """The models of a federation of "a" and "b"."""
    with federation(folder, task=TASK) as it:
        it.coordinator(rounds=num_rounds, **BOTH, **settings)
        for site in "ab":
            it.agent(site)
        assert it.wait_for_end() == 0, it.log("coordinator")
        return models(it, num_rounds)


def test_fednova_follows_the_reference_where_sites_take_two_and_ten_steps(tmp_path):
    first, second = run(tmp_path, 2, aggregation__algorithm="fednova")
    assert first["x"] == pytest.approx([5.400845545], rel=1e-6)
    assert second["x"] == pytest.approx([3.453222027], rel=1e-6)
    np.testing.assert_array_equal(first["seen"], [6.0])  # buffers are averaged, not normalized: (2 + 10) / 2
    assert first["count"] == 6
