"""What is simulated is what is deployed: the same settings end in the same bits, by processes on sockets or by none."""

import pytest

from tests.federation.processes import federation
from tests.simulations.federation import lines as lines_task
from tests.simulations.federation.simulating import TASK, simulate

CASES = {
    "fedavg": {},
    "fedadam_and_a_norm_bound": {"optimizer__name": "fedadam", "aggregation__norm_bound": 0.05},
    "fednova": {"aggregation__algorithm": "fednova", "local__momentum": 0.5},
    "scaffold": {"aggregation__algorithm": "scaffold", "aggregation__num_clients": 4},
    "qsgd8": {"aggregation__codec": "qsgd8"},
    "topk": {"aggregation__codec": "topk", "aggregation__topk_fraction": 0.25},
    "median": {"aggregation__rule": "median"},
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_a_simulated_and_a_deployed_run_end_with_the_same_model(case, tmp_path):
    given = {"rounds": 3, "round__cohort_size": 4, "seed": 5, "name": "same", **CASES[case]}
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(**given)
        for site in lines_task.SITES:
            it.agent(site, threads=1)
        assert it.wait_for_end() == 0
        deployed = it.history().run("same-1")
        digests = [str(version.digest) for version in it.history().versions("same-1")]
    overrides = [f"{key.replace('__', '.')}={value}" for key, value in given.items()]
    simulated, told = simulate(tmp_path / "simulated", *overrides)
    assert str(deployed.state) == simulated["state"] == "finished"
    assert simulated["model_digest"] == digests[-1]
    assert [line["version"] for line in told] == [1, 2, 3]
