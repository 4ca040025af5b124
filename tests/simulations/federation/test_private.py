"""Simulated private runs: the same budget as a deployed one, marked as no guarantee."""

import pytest

import atoll
from atoll.exports.folders import SimulatedFolder
from atoll.protocol.settings import ConfigError
from tests.simulations.federation.simulating import model, simulate

PRIVATE = (
    "rounds=40",
    "round.cohort_size=4",
    'aggregation.weighting="uniform"',
    "privacy.epsilon=6.0",
    "privacy.delta=1e-5",
    "privacy.clip_norm=0.5",
    "privacy.participations_max=3",
)


def test_a_simulation_ends_by_its_budget_and_is_marked_as_no_guarantee(tmp_path):
    result, lines = simulate(tmp_path / "run", *PRIVATE)
    assert result["cause"] == "the privacy budget is spent: epsilon 6 of 6 at delta 1e-05 after 3 rounds"
    spent = [line["epsilon"] for line in lines if "epsilon" in line]
    assert spent == sorted(spent)
    assert spent[-1] == pytest.approx(6.0, abs=1e-6)
    run = atoll.SimulatedRun(tmp_path / "run")
    assert run.privacy is not None
    assert run.privacy["epsilon"] == spent[-1]
    assert run.privacy["clients_with_budget"] == 0
    assert run.privacy["simulated"]
    assert run.privacy["sentence"].startswith("no guarantee, as the noise of a simulation follows from its seed; ")
    assert "epsilon 6 at delta 1e-05 for one client: adjacent are runs" in run.privacy["sentence"]
    exported = SimulatedFolder(tmp_path / "run")
    assert [row.values["round/epsilon"] for row in exported.rows() if "round/epsilon" in row.values] == spent
    assert exported.state().facts["privacy"] == run.privacy["sentence"]


def test_a_delta_with_which_one_of_the_simulated_clients_may_be_published_is_refused(tmp_path):
    few = [each for each in PRIVATE if "cohort_size" not in each and "delta" not in each]
    with pytest.raises(ConfigError, match=r"privacy.delta: got 0.3, and with .* 1 / 4 or more allows") as caught:
        simulate(tmp_path / "run", *few, "round.cohort_size=3", "privacy.delta=0.3")
    assert len(caught.value.faults) == 1
    assert not (tmp_path / "run" / "rounds.jsonl").exists()


EXAMPLES = (
    "rounds=40",
    "round.cohort_size=4",
    'privacy.unit="example"',
    "privacy.epsilon=8.0",
    "privacy.delta=1e-3",
    "privacy.clip_norm=0.5",
    "privacy.sample_rate=0.2",
    "privacy.noise_multiplier=2.0",
    "privacy.participations_max=3",
    "local.max_steps=4",
)


@pytest.mark.parametrize("secure", [(), ("secure.clip_norm=10.0", "secure.examples_max=20", "secure.bits=64")])
def test_a_run_that_protects_examples_ends_by_its_budget_also_in_secure_sums(tmp_path, secure):
    result, found = simulate(tmp_path / "run", *EXAMPLES, *secure)
    assert result["cause"].startswith("the privacy budget is spent: epsilon")
    assert result["version"] == 3
    assert [line["epsilon"] for line in found if "epsilon" in line] == sorted(
        line["epsilon"] for line in found if "epsilon" in line
    )
    run = atoll.SimulatedRun(tmp_path / "run")
    assert run.privacy is not None
    assert (run.privacy["unit"], run.privacy["uses"], run.privacy["clients_with_budget"]) == ("example", 12, 0)
    assert "each site adds the noise of its own examples" in run.privacy["sentence"]


def test_the_simulated_noise_of_examples_is_in_the_version_and_the_same_again(tmp_path):
    for name in ("one", "two"):
        simulate(tmp_path / name, *EXAMPLES)
    one, two = model(tmp_path / "one", 3), model(tmp_path / "two", 3)
    assert all((one[name] == two[name]).all() for name in one)
    simulate(tmp_path / "plain", "rounds=3", "round.cohort_size=4", "local.max_steps=4")
    plain = model(tmp_path / "plain", 3)
    assert max(abs(one[name] - plain[name]).max() for name in one) > 0.05
