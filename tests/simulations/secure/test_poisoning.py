"""Sites that ignore the bound, 8 of 40: what they cost with 8 sessions, and who is named."""

import pytest

from benchmarks.secure_poisoning import ATTACK, LOSS_MAX, SECURE, poisoned, simulated


@pytest.mark.real
@pytest.mark.slow
def test_sites_that_ignore_the_bound_are_named_and_the_rest_learns(tmp_path):
    ruined = simulated(tmp_path / "plain", rounds=6, **ATTACK)
    found = simulated(tmp_path / "secure", rounds=10, **SECURE, **ATTACK)
    assert ruined["accuracy"] < 0.3
    assert found["accuracy"] > 0.7
    assert {*found["malicious"]} <= {*found["named"]}
    assert len(found["named"]) < 20
    assert found["versions"] == 10


@pytest.mark.long
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_sites_that_ignore_the_bound_cost_no_accuracy(tmp_path, seed):
    none, bad = poisoned(tmp_path, 60, seed, SECURE)
    assert none["accuracy"] - bad["accuracy"] <= LOSS_MAX
    assert {*bad["malicious"]} <= {*bad["named"]}
