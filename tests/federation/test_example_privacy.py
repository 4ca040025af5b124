"""A run of real processes that protects examples: its agent is killed after a training, and repeats it bit by bit."""

import json

import numpy as np

from atoll.tensors.safetensors_file import read
from tests.cli.invoking import ran
from tests.federation.processes import federation
from tests.simulations.federation.simulating import TASK
from tests.waiting import BOUND_S

SETTINGS = {
    **{"name": "examples", "rounds": 40, "round__cohort_size": 1, "evaluation__server_every": 1},
    **{"coordinator__keep_versions": 50, "local__max_steps": 4, "local__momentum": 0.5},
    **{"privacy__unit": "example", "privacy__epsilon": 8.0, "privacy__delta": 1e-3, "privacy__clip_norm": 0.5},
    **{"privacy__sample_rate": 0.2, "privacy__noise_multiplier": 2.0, "privacy__participations_max": 3},
}


def of_version(it, number):
    return read(it.state / "runs" / "examples-1" / "versions" / f"{number:06d}.safetensors")


def test_a_killed_agent_draws_the_same_samples_and_noise_and_the_budget_ends_the_run(tmp_path):
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(**SETTINGS)
        dying = it.agent("c", threads=1, environment={"ATOLL_CRASH_AT": "agent.trained:2"})
        assert dying.wait(BOUND_S) == -9, it.log("c")
        lost = {name: array.copy() for name, array in read(it.folder / "c" / "work" / "update.safetensors").items()}
        it.agent("c", threads=1)
        assert it.wait_for_end() == 0, it.log("coordinator")
        before, after = of_version(it, 1), of_version(it, 2)
        run, guarantee = it.show("run", "show", "examples-1"), it.show("privacy", "show", "examples-1")
        said = ran("privacy", "show", "examples-1", "--state", it.state).stdout
        of_round = ran("round", "show", "2", "--run", "examples-1", "--state", it.state).stdout
        secret = (it.folder / "c" / "noise.key").read_text().strip()
        assert secret not in it.log("c") + it.log("coordinator")
    assert run["cause"].startswith("the privacy budget is spent: epsilon"), run["cause"]
    assert run["version"] == 3
    for name, array in lost.items():
        np.testing.assert_allclose(after[name] - before[name], array, rtol=0, atol=1e-6)
    assert max(np.abs(array).max() for array in lost.values()) > 1e-3
    assert (guarantee["unit"], guarantee["uses"], guarantee["noise_by"]) == ("example", 12, "site")
    assert 0 < guarantee["epsilon"] <= 8
    assert "for one example: adjacent are runs in one of which one client has one example more" in said
    assert "each site adds the noise of its own examples" in said
    assert "Charged: 1 client for a private sum" in of_round
    assert "training" not in json.dumps(run["metrics"]), "no metric of the training is kept"
