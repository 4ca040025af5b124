"""What is simulated is what is deployed: the same settings end in the same bits, by processes on sockets or by none."""

import numpy as np
import pytest

from atoll.tensors.safetensors_file import read
from tests.cli.invoking import ran
from tests.federation.processes import federation
from tests.simulations.federation import line_task as lines_task
from tests.simulations.federation.simulating import TASK, model, simulate

GIVEN = ("rounds=3", "round.cohort_size=4", "round.min_available=4", "seed=5")
CASES = {
    "fedadam_and_a_norm_bound": ("optimizer.name=fedadam", "aggregation.norm_bound=0.05"),
    "fednova_in_rows": ("aggregation.algorithm=fednova", "local.momentum=0.5"),
    "scaffold_in_rows": ("aggregation.algorithm=scaffold", "aggregation.num_clients=4"),
    "two_of_four": ("round.cohort_size=2",),
    "topk": ("aggregation.codec=topk", "aggregation.topk_fraction=0.25"),
}


@pytest.mark.slow
def test_a_simulated_and_a_deployed_run_end_with_the_same_model(tmp_path):
    """One deployed federation hosts all of them, one after the other."""
    settings = {case: (f"name={case}", *GIVEN, *CASES[case]) for case in CASES}
    with federation(tmp_path, task=TASK) as it:
        it.start("coordinator", "coordinator", "--state", it.state, "--set", f"coordinator.listen={it.address}")
        for site in lines_task.SITES:
            it.agent(site, threads=1, exit_when_done=False)
        it.wait_for(lambda: "no run yet" in it.log("coordinator"))
        for overrides in settings.values():
            given = [part for override in overrides for part in ("--set", override)]
            ran("run", "start", TASK, "--state", it.state, *given)
        last = list(CASES)[-1]
        it.wait_for(lambda: str(it.history().run(f"{last}-1").state) == "finished")
        deployed = {case: str(it.history().versions(f"{case}-1")[-1].digest) for case in CASES}
    simulated = {case: simulate(tmp_path / case, *settings[case])[0]["model_digest"] for case in CASES}
    assert simulated == deployed
    assert len(set(deployed.values())) == len(CASES)


SECURE = ("secure.clip_norm=0.5", "secure.examples_max=8", "secure.bits=64", "secure.metrics.accuracy=2")


@pytest.mark.slow
def test_a_simulated_and_a_deployed_run_of_secure_sums_end_with_the_same_model(tmp_path):
    """Agents round values by secret numbers; with 64 bits these differ by 2^-44 of the range.

    In one of some thousand runs that moves a float32 to its neighbour, and with it what is trained from it.
    """
    keys = {key.replace(".", "__"): value for key, _, value in (given.partition("=") for given in (*GIVEN, *SECURE))}
    given = {key: float(value) if key == "secure__clip_norm" else int(value) for key, value in keys.items()}
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(**given)
        for site in lines_task.SITES:
            it.agent(site, threads=1)
        assert it.wait_for_end() == 0
        records = it.rounds()
        found = read(it.state / "runs" / "trouble-1" / "versions" / "000003.safetensors")
    _, lines = simulate(tmp_path / "simulated", "name=trouble", *GIVEN, *SECURE)
    assert [line["version"] for line in lines] == [record.version for record in records] == [1, 2, 3]
    expected = model(tmp_path / "simulated", 3)
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        np.testing.assert_allclose(found[name], array, rtol=0, atol=1e-6)
