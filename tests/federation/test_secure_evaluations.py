"""Evaluations by clients in secure sums, as a user runs them: processes, certificates, pinned peers, kill -9."""

import pytest
import torch

from atoll.tensors.safetensors_file import read
from tests.federation.processes import federation
from tests.federation.test_pinned_sites import actions_of, check_sums, introduced, started
from tests.federation.test_secure_sums import SECURE
from tests.simulations.federation import line_task
from tests.simulations.federation.simulating import TASK
from tests.waiting import BOUND_S

SETTINGS = {**SECURE, "evaluation__server_every": 0, "evaluation__clients_every": 1, "secure__metrics__accuracy": 2}


def sums_of(it):
    """Return the sums of the clients' evaluations by version, as the coordinator keeps them."""
    rows = it.history().evaluations("trouble-1")
    return {row.version: row.statistics for row in rows if row.source == "clients"}


def measured(it, version, sites):
    """Measure a version on the test data of sites, in this process."""
    model = line_task.model()
    found = read(it.state / "runs" / "trouble-1" / "versions" / f"{version:06d}.safetensors")
    model.load_state_dict({name: torch.from_numpy(value.copy()) for name, value in found.items()})
    inputs, targets = (torch.cat(c) for c in zip(*(line_task.data(s, "test").tensors for s in sites), strict=True))
    outputs = model(inputs).detach()
    loss = torch.nn.functional.cross_entropy(outputs, targets, reduction="sum")
    right = (outputs.argmax(1) == targets).sum()
    return {"accuracy": (float(right), len(targets)), "loss": (float(loss), len(targets))}


def test_sites_that_demand_sums_evaluate_in_them_and_one_that_is_killed_is_left_out(tmp_path):
    with federation(tmp_path, task=TASK) as it:
        it.coordinator(**SETTINGS, rounds=2, round__min_available=4)
        introduced(it)
        started(it, "abc")
        policy = str(it.folder / "d.toml")
        it.agent("d", policy=policy, environment={"ATOLL_CRASH_AT": "agent.promised/joined:2"}).wait(BOUND_S)
        it.agent("d", policy=policy)
        assert it.wait_for_end() == 0, it.log("coordinator")
        found = sums_of(it)
        for version, sites in ((1, "abc"), (2, "abcd")):
            for name, sums in measured(it, version, sites).items():
                assert found[version][name] == pytest.approx(sums, rel=1e-4, abs=1e-3), (version, name)
        log = it.log("coordinator")
        assert "version 1: evaluated by 3 clients in secure sums" in log
        assert "version 2: evaluated by 4 clients in secure sums" in log
        run = it.show("run", "show", "trouble-1")
        assert run["metrics"]["2"]["clients"]["accuracy"] == found[2]["accuracy"][0] / found[2]["accuracy"][1]
        assert it.wait_for_end("a") == 0
        check_sums(it, "a", num_sums=4, threshold=0)
        assert "secure.opened" in actions_of(it, "a")


@pytest.mark.parametrize("step", ["round.entry/MaskedCame:2", "round.effect/OpenSum:2"])
def test_a_coordinator_that_is_killed_in_an_evaluation_opens_the_same_sums(tmp_path, step):
    with federation(tmp_path, task=TASK) as it:
        settings = {**SETTINGS, "rounds": 1, "round__min_available": 4}
        it.coordinator(**settings, environment={"ATOLL_CRASH_AT": step})
        for site in "abcd":
            it.agent(site)
        it.running["coordinator"].wait(BOUND_S)
        it.coordinator(**settings)
        assert it.wait_for_end() == 0, it.log("coordinator")
        for name, sums in measured(it, 1, "abcd").items():
            assert sums_of(it)[1][name] == pytest.approx(sums, rel=1e-4, abs=1e-3)
