"""Simulated private runs: the same budget as a deployed one, marked as no guarantee."""

import math

import numpy as np
import pytest

import atoll
from atoll.exports.folders import SimulatedFolder
from atoll.protocol.settings import ConfigError
from tests.simulations.federation.simulating import lines, model, simulate

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
    assert run.privacy["epsilon"] == found[-1]["epsilon"], "one number in the rounds and in the guarantee"


def test_the_simulated_noise_of_examples_is_in_the_version_and_the_same_again(tmp_path):
    for name in ("one", "two"):
        simulate(tmp_path / name, *EXAMPLES)
    one, two = model(tmp_path / "one", 3), model(tmp_path / "two", 3)
    assert all((one[name] == two[name]).all() for name in one)
    simulate(tmp_path / "plain", "rounds=3", "round.cohort_size=4", "local.max_steps=4")
    plain = model(tmp_path / "plain", 3)
    assert max(abs(one[name] - plain[name]).max() for name in one) > 0.05


COHORT_OF_NOISE = ("simulation.noise_cohort_size=1000", 'simulation.engine="sequential"')
BIG = (
    "rounds=1",
    "round.cohort_size=4",
    'aggregation.weighting="uniform"',
    "privacy.epsilon=1.0",
    "privacy.delta=1e-6",
    "privacy.clip_norm=2.0",
    "privacy.noise_multiplier=50.0",
)


def noise_of(folder, *more):
    """Return the difference of a private version 1 to that of updates of (almost) no length, and the run."""
    simulate(folder, *BIG, "local.lr=1e-30", *more, task="tests/simulations/federation/wide_task.py:task")
    first, second = model(folder, 0), model(folder, 1)
    return np.concatenate([(second[name] - first[name]).ravel() for name in first]), atoll.SimulatedRun(folder)


@pytest.mark.parametrize("clip", [(), ('privacy.clip="adaptive"', "privacy.clip_sigma=500.0")])
def test_fewer_clients_have_the_noise_of_a_cohort_and_every_record_says_that_there_is_no_guarantee(tmp_path, clip):
    noise, run = noise_of(tmp_path / "run", *COHORT_OF_NOISE, *clip)
    z = 50.0 if not clip else (50.0**-2 - 1000.0**-2) ** -0.5
    assert len(noise) >= 20_000
    assert noise.std() == pytest.approx(z * 2.0 / 1000, rel=0.02)  # of 20,000 draws: four deviations
    (line,) = lines(tmp_path / "run")
    assert (line["epsilon"], line["noise_cohort_size"]) == (run.privacy["epsilon"], 1000)
    assert run.privacy["simulated"]
    assert run.privacy["noise_cohort_size"] == 1000
    assert run.privacy["sentence"].startswith(
        "no guarantee, as the noise of a simulation follows from its seed, and its sums of 4 clients have the noise of "
        "a cohort of 1,000; deployed with cohorts of 1000 clients it would be: epsilon "
    )
    exported = SimulatedFolder(tmp_path / "run")
    assert exported.state().facts["privacy"] == run.privacy["sentence"]
    assert exported.about().settings["simulation.noise_cohort_size"] == 1000


def test_without_it_the_noise_is_of_the_simulated_cohort(tmp_path):
    noise, run = noise_of(tmp_path / "run")
    assert noise.std() == pytest.approx(50.0 * 2.0 / 4, rel=0.02)
    assert "noise_cohort_size" not in run.privacy
    assert "noise_cohort_size" not in lines(tmp_path / "run")[0]


def test_a_resumed_run_keeps_the_cohort_of_its_noise_and_an_export_tells_two_of_them_apart(tmp_path):
    simulate(tmp_path / "run", *PRIVATE, "simulation.noise_cohort_size=40")
    with pytest.raises(ConfigError, match=r"simulation.noise_cohort_size: '40' there, '50' here"):
        simulate(tmp_path / "run", *PRIVATE, "simulation.noise_cohort_size=50")
    name = SimulatedFolder(tmp_path / "run").about().id
    text = (tmp_path / "run" / "run.toml").read_text()
    (tmp_path / "run" / "SHA256SUMS").unlink()
    (tmp_path / "run" / "run.toml").write_text(text.replace("noise_cohort_size = 40", "noise_cohort_size = 50"))
    assert SimulatedFolder(tmp_path / "run").about().id != name


NO_PRIVACY = ("rounds=1", "round.cohort_size=4")
WRONG = {
    "no noise": (NO_PRIVACY, "got 9, and the run has no noise: allowed with a table"),
    "examples": (
        EXAMPLES,
        "each site's noise is as long as in any other cohort: allowed with noise by the coordinator",
    ),
    "clients": (
        (*PRIVATE, 'privacy.noise_by="clients"', "secure.clip_norm=0.5"),
        "the clients add the noise, for which the size of their sessions decides",
    ),
    "fewer": ((*PRIVATE, "simulation.noise_cohort_size=3"), "got 3, which is less than round.cohort_size"),
    "delta": ((*PRIVATE, "simulation.noise_cohort_size=200000"), "privacy.delta: got 1e-05, and with .* 1 / 200000"),
    "a grid": (
        (*PRIVATE[:4], "privacy.delta=1e-9", *PRIVATE[5:], "simulation.noise_cohort_size=100000000"),
        "leaves the 52 bits of its grid",
    ),
}


@pytest.mark.parametrize("case", WRONG)
def test_a_cohort_whose_noise_the_sums_cannot_have_is_refused(case, tmp_path):
    settings, why = WRONG[case]
    with pytest.raises(ConfigError, match=why) as caught:
        simulate(tmp_path / "run", "simulation.noise_cohort_size=9", *settings)
    assert len(caught.value.faults) == 1
    assert not (tmp_path / "run" / "rounds.jsonl").exists()


def test_every_value_of_a_version_has_noise_of_its_own(tmp_path):
    noise, _ = noise_of(tmp_path / "run")
    assert np.count_nonzero(noise) == noise.size
    assert len(np.unique(noise)) > 0.99 * noise.size
    lag = np.corrcoef(noise[:-1], noise[1:])[0, 1]
    assert abs(lag) < 5 / math.sqrt(noise.size)


def test_updates_are_clipped_and_not_the_weights(tmp_path):
    """The weights are longer than the clip norm, the updates shorter: nothing is scaled down."""
    plain = ("rounds=1", "round.cohort_size=4", 'aggregation.weighting="uniform"', 'simulation.engine="sequential"')
    private = ("privacy.epsilon=1e9", "privacy.delta=1e-6", "privacy.clip_norm=1.0", "privacy.noise_multiplier=1e-3")
    moved = {}
    for name, settings in (("plain", plain), ("private", plain + private)):
        simulate(tmp_path / name, *settings, "local.lr=0.01", task="tests/simulations/federation/wide_task.py:task")
        first, second = (model(tmp_path / name, version)["weight"] for version in (0, 1))
        assert np.linalg.norm(first) > 1.5
        moved[name] = second - first
    assert 0.1 < np.linalg.norm(moved["plain"]) < 0.9
    noise = 1e-3 * math.sqrt(moved["plain"].size) / 4
    assert np.linalg.norm(moved["private"] - moved["plain"]) < 1.2 * noise
